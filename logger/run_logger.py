"""What a run tells the world: numbers, events and progress."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

from files.atomic import write_bytes_atomic
from logger.progress import ProgressMeter

Metrics = Mapping[str, Any]


class RunLogger(Protocol):
    """Where a run's messages go."""

    def metrics(self, step: int, values: Metrics) -> None:
        """Numbers of a step."""

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        """Something that happened, in words; ``values`` tell it to programs."""

    def progress(self, step: int, values: Metrics) -> None:
        """Where the run is: called every step, must be cheap."""

    def close(self, exit_code: int = 0) -> None:
        """Nothing more comes: the run ends with this code, 0 where it is complete, 128 + signal where one ended it."""


class JsonLinesLogger:
    """``metrics.jsonl``: one object a line, the record of the run. A line is on disk once written."""

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _truncate_after_step(path, resume_step)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def metrics(self, step: int, values: Metrics) -> None:
        """A line with the step and ``metrics``."""
        self._file.write(format_metrics_line(step, values) + "\n")

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        """A line with the step, ``event`` and ``text``, and ``values`` if there are any."""
        record = {"step": step, "event": kind, "text": text, **({} if values is None else {"values": dict(values)})}
        self._file.write(json.dumps(record) + "\n")

    def progress(self, step: int, values: Metrics) -> None:
        """Nothing: progress is for people."""

    def close(self, exit_code: int = 0) -> None:
        """Close the file."""
        self._file.close()


class ConsoleLogger:
    """A progress bar in a terminal, plain lines elsewhere."""

    def __init__(self, total_steps: int, done: int, style: Literal["bar", "lines", "none"], stream: TextIO) -> None:
        self._stream, self._style, self._total_steps = stream, style, total_steps
        self._meter: ProgressMeter | None = None
        if style == "bar":
            self._meter = ProgressMeter(stream, style="bar")
            self._meter.begin("", "step", total_steps, done)

    def metrics(self, step: int, values: Metrics) -> None:
        """Print the loss, the speed and the time left, unless there is a bar."""
        if self._style == "lines" and "loss" in values:
            self._print(
                f"step {step}/{self._total_steps}  loss {values['loss']:.4f}  {values['tokens_per_second']:,.0f} tokens/s"
                f"  {format_duration(values['seconds_left'])} left"
            )

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        """Print the text, above the bar."""
        self._print(text)

    def progress(self, step: int, values: Metrics) -> None:
        """Update the bar."""
        if self._meter is not None:
            self._meter.set_postfix(f"loss {values['loss']:.3f}, {values['tokens_per_second']:,.0f} tokens/s")
            self._meter.set(step)

    def close(self, exit_code: int = 0) -> None:
        """Leave the bar as it is."""
        if self._meter is not None:
            self._meter.close()

    def _print(self, text: str) -> None:
        if self._meter is not None:
            self._meter.log(text)
        elif self._style == "lines":
            print(text, file=self._stream, flush=True)


class LoggerGroup:
    """Several loggers as one."""

    def __init__(self, *loggers: RunLogger) -> None:
        self._loggers = loggers

    def metrics(self, step: int, values: Metrics) -> None:
        """To all."""
        for logger in self._loggers:
            logger.metrics(step, values)

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        """To all."""
        for logger in self._loggers:
            logger.event(step, kind, text, values)

    def progress(self, step: int, values: Metrics) -> None:
        """To all."""
        for logger in self._loggers:
            logger.progress(step, values)

    def close(self, exit_code: int = 0) -> None:
        """All."""
        for logger in self._loggers:
            logger.close(exit_code)


class NoLogger:
    """Says nothing: for all ranks but the first."""

    def metrics(self, step: int, values: Metrics) -> None:
        """Nothing."""

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        """Nothing."""

    def progress(self, step: int, values: Metrics) -> None:
        """Nothing."""

    def close(self, exit_code: int = 0) -> None:
        """Nothing."""


def format_duration(seconds: float) -> str:
    """``1:02:03``, ``2:03`` or ``3 s``."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours}:{minutes:02}:{whole % 60:02}"
    return f"{minutes}:{whole % 60:02}" if minutes else f"{whole} s"


def format_metrics_line(step: int, values: Metrics) -> str:
    """Numbers of a step as an object on a line, without its end."""
    return json.dumps(
        {"step": step, "metrics": {key: _nan_to_none(value) for key, value in values.items()}}, allow_nan=False
    )


def parse_record(line: str | bytes) -> dict[str, Any] | None:
    """A line of ``metrics.jsonl``; None: it is damaged, or no record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int or abs(record["step"]) > 2**53:
        return None
    return record


def _nan_to_none(value: Any) -> Any:
    """JSON has no NaN: those become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _truncate_after_step(path: Path, step: int) -> None:
    """Take a record back to the step that a run resumes from: what came later is about to be run again."""
    if not path.exists():
        return
    *lines, rest = path.read_bytes().split(b"\n")
    if parse_record(rest) is not None:  # else nothing, or the half line of a killed process
        lines.append(rest)
    records = ((line, parse_record(line)) for line in lines)
    # What is damaged belongs to no step, and stays.
    kept = [line + b"\n" for line, record in records if record is None or record["step"] <= step]
    write_bytes_atomic(path, b"".join(kept))
