"""Learning-rate schedules: the factor of each step, from warmup to decay."""

from __future__ import annotations

import math

from config.training.optimizer import LRScheduleConfig


def lr_factor(schedule: LRScheduleConfig, step: int, max_steps: int) -> float:
    """Factor of the full learning rate for optimizer step ``step`` of 0 ... max_steps - 1.

    The linear warm-up is never zero. Then the rate is constant, or falls to ``final_factor``, which it would reach in
    the step after the last: linearly, by half a cosine, or only in the last steps (warmup-stable-decay: Hu et al. 2024,
    arXiv:2404.06395; the shape 1 - sqrt: Haegele et al. 2024, arXiv:2405.18392).

    Raises:
        ValueError: the run is too short for its warm-up and decay.
    """
    warmup = schedule.num_warmup_steps(max_steps)
    match schedule.kind:
        case "constant":
            start, shape = max_steps, "linear"
        case "linear" | "cosine":
            start, shape = warmup, schedule.kind
        case "warmup_stable_decay":
            start, shape = max_steps - schedule.num_decay_steps(max_steps), schedule.decay_shape or "linear"
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if step < start or schedule.kind == "constant":
        return 1.0
    progress = (step - start) / max(1, max_steps - start)
    return schedule.final_factor + (1.0 - schedule.final_factor) * _decay(shape, progress)


def _decay(shape: str, progress: float) -> float:
    """Decay from 1 at progress 0 to 0 at progress 1."""
    match shape:
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case "sqrt":
            return 1.0 - math.sqrt(progress)
        case _:
            return 1.0 - progress
