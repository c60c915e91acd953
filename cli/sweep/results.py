"""A run of a sweep: its trial in the study, and what its files contain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from optuna.trial import FrozenTrial, TrialState

from logger.pages import Number
from logger.report.reading import LoggedRun, read_run

EVALUATION_KEYS = {
    "bound": ("nats_per_token", "standard_error"),
    "bits_per_byte": ("bits_per_byte", "bits_per_byte_standard_error"),
}
"""Measurement -> its key, and that of its standard error, in an evaluation; metrics have them after ``val_``."""

Status = Literal["waiting", "running", "done", "pruned", "failed", "interrupted"]
STATUSES: dict[TrialState, Status] = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "done",
    TrialState.PRUNED: "pruned",
}


@dataclass(frozen=True)
class SweepRun:
    """A run, its status in the study, and what its files contain."""

    name: str
    values: Mapping[str, str]
    """Its value of each axis, as written."""
    status: Status
    seconds: float = 0.0
    """Wall-clock time of all processes of the run."""
    error: Sequence[str] = ()
    """The last lines of the log of a failed run."""
    value: float | None = None
    """The objective, of a run that is done or pruned."""
    numbers: dict[str, Number] = field(default_factory=dict)
    """Measurements by name; those that do not exist yet are missing."""
    logged: LoggedRun | None = None
    is_best: bool = False

    @classmethod
    def from_trial(cls, trial: FrozenTrial) -> SweepRun:
        run, end = trial.user_attrs["run"], trial.user_attrs.get("end", {})
        return cls(
            name=run["name"],
            values=run["values"],
            status=STATUSES.get(trial.state) or end.get("status") or "interrupted",
            seconds=end.get("seconds", 0.0),
            error=end.get("error", ()) if trial.state == TrialState.FAIL else (),
            value=trial.value if trial.value is not None and math.isfinite(trial.value) else None,
        )

    @property
    def step(self) -> int | None:
        """The last step; None: there is none yet."""
        return self.logged.last_step if self.logged is not None and self.logged.numbers else None


def read_files(directory: Path) -> tuple[LoggedRun | None, dict[str, Number]]:
    """Read the files of a run and its numbers: of ``summary.json``, or of the last validation while it is active.

    Files that are missing or damaged are ignored.
    """
    try:
        run = read_run(directory)
    except ValueError:
        return None, {}
    numbers: dict[str, Number] = {}
    for name, keys in EVALUATION_KEYS.items():
        value, error = (run.result("evaluation", key) if run.summary else run.last(f"val_{key}") for key in keys)
        if value is not None:
            numbers[name] = Number(value, error=error)
    tokens, seconds = run.result("tokens_seen"), run.result("seconds")
    rate = tokens / seconds if tokens and seconds else run.last("tokens_per_second")
    if rate is not None:
        numbers["tokens_per_second"] = Number(rate)
    return run, numbers
