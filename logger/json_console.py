"""Metrics on standard output, for programs."""

from __future__ import annotations

from typing import TextIO

from files.resilient_stream import discard_pending_output
from logger.background import LogEvent
from logger.run_logger import Metrics, format_metrics_line


class JsonConsole:
    """A JSON object a line, that of metrics.jsonl, and nothing else: events are for people, on standard error.

    A reader that goes away (``| head``) has enough, and a full disk is told of; neither ends the run.
    """

    def __init__(self, stream: TextIO, log: LogEvent) -> None:
        self._stream: TextIO | None = stream
        self._log = log

    def metrics(self, step: int, values: Metrics) -> None:
        """A line with the step and ``metrics``, at once."""
        if self._stream is None:
            return
        try:
            self._stream.write(format_metrics_line(step, values) + "\n")
            self._stream.flush()
        except OSError as error:
            discard_pending_output(self._stream)
            self._stream = None
            if not isinstance(error, BrokenPipeError):
                self._log(
                    step, f"standard output cannot be written ({error}); the run goes on, and metrics.jsonl has all"
                )

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        """Nothing."""

    def progress(self, step: int, values: Metrics) -> None:
        """Nothing."""

    def close(self, exit_code: int = 0) -> None:
        """Leave the stream open: it is not ours."""
