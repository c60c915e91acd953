"""Write metrics as TensorBoard event files."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, ClassVar

from logger.run_logger import Metrics, RunLogger, Sink, SinkRun


class TensorBoardConfig(Sink):
    """A copy of the metrics for TensorBoard, in ``tensorboard/`` of the run directory."""

    title: ClassVar[str] = "TensorBoard"
    package: ClassVar[str | None] = "tensorboard"

    enabled: bool = False
    """Write the event files."""

    @property
    def is_on(self) -> bool:
        return self.enabled

    def open(self, run: SinkRun, log: Callable[[str], None]) -> RunLogger:
        return TensorBoardLogger(run)


class TensorBoardLogger(RunLogger):
    """Writes event files. A resumed run replaces the steps that it repeats."""

    def __init__(self, run: SinkRun) -> None:
        """Open a new event file.

        Raises:
            ImportError: the package is not installed.
            OSError: the folder cannot be written.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._text = Event, Summary, text_pb
        folder = run.directory / "tensorboard"
        self._writer: Any = EventFileWriter(str(folder))
        start = SessionLog(status=SessionLog.START)  # tells readers to drop earlier values of these steps
        self._writer.add_event(Event(wall_time=time.time(), step=run.step + 1, session_log=start))

    def metrics(self, step: int, values: Metrics) -> None:
        """Write each finite number as a scalar."""
        scalars = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
            if isinstance(value, (int, float)) and math.isfinite(value)
        ]
        self._add(step, self._summary(value=scalars))

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        """Write the text under the event's kind."""
        self._add(step, self._text(kind, text))

    def close(self, exit_code: int = 0) -> None:
        self._writer.close()

    def _add(self, step: int, summary: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
