"""Read a run directory. Damaged or missing files become notes; the rest is read."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from config.spellings import find_renamed
from files.json_files import flatten, read_json_object, read_text
from files.lock import is_locked
from files.toml_text import parse_toml
from logger.jsonl import parse_record
from logger.pages import Floats

RENAMED_METRICS = {
    "first_guess": "top1_accuracy",
    "first_five": "top5_accuracy",
    "commonest": "majority_baseline",
    "loss_fill": "loss_eos_padding",
    "fill_nats_per_token": "eos_padding_nats_per_token",
}
"""Former name -> name, of metrics and keys of summary.json that finished runs may still have."""

RunState = Literal["complete", "going", "stopped", "failed", "ended"]
"""``ended``: no process holds the run, and no event says why it is not complete."""


@dataclass(frozen=True)
class Series:
    """Values at increasing steps; NaN: missing."""

    steps_N: Floats
    values_N: Floats

    @property
    def last(self) -> tuple[float, float] | None:
        """Step and value of the last finite value; None: there is none."""
        indices = np.flatnonzero(np.isfinite(self.values_N))
        return (float(self.steps_N[indices[-1]]), float(self.values_N[indices[-1]])) if len(indices) else None


@dataclass(frozen=True)
class RunEvent:
    """An event of ``metrics.jsonl``."""

    step: int
    kind: str
    text: str
    values: dict[str, Any] = field(default_factory=dict)
    """The event's data for programs."""


@dataclass
class LoggedRun:
    """The contents of a run directory."""

    name: str
    """Short, and unique in a report."""
    path: Path
    numbers: dict[str, Series] = field(default_factory=dict)
    events: list[RunEvent] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    """Values by ``section.key``."""
    summary: dict[str, Any] = field(default_factory=dict)
    """``summary.json``; empty before the run is complete."""
    tokenizer: str | None = None
    """Hash of the tokenizer's file; None: there is none."""
    last_step: int = 0
    state: RunState = "complete"
    notes: list[str] = field(default_factory=list)
    """Problems of this record, for the reader of the report."""

    @property
    def max_steps(self) -> int | None:
        """`training.max_steps` of the config; None: not set."""
        steps = self.config.get("training.max_steps")
        return steps if isinstance(steps, int) else None

    def events_of(self, *kinds: str) -> list[RunEvent]:
        """Return the events of these kinds, in order."""
        return [event for event in self.events if event.kind in kinds]

    def last(self, key: str) -> float | None:
        """Return the last finite value of a metric; None: it has none."""
        last = self.numbers[key].last if key in self.numbers else None
        return None if last is None else last[1]

    def value(self, *keys: str | int) -> Any:
        """Return a value of ``summary.json`` by its path; None: it is missing."""
        value: Any = self.summary
        for key in keys:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def result(self, *keys: str | int) -> float | None:
        """Return a number of ``summary.json`` by its path; None: it is missing."""
        number = _number(self.value(*keys))
        return None if math.isnan(number) else number


def read_runs(paths: Sequence[Path]) -> list[LoggedRun]:
    """Read the runs in the order of ``paths``, each once.

    Raises:
        ValueError: a path is not a run directory; names it.
    """
    distinct = list({path.resolve(): path for path in paths}.values())
    runs = [read_run(path) for path in distinct]
    names = [run.name for run in runs]
    for run in runs:
        run.name = run.name if names.count(run.name) == 1 else str(run.path)
    return runs


def read_run(path: Path) -> LoggedRun:
    """Read a run.

    Raises:
        ValueError: the directory is missing or has no metrics; names it.
    """
    metrics = path / "metrics.jsonl"
    if not metrics.is_file():
        raise ValueError(f"{path} has no metrics.jsonl: name the directory of a run, such as runs/quickstart")
    run = LoggedRun(path.resolve().name, path)
    _read_metrics(run, metrics)
    _read_config(run)
    _read_summary(run)
    run.tokenizer = _fingerprint(path / "tokenizer")
    run.state = _state(run)
    return run


def _read_metrics(run: LoggedRun, path: Path) -> None:
    """Read ``metrics.jsonl``. A step that occurs again, after a resume, replaces its earlier values."""
    columns: defaultdict[str, tuple[array[float], array[float]]] = defaultdict(lambda: (array("d"), array("d")))
    num_damaged = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            record = parse_record(line)
            if record is None:
                num_damaged += bool(line.strip("\0 \n"))
                continue
            step = record["step"]
            run.last_step = max(run.last_step, step)
            if "event" in record:
                data = record.get("values")
                text = str(record.get("text", ""))
                run.events.append(RunEvent(step, str(record["event"]), text, data if isinstance(data, dict) else {}))
            values = record.get("metrics")
            for key, value in values.items() if isinstance(values, dict) else ():
                steps, numbers = columns[rename_metric(key)]
                steps.append(step)
                numbers.append(_number(value))
    run.numbers = {key: _series(steps, numbers) for key, (steps, numbers) in columns.items()}
    if num_damaged:
        run.notes.append(f"Lines of metrics.jsonl that cannot be read and are not shown: {num_damaged:,}.")
    if not run.numbers:
        run.notes.append("metrics.jsonl has no numbers yet.")


def _number(value: Any) -> float:
    """Convert to float; NaN if it is not a number, not finite, or too large for the arithmetic of charts."""
    if not isinstance(value, float | int):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if abs(number) < 1e100 else math.nan


def _series(steps: array[float], numbers: array[float]) -> Series:
    """Build a series sorted by step, with the last of several values of a step."""
    distinct_N, from_behind_N = np.unique(np.frombuffer(steps)[::-1], return_index=True)
    return Series(distinct_N, np.frombuffer(numbers)[::-1][from_behind_N])


def _read_config(run: LoggedRun) -> None:
    path = run.path / "config.toml"
    try:
        config = parse_toml(read_text(path))
        run.config = dict(flatten(config, "."))
        for old, values in find_renamed(config):  # so that a run of an older version differs by its values alone
            run.config.pop(".".join(map(str, old)), None)
            run.config |= {".".join(map(str, new)): value for new, value in values.items()}
    except ValueError as error:
        run.notes.append(f"config.toml cannot be read: {error}")


def _read_summary(run: LoggedRun) -> None:
    path = run.path / "summary.json"
    if not path.exists():
        return
    try:
        summary = read_json_object(path)
    except ValueError as error:
        run.notes.append(f"summary.json cannot be read: {error}")
        return
    step = _number(summary.get("step"))
    if step < run.last_step:
        run.notes.append(f"summary.json is of step {step:,.0f}, and the run went on: it is left out.")
        return
    run.summary = rename_metrics(summary)


def rename_metric(key: str) -> str:
    """Return the name of a metric, which a finished run may have logged under a former one."""
    for former, name in RENAMED_METRICS.items():
        key = key.replace(former, name)
    return key


def rename_metrics(values: Any) -> Any:
    """Return JSON values with the names of metrics in all their tables."""
    if isinstance(values, dict):
        return {rename_metric(key): rename_metrics(value) for key, value in values.items()}
    return [rename_metrics(value) for value in values] if isinstance(values, list) else values


def _fingerprint(folder: Path) -> str | None:
    """Hash the tokenizer's file; None: there is none."""
    try:
        return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    except OSError:
        return None


def _state(run: LoggedRun) -> RunState:
    if (run.result("step") or 0) >= run.last_step and run.summary:
        return "complete"
    match [event.kind for event in run.events_of("failed", "stopped", "environment")][-1:]:
        case ["failed"]:
            return "failed"
        case ["stopped"]:
            return "stopped"
    return "going" if is_locked(run.path) else "ended"
