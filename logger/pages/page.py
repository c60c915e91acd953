"""Render self-contained HTML pages from Jinja templates.

Templates extend ``logger.pages/page.html``, which brings styles, color schemes and the content security policy. Values
are escaped; `Markup` is text that is HTML already.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup


def fill_page(
    titles: tuple[str, str],
    sections: Mapping[str, str],
    charts: list[dict[str, Any]],
    notes: list[str],
    states: list[str],
    headline: list[tuple[str, str, str]] | None = None,
) -> str:
    """Render a page of sections with charts, tables and samples.

    Args:
        titles: of the window and of the page.
        sections: HTML by heading; empty ones are left out.
        charts: values of all charts, for the script (`logger.pages.charts.draw_charts`).
        notes: warnings that precede the sections.
        states: list items below the heading.
        headline: main numbers: name, value and a line below; None: there are none.

    Raises:
        ValueError: a value of a chart is not finite, which JSON cannot express.
    """
    return render_template(
        "logger.pages/sections.html",
        title=titles[0],
        heading=titles[1],
        sections={name: Markup(html) for name, html in sections.items() if html},
        data=charts,
        notes=notes,
        states=states,
        headline=headline,
    )


def render_template(template: str, **values: Any) -> str:
    """Render a template.

    Args:
        template: package and file, as in ``cli.infer/replay.html``.
        values: the template's variables; `logger/pages/page.html` needs ``title`` and ``data``, which becomes JSON.

    Raises:
        ValueError: ``data`` has a number that is not finite.
    """
    return _environment.get_template(template).render(values)


def _read(name: str) -> str:
    package, _, file = name.partition("/")
    return resources.files(package).joinpath(file).read_text(encoding="utf-8")


_environment = Environment(
    loader=FunctionLoader(_read), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
_environment.globals["source"] = lambda name: Markup(_read(name).rstrip("\n"))
_environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
