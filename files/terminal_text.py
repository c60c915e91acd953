"""Print text from elsewhere (keys, paths, model output, file contents) so that a terminal only shows it."""

from __future__ import annotations

import os
import re
import sys
from typing import IO

_CONTROL_CHARACTER = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except newline and tab, bidirectional overrides and isolates, and bytes that are not UTF-8."""


def escape_control_characters(text: str) -> str:
    """Replace each control character by its escape, such as ``\\x1b``, so that no text can command the terminal."""
    return _CONTROL_CHARACTER.sub(lambda match: ascii(match[0])[1:-1], text)


def accepts_escapes(stream: IO[str]) -> bool:
    """Return whether escape sequences may be written to a stream: a terminal, not a dumb one, and no NO_COLOR."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in ("dumb", "unknown")


def print_line(text: str, stream: IO[str] | None = None) -> None:
    """Print a text for people, with control characters as escapes, and flush. None: on standard output."""
    print(escape_control_characters(text), file=sys.stdout if stream is None else stream, flush=True)


def print_message(text: str) -> None:
    """`print_line` on standard error."""
    print_line(text, sys.stderr)
