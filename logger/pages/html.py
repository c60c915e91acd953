"""Render pages as self-contained HTML files: styles, scripts and values are inside, and nothing is fetched.

Jinja templates hold the HTML: ``parts.html`` that of tables, charts and examples. All extend ``page.html``, which
brings styles, color schemes and the content security policy. Values are escaped, and their control characters shown as
escapes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from files.atomic import write_text_atomic
from files.terminal_text import escape_control_characters
from logger.pages import Cell, Chart, Link, Number, Page, Part, cut_text
from logger.pages.charts import draw_chart, escape_text
from logger.pages.markdown import render_markdown

MAX_TEXT = 4_000
"""Characters of a text; the files of the run contain all of it."""

_LINE_BREAK = Markup('<i aria-label="line break">↵</i>\n')

_MASKED_SPAN = re.compile(r"\[MASK:([^\[\]\n]*)\]")


def write_page(page: Page, path: Path) -> None:
    """Write the HTML file atomically and, beside it with the suffix ``.md``, its Markdown version.

    Raises:
        OSError: a file cannot be written.
    """
    write_text_atomic(path, render_html(page))
    write_text_atomic(path.with_suffix(".md"), render_markdown(page))


def render_html(page: Page) -> str:
    """Render a page.

    Raises:
        ValueError: a value of a chart is not finite, which JSON cannot express.
    """
    data: list[dict[str, Any]] = []
    sections = {name: list(_group_charts(parts, data)) for name, parts in page.sections.items()}
    return render_template("logger.pages/sections.html", page=page, title=page.title, sections=sections, data=data)


def _group_charts(parts: Sequence[Part], data: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Return the kind and the value of each part; charts that follow each other stand side by side.

    Args:
        data: gets the values of each chart, for the script.
    """
    groups: list[tuple[str, Any]] = []
    for is_chart, members in groupby(parts, lambda part: isinstance(part, Chart)):
        if not is_chart:
            groups += [(type(part).__name__, part) for part in members]
            continue
        figures = []
        for chart in members:
            assert isinstance(chart, Chart)
            figure, values = draw_chart(chart)
            figures.append({**figure, "number": len(data)})
            data.append(values)
        groups.append(("charts", figures))
    return groups


def render_template(template: str, **values: Any) -> str:
    """Render a template.

    Args:
        template: package and file, as in ``logger.pages/sections.html``.
        values: the template's variables; `logger/pages/page.html` needs ``title`` and ``data``, which becomes JSON.

    Raises:
        ValueError: ``data`` has a number that is not finite.
    """
    return _environment.get_template(template).render(values)


def _sort_key(cell: Cell, text: str) -> str:
    """Return what a column is sorted by: the exact number, if it is one."""
    value = cell.value if isinstance(cell, Number) else cell
    return repr(value) if isinstance(value, int | float) else text


def _mark_line_breaks(text: str) -> Markup:
    return _LINE_BREAK.join(map(escape_text, text.split("\n")))


def _mark_masked_spans(text: str) -> Markup:
    """Show masked spans as boxes with their number of tokens."""
    # Escaping changes neither brackets nor colons.
    return Markup(_MASKED_SPAN.sub(r'<span class="hole">\1</span>', str(escape_text(text))))


def _read(name: str) -> str:
    package, _, file = name.partition("/")
    return resources.files(package).joinpath(file).read_text(encoding="utf-8")


_environment = Environment(
    loader=FunctionLoader(_read),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=lambda value: escape_control_characters(value) if type(value) is str else value,
)
_environment.globals["source"] = lambda name: Markup(_read(name).rstrip("\n"))
_environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
_environment.tests |= {"link": lambda cell: isinstance(cell, Link), "tuple": lambda cell: isinstance(cell, tuple)}
_environment.filters |= {
    "cut": lambda text: cut_text(text, MAX_TEXT),
    "line_breaks": _mark_line_breaks,
    "masked_spans": _mark_masked_spans,
    "sort_key": _sort_key,
}
