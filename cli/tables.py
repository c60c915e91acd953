"""Text and tables of a command's result."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import IO, TYPE_CHECKING

from files.terminal_text import escape_control_characters
from logger.terminal import make_console

if TYPE_CHECKING:
    from rich.console import RenderableType


def make_table(
    rows: Sequence[Sequence[str]], *, right: Collection[int] = (), has_header: bool = False
) -> RenderableType:
    """A table of aligned columns, two spaces apart. A terminal shows long cells on several lines.

    Args:
        rows: equally long rows.
        right: indices of the columns that are aligned to the right; all others are aligned to the left.
        has_header: the first row is a header.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for index in range(len(rows[0]) if rows else 0):
        table.add_column(justify="right" if index in right else "left", overflow="fold")
    for number, row in enumerate(rows):
        cells = (Text(escape_control_characters(cell)) for cell in row)
        table.add_row(*cells, style="bold" if has_header and number == 0 else None)
    return table


def render(parts: Sequence[RenderableType], stream: IO[str]) -> str:
    """Format tables and lines of text: complete and plain for a pipe or a file, else for the width of the terminal.

    Control characters are shown as escapes.
    """
    from rich.text import Text

    console = make_console(stream)
    with console.capture() as capture:
        for part in parts:
            console.print(Text(escape_control_characters(part)) if isinstance(part, str) else part, soft_wrap=True)
    return "\n".join(line.rstrip() for line in capture.get().removesuffix("\n").split("\n"))


def print_parts(parts: Sequence[RenderableType], stream: IO[str] | None = None) -> None:
    """Print tables and lines of text. None: on standard output."""
    output = sys.stdout if stream is None else stream
    print(render(parts, output), file=output, flush=True)
