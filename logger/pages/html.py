"""Render pages as self-contained HTML files: styles, scripts and values are inside, and nothing is fetched.

Jinja templates hold the HTML: ``page.html`` the frame, ``parts.html`` tables, charts and examples. Values are escaped,
and their control characters shown as escapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from files.atomic import write_text_atomic
from files.terminal_text import escape_control_characters
from logger.pages import Chart, Link, Page, Part, cut_text
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
    return _environment.get_template("page.html").render(page=page, sections=sections, data=data)


def _group_charts(parts: Sequence[Part], data: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Iterate over kind and value of each part; charts that follow each other stand side by side.

    Args:
        data: gets the values of each chart, for the script.
    """
    for kind, members in groupby(parts, lambda part: type(part).__name__):
        if kind != "Chart":
            yield from ((kind, part) for part in members)
            continue
        drawings = [draw_chart(chart) for chart in members if isinstance(chart, Chart)]
        yield "charts", [{**figure, "number": len(data) + index} for index, (figure, _) in enumerate(drawings)]
        data += [values for _, values in drawings]


def _mark_line_breaks(text: str) -> Markup:
    return _LINE_BREAK.join(map(escape_text, text.split("\n")))


def _mark_masked_spans(text: str) -> Markup:
    """Show masked spans as boxes with their number of tokens."""
    # Escaping changes neither brackets nor colons.
    return Markup(_MASKED_SPAN.sub(r'<span class="hole">\1</span>', str(escape_text(text))))


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


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
}
