"""Tables, lists and text of a page. Text is escaped; `Markup` is HTML already."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

_REORDERING = re.compile("[\u202a-\u202e\u2066-\u2069]")
"""Unicode's embeddings, overrides and isolates."""

TableRow = tuple[str, list[str]]
"""A name and a cell for each column; "": no value."""


def join(parts: Iterable[str]) -> Markup:
    """Join HTML and text, which is escaped."""
    return Markup("").join(parts)


def isolate(text: str) -> Markup:
    """Escape text within a line, in an element of its own if its control characters would reorder its neighbors.

    Letters of other text stay in the line, so that scripts written from right to left keep their order and ligatures.
    """
    return Markup("<bdi>{}</bdi>").format(text) if _REORDERING.search(text) else escape(text)


def table(heads: Sequence[str], rows: Iterable[TableRow], first: str = "", classes: str = "") -> Markup:
    """Render a table with names at the left and ``first`` above them."""
    top = Markup("")
    if len(heads) > 1 or first:
        columns = join(Markup('<th scope="col">{}</th>').format(head) for head in heads)
        top = Markup("<thead><tr><th>{}</th>{}</tr></thead>").format(first, columns)
    body = join(
        Markup('<tr><th scope="row">{}</th>{}</tr>').format(
            name, join(Markup("<td>{}</td>").format(cell or "-") for cell in cells)
        )
        for name, cells in rows
    )
    return scrolling_table(Markup("{}<tbody>{}</tbody>").format(top, body), classes)


def scrolling_table(content: Markup, classes: str = "") -> Markup:
    """Render a table that scrolls in its own frame if it is wide."""
    return Markup('<div class="wide {}" tabindex="0" role="group"><table>{}</table></div>').format(classes, content)


def terms(items: Iterable[tuple[str, str]], classes: str) -> Markup:
    """Render names and values, as ``lines`` or, each name above its value, as ``facts``."""
    pairs = join(Markup("<div><dt>{}</dt><dd>{}</dd></div>").format(name, value) for name, value in items)
    return Markup('<dl class="{}">{}</dl>').format(classes, pairs)
