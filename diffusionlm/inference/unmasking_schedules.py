"""Unmasking schedules: how many tokens each step of a block commits, or with which probability.

Counts have at most one entry per token. Probabilities have one per step and are cached, so that all blocks share them.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

DREAM_FINAL_TIME = 1e-3


def even_tokens_per_step(total: int, num_steps: int) -> tuple[int, ...]:
    """LLaDA's counts: total // num_steps each, the surplus one by one to the first steps; steps of 0 are left out."""
    share, surplus = divmod(total, num_steps)
    return tuple(share + (1 if step < surplus else 0) for step in range(min(num_steps, total)))


def whole_block_tokens_per_step(num_masked: int, num_steps: int, block_length: int) -> tuple[int, ...]:
    """SDAR's counts (generate.py): those of a whole block, also if a part of it is not masked, until nothing is
    left."""
    totals = accumulate(even_tokens_per_step(block_length, num_steps), initial=0)
    counts = (after - before for before, after in pairwise(min(num_masked, total) for total in totals))
    return tuple(count for count in counts if count)


def dream_tokens_per_step(num_masked: int, num_steps: int) -> tuple[int, ...]:
    """Dream's counts (generation_utils.py): a step from time t to s commits int(masked * (1 - s / t)) tokens, the last
    step the rest. Computed in fp32, as published; steps of 0 are left out."""
    fractions = _dream_unmask_fractions(num_steps)
    # Few of many steps commit anything: those in which even all masks together give one token.
    steps = (num_masked * fractions[:-1] >= 1).nonzero()[:, 0].tolist()
    remaining, counts = num_masked, []
    for step in steps:
        counts.append(int(remaining * fractions[step]))
        remaining -= counts[-1]
    return tuple(count for count in (*counts, remaining) if count)


@lru_cache(maxsize=4)
def dream_unmask_probabilities(num_steps: int) -> tuple[float, ...]:
    """Probability with which Dream's ``origin`` commits each masked position in a step; 1 in the last one."""
    return (*_dream_unmask_fractions(num_steps)[:-1].tolist(), 1.0)


@lru_cache(maxsize=4)
def linear_unmask_probabilities(num_steps: int) -> tuple[float, ...]:
    """1 - s / t for time that runs linearly from 1 to 0 (MDLM)."""
    return tuple(1.0 / (num_steps - step) for step in range(num_steps))


@lru_cache(maxsize=4)
def linear_fractions(num_steps: int) -> tuple[float, ...]:
    """Fraction of all steps that are done after each step."""
    return tuple((step + 1) / num_steps for step in range(num_steps))


@lru_cache(maxsize=4)
def _dream_unmask_fractions(num_steps: int) -> Tensor:
    """1 - s / t of each step, in fp32."""
    import torch  # here, because the config imports this module

    times = torch.linspace(1.0, DREAM_FINAL_TIME, num_steps + 1, dtype=torch.float32, device="cpu")
    return 1.0 - times[1:] / times[:-1]
