"""Output streams whose failure does not end a run, or is an error that names the stream."""

from __future__ import annotations

import os
from typing import IO, Any, cast


class NamedStream:
    """Passes everything on to a stream.

    Args:
        name: ``filename`` of the OSError of a failed write. None: a failed write, and all that follow, are discarded.
    """

    def __init__(self, stream: IO[str], name: str | None) -> None:
        self._stream, self._name = stream, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._handle(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._handle(error)

    def _handle(self, error: OSError) -> None:
        if self._name is None:
            discard_pending_output(self._stream)
        else:
            error.filename = self._name
            raise error


def resilient(stream: IO[str]) -> IO[str]:
    """Wrap a stream so that a closed pipe or a full disk drops the output instead of raising."""
    return cast("IO[str]", NamedStream(stream, None))


def discard_pending_output(stream: IO[str]) -> None:
    """Redirect a broken stream to the null device; else Python fails at exit when it flushes the buffer."""
    null_device = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null_device, stream.fileno())
    finally:
        os.close(null_device)
