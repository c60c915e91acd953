"""The base class of a run's loggers, and a group of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Metrics = Mapping[str, Any]


class RunLogger:
    """Receives metrics, events and progress of a run; does nothing with what a subclass does not override."""

    def metrics(self, step: int, values: Metrics) -> None:
        """Log the metrics of a step."""

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        """Log an event: its kind, a readable text, and the same in ``values`` for programs."""

    def progress(self, step: int, values: Metrics) -> None:
        """Update the display of progress. This is called in every step, so it must be cheap."""

    def close(self, exit_code: int = 0) -> None:
        """Finish: the run ends with this code, 0 if it is complete, 128 + signal if a signal stopped it."""


class LoggerGroup(RunLogger):
    """Forwards to several loggers, in their order; without any it discards everything."""

    def __init__(self, *loggers: RunLogger) -> None:
        self._loggers = loggers

    def metrics(self, step: int, values: Metrics) -> None:
        for logger in self._loggers:
            logger.metrics(step, values)

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        for logger in self._loggers:
            logger.event(step, kind, text, values)

    def progress(self, step: int, values: Metrics) -> None:
        for logger in self._loggers:
            logger.progress(step, values)

    def close(self, exit_code: int = 0) -> None:
        for logger in self._loggers:
            logger.close(exit_code)
