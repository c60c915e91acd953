"""Consoles of rich: one way to decide what a stream can show, for all commands."""

from __future__ import annotations

import os
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

UNLIMITED_WIDTH = 1_000_000
"""Columns of a pipe or a file: nothing is wrapped there."""


def accepts_escapes(stream: IO[str]) -> bool:
    """Return whether escape sequences may be written to a stream: a terminal, not a dumb one, and no NO_COLOR."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in ("dumb", "unknown")


def make_console(stream: IO[str]) -> Console:
    """A console that takes text literally (no markup), and writes no escape sequence where `accepts_escapes` is False.

    A terminal that is resized shows the next output at its new width.
    """
    from rich.console import Console  # importing it takes a tenth of a second

    has_escapes = accepts_escapes(stream)
    return Console(
        file=stream,
        force_terminal=has_escapes,
        force_interactive=has_escapes,
        force_jupyter=False,
        color_system="auto" if has_escapes else None,
        width=None if stream.isatty() else UNLIMITED_WIDTH,
        soft_wrap=True,
        markup=False,
        emoji=False,
        highlight=False,
    )
