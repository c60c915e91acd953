"""Output streams whose failure does not end a run."""

from __future__ import annotations

import os
from typing import IO, Any, cast


class _ResilientStream:
    """Writes to a stream until a write fails; then discards everything."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            discard_pending_output(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            discard_pending_output(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def resilient(stream: IO[str]) -> IO[str]:
    """Wrap a stream so that a closed pipe or a full disk drops the output instead of raising."""
    return cast("IO[str]", _ResilientStream(stream))


def discard_pending_output(stream: IO[str]) -> None:
    """Redirect a broken stream to the null device; else Python fails at exit when it flushes the buffer."""
    null_device = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null_device, stream.fileno())
    finally:
        os.close(null_device)
