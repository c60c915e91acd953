"""What the files of a run contain. Those that are missing or damaged are ignored, because it may be active."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from logger.pages import Number
from logger.report.reading import LoggedRun, read_run

EVALUATION_KEYS = {
    "bound": ("nats_per_token", "standard_error"),
    "bits_per_byte": ("bits_per_byte", "bits_per_byte_standard_error"),
}
"""Measurement -> its key, and that of its standard error, in an evaluation; metrics have them after ``val_``."""


@dataclass(frozen=True)
class RunResult:
    """Numbers, curves and samples of a run; those that do not exist yet are missing."""

    numbers: dict[str, Number] = field(default_factory=dict)
    """Measurements by name."""
    logged: LoggedRun | None = None
    is_final: bool = False

    @property
    def step(self) -> int | None:
        """The last step; None: there is none yet."""
        return self.logged.last_step if self.logged is not None and self.logged.numbers else None


def read_result(directory: Path) -> RunResult:
    """Read ``summary.json``, or the last validation in ``metrics.jsonl`` while the run is active."""
    try:
        run = read_run(directory)
    except ValueError:
        return RunResult()
    numbers: dict[str, Number] = {}
    for name, keys in EVALUATION_KEYS.items():
        value, error = (run.result("evaluation", key) if run.summary else run.last(f"val_{key}") for key in keys)
        if value is not None:
            numbers[name] = Number(value, error=error)
    tokens, seconds = run.result("tokens_seen"), run.result("seconds")
    rate = tokens / seconds if tokens and seconds else run.last("tokens_per_second")
    if rate is not None:
        numbers["tokens_per_second"] = Number(rate)
    return RunResult(numbers, run, is_final=bool(run.summary))
