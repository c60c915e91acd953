"""Render pages, tables and lines of text in a terminal, or as plain text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import IO, TYPE_CHECKING

from files.terminal_text import accepts_escapes, escape_control_characters
from logger.pages import Page, Part, Table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

UNLIMITED_WIDTH = 1_000_000
"""Columns of a pipe or a file: nothing is wrapped there."""


def make_console(stream: IO[str], *, is_forced: bool = False) -> Console:
    """A console that takes text literally (no markup), and writes no escape sequence where `accepts_escapes` is False.

    Args:
        is_forced: treat the stream as a terminal in any case, without colors where `accepts_escapes` is False.
    """
    from rich.console import Console  # importing it takes a tenth of a second

    has_color = accepts_escapes(stream)
    return Console(
        file=stream,
        force_terminal=has_color or is_forced,
        force_interactive=has_color or is_forced,
        force_jupyter=False,
        color_system="auto" if has_color else None,
        width=None if stream.isatty() or is_forced else UNLIMITED_WIDTH,
        markup=False,
        emoji=False,
        highlight=False,
    )


def print_parts(parts: Iterable[Part | Text], stream: IO[str] | None = None) -> None:
    """Print tables and lines of text, which may have styles of rich. None: on standard output."""
    output = sys.stdout if stream is None else stream
    print(render_text(parts, output), file=output, flush=True)


def render_text(parts: Iterable[Part | Text], stream: IO[str]) -> str:
    """Render tables and lines: complete and plain for a pipe or a file, else for the width of the terminal.

    Control characters are shown as escapes. Charts, examples and code are on pages alone.
    """
    from rich.text import Text

    console = make_console(stream)
    with console.capture() as capture:
        for part in parts:
            if isinstance(part, Text):
                console.print(part, soft_wrap=True)
            elif isinstance(part, str):
                console.print(Text(escape_control_characters(part)), soft_wrap=True)
            elif isinstance(part, Table):
                console.print(build_grid(part), soft_wrap=True)
                if part.note:
                    console.print(Text(escape_control_characters(part.note.replace("±", "+-"))), soft_wrap=True)
    return "\n".join(line.rstrip() for line in capture.get().removesuffix("\n").split("\n"))


def list_parts(page: Page) -> Iterator[Part]:
    """Iterate over the parts of a page, its title and headings among them."""
    yield from (page.title, *page.states, *page.notes)
    for title, parts in page.sections.items():
        yield from ("", title)
        for part in parts:
            if isinstance(part, Table) and part.title:
                yield part.title
            yield part


def build_grid(table: Table) -> RenderableType:
    """Build aligned columns, two spaces apart. A terminal shows long cells on several lines."""
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid.grid(padding=(0, 2, 0, 0))
    for is_right in table.is_right:
        grid.add_column(justify="right" if is_right else "left", overflow="fold")
    if table.heads:
        grid.add_row(*(Text(escape_control_characters(head)) for head in table.heads), style="bold")
    for index, row in enumerate(table.rows):
        cells = (Text(escape_control_characters(text.replace("±", "+-"))) for text in table.texts(row))
        grid.add_row(*cells, style="bold" if index == table.best_row else None)
    return grid
