"""Metrics on standard output, for programs."""

from __future__ import annotations

import os
from typing import TextIO

from logger.run_logger import Metrics, metrics_line


class JsonConsole:
    """A JSON object a line, that of metrics.jsonl, and nothing else: events are for people, on standard error.

    A reader that goes away (``| head``) does not end the run.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream

    def metrics(self, step: int, values: Metrics) -> None:
        """A line with the step and ``metrics``, at once."""
        if self._stream is None:
            return
        try:
            self._stream.write(metrics_line(step, values) + "\n")
            self._stream.flush()
        except BrokenPipeError:
            _forget(self._stream)
            self._stream = None

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        """Nothing."""

    def progress(self, step: int, values: Metrics) -> None:
        """Nothing."""

    def close(self, exit_code: int = 0) -> None:
        """Leave the stream open: it is not ours."""


def _forget(stream: TextIO) -> None:
    """Send what the stream still holds nowhere, or Python would fail to write it when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)
