"""Consoles of rich: one way to decide what a stream can show, for all commands."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

from files.terminal_text import accepts_escapes

if TYPE_CHECKING:
    from rich.console import Console

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
