"""Unmasking schedules: how many tokens each step of a block commits, or with which probability."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

DREAM_FINAL_TIME = 1e-3


def even_tokens_per_step(total: int, num_steps: int) -> tuple[int, ...]:
    """LLaDA's counts: total // num_steps each, the surplus one by one to the first steps; steps of 0 are left out."""
    share, surplus = divmod(total, num_steps)
    counts = (share + (1 if step < surplus else 0) for step in range(num_steps))
    return tuple(count for count in counts if count)


def whole_block_tokens_per_step(num_masked: int, num_steps: int, block_length: int) -> tuple[int, ...]:
    """SDAR's counts (generate.py): those of a whole block, also if a part of it is not masked, until nothing is
    left."""
    totals = accumulate(even_tokens_per_step(block_length, num_steps), initial=0)
    counts = (after - before for before, after in pairwise(min(num_masked, total) for total in totals))
    return tuple(count for count in counts if count)


def dream_tokens_per_step(num_masked: int, num_steps: int) -> tuple[int, ...]:
    """Dream's counts (generation_utils.py): a step from time t to s commits int(masked * (1 - s / t)) tokens, the last
    step the rest. Computed in fp32, as published; steps of 0 are left out."""
    remaining, counts = num_masked, []
    for step, fraction in enumerate(_dream_unmask_fractions(num_steps)):
        count = int(remaining * fraction) if step < num_steps - 1 else remaining
        counts.append(count)
        remaining -= count
    return tuple(count for count in counts if count)


def dream_unmask_probabilities(num_steps: int) -> tuple[float, ...]:
    """Probability with which Dream's ``origin`` commits each masked position in a step; 1 in the last one."""
    return (*(float(fraction) for fraction in _dream_unmask_fractions(num_steps)[:-1]), 1.0)


def linear_unmask_probabilities(num_steps: int) -> tuple[float, ...]:
    """1 - s / t for time that runs linearly from 1 to 0 (MDLM)."""
    return tuple(1.0 / (num_steps - step) for step in range(num_steps))


def _dream_unmask_fractions(num_steps: int) -> Tensor:
    """1 - s / t of each step, in fp32."""
    import torch  # here, because the config imports this module

    times = torch.linspace(1.0, DREAM_FINAL_TIME, num_steps + 1)
    return 1.0 - times[1:] / times[:-1]
