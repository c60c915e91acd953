"""Which checkpoints are kept."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path

from diffusionlm.training.checkpointing.staging import VALIDATION_BOUND_KEY


def select_expired(
    steps: Collection[int], kept: Collection[int], keep_last: int, keep_every_steps: int = 0
) -> list[int]:
    """Steps whose checkpoints may go, ascending: not of the last, not ``kept`` for another reason, and no multiple of
    ``keep_every_steps`` (0: those have no privilege)."""
    last = sorted(steps)[-keep_last:]
    rest = [step for step in sorted(steps) if step not in last and step not in kept]
    return [step for step in rest if not keep_every_steps or step % keep_every_steps]


def select_best(bounds: Mapping[int, float]) -> int | None:
    """The step with the lowest bound, of equal ones the later; None where none is finite."""
    finite = {step: bound for step, bound in bounds.items() if math.isfinite(bound)}
    return min(finite, key=lambda step: (finite[step], -step)) if finite else None


def read_validation_bound(checkpoint: Path) -> float | None:
    """What the validation at its step gave, in nats per token; None where there was none, or it cannot be read."""
    try:
        bound = json.loads((checkpoint / "state.json").read_text(encoding="utf-8")).get(VALIDATION_BOUND_KEY)
        return None if bound is None else float(bound)
    except (OSError, ValueError, TypeError, AttributeError):
        return None
