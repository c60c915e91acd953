"""The base classes of a run's loggers and sinks, and a group of loggers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from config.base import Section

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


@dataclass(frozen=True)
class SinkRun:
    """The run that a sink copies."""

    directory: Path
    step: int
    """Step that the run resumes from; 0: it is new."""
    values: Mapping[str, Any]
    """The resolved config."""


class Sink(Section):
    """A copy of a run at another service, ``[logging.NAME]`` of a config: options, and the logger that they open."""

    title: ClassVar[str]
    """Name of the service in messages."""
    package: ClassVar[str | None] = None
    """Package that the sink needs, and the extra that installs it."""

    @property
    def is_on(self) -> bool:
        """Whether the sink is to be opened."""
        return True

    @property
    def finish_seconds(self) -> float:
        """The longest time that the end of the run waits for the sink."""
        return 60.0

    def open(self, run: SinkRun, log: Callable[[str], None]) -> RunLogger:
        """Open the logger; ``log`` prints a message. It lives in a thread: calls may be slow and raise anything."""
        raise NotImplementedError
