"""The record of a run, ``metrics.jsonl``: one JSON object a line, for metrics or an event."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from files.atomic import write_bytes_atomic
from logger.run_logger import Metrics, RunLogger


class JsonLinesLogger(RunLogger):
    """Appends to ``metrics.jsonl``, line-buffered. A run that resumes first removes the lines after its step."""

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _truncate_after_step(path, resume_step)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def metrics(self, step: int, values: Metrics) -> None:
        self._file.write(format_metrics_line(step, values) + "\n")

    def event(self, step: int, kind: str, text: str, values: Metrics | None = None) -> None:
        """Write ``step``, ``event``, ``text`` and, if given, ``values``."""
        record = {"step": step, "event": kind, "text": text, **({} if values is None else {"values": dict(values)})}
        self._file.write(json.dumps(record) + "\n")

    def close(self, exit_code: int = 0) -> None:
        self._file.close()


class RecordReader:
    """Reads the records that a run appends to ``metrics.jsonl`` while it goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read_new(self) -> list[dict[str, Any]]:
        """Return the records since the last call; again from the first one after a resumed run removed some."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                lines = file.read()
        except OSError:
            return []
        lines = lines[: lines.rfind(b"\n") + 1]
        self._offset += len(lines)
        return [record for record in map(parse_record, lines.splitlines()) if record is not None]


def format_metrics_line(step: int, values: Metrics) -> str:
    """Format metrics as a JSON object on one line, without a line end; NaN and infinity become null."""
    metrics = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }
    return json.dumps({"step": step, "metrics": metrics}, allow_nan=False)


def parse_record(line: str | bytes) -> dict[str, Any] | None:
    """Parse a line of ``metrics.jsonl``; None: it is damaged or not a record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int or abs(record["step"]) > 2**53:
        return None
    return record


def _truncate_after_step(path: Path, step: int) -> None:
    """Remove the records after ``step``, which a resumed run computes again. Damaged lines stay: they have no step."""
    if not path.exists():
        return
    *lines, rest = path.read_bytes().split(b"\n")
    if parse_record(rest) is not None:  # else it is empty, or the half line of a killed process
        lines.append(rest)
    records = ((line, parse_record(line)) for line in lines)
    write_bytes_atomic(
        path, b"".join(line + b"\n" for line, record in records if record is None or record["step"] <= step)
    )
