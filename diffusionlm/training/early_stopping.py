"""End a run whose validation bound no longer falls (``validation.early_stopping``)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from config.training.validation import EarlyStoppingConfig


@dataclass
class EarlyStopping:
    """Compares each validation with the best one so far. All ranks have the same state."""

    config: EarlyStoppingConfig | None
    """None: the run makes all its steps."""
    best_bound: float | None = None
    """Lowest bound so far, in nats per token; a bound that is lower by no more than ``min_delta`` does not count."""
    best_step: int | None = None
    num_worse: int = 0
    """Validations since the best one."""

    def add(self, bound: float, step: int) -> None:
        """Record the bound of the validation after a step."""
        assert self.config is not None
        if self.best_bound is None or bound < self.best_bound - self.config.min_delta:
            self.best_bound, self.best_step, self.num_worse = bound, step, 0
        else:
            self.num_worse += 1

    @property
    def is_due(self) -> bool:
        """True if the last step was the last one of the run."""
        return self.config is not None and self.num_worse >= self.config.patience

    def describe(self) -> str:
        """Say why the run ended before `training.max_steps`."""
        assert self.config is not None
        margin = f" by more than {self.config.min_delta:g}" if self.config.min_delta else ""
        return (
            f"{self.num_worse} validations did not improve on the {self.best_bound:.3f} nats per token of step "
            f"{self.best_step}{margin} (validation.early_stopping)"
        )

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "config"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
