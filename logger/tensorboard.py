"""TensorBoard: a copy of the metrics as event files, written by its own small writer."""

from __future__ import annotations

import importlib.util
import math
import time
from pathlib import Path
from typing import Any

from logger.run_logger import Metrics


class TensorBoardLogger:
    """Event files in a folder. What a run that resumes makes again takes the place of what it made before."""

    def __init__(self, folder: Path, resume_step: int = 0) -> None:
        """Begin a file.

        Raises:
            ImportError: the package is not installed.
            OSError: the folder cannot be written.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._text = Event, Summary, text_pb
        goes_on = folder.is_dir() and any(folder.iterdir())
        self._writer: Any = EventFileWriter(str(folder))
        if goes_on:
            # Readers drop what they have of these steps.
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=resume_step + 1, session_log=start))

    def metrics(self, step: int, values: Metrics) -> None:
        """Each number as a scalar; what is none, or not finite, is left out."""
        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        scalars = [
            self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items() if math.isfinite(value)
        ]
        self._add(step, self._summary(value=scalars))

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        """The text, under its kind."""
        self._add(step, self._text(kind, text))

    def progress(self, step: int, values: Metrics) -> None:
        """Nothing: progress is for people."""

    def close(self, exit_code: int = 0) -> None:
        """Write what is left."""
        self._writer.close()

    def _add(self, step: int, summary: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))


def is_installed() -> bool:
    """Whether the package is there; it is not imported."""
    return importlib.util.find_spec("tensorboard") is not None
