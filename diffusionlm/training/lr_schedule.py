"""Learning rate over a run."""

from __future__ import annotations

import math

from config.optimizer import Schedule


def lr_factor(schedule: Schedule, step: int, max_steps: int) -> float:
    """Factor of the full rate for optimizer step ``step`` of 0 ... max_steps - 1.

    Linear warm-up that is never zero, then constant, linear or cosine to ``final_factor``, which the step after the
    last would reach.
    """
    warmup = schedule.warmup_steps
    if warmup is None:
        warmup = round(schedule.warmup_fraction * max_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, max_steps - warmup)
    match schedule.kind:
        case "constant":
            return 1.0
        case "linear":
            shape = 1.0 - progress
        case "cosine":
            shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.final_factor + (1.0 - schedule.final_factor) * shape
