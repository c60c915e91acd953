"""Streams that a run outlives."""

from __future__ import annotations

import os
from typing import IO, Any, cast


class _ResilientStream:
    """Writes as long as that works, then nowhere."""

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
    """The stream, but that a reader who goes away or a full disk is no error: what cannot be written goes nowhere."""
    return cast("IO[str]", _ResilientStream(stream))


def discard_pending_output(stream: IO[str]) -> None:
    """Send what the stream still holds nowhere, or Python would fail to write it when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)
