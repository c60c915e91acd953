"""How much each forward of a block settles: counts, or probabilities, one entry a step."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

DREAM_FINAL_TIME = 1e-3
"""Where Dream's time ends."""


def even_tokens_per_step(total: int, num_steps: int) -> tuple[int, ...]:
    """LLaDA's: total // steps each, the surplus one by one to the first; zeros left out."""
    share, surplus = divmod(total, num_steps)
    quotas = (share + (1 if step < surplus else 0) for step in range(num_steps))
    return tuple(tokens_per_step for tokens_per_step in quotas if tokens_per_step)


def whole_block_tokens_per_step(num_masked: int, num_steps: int, block_length: int) -> tuple[int, ...]:
    """SDAR's (generate.py): `even_tokens_per_step` of the whole block, also where some of it was given; never more than what is
    left, and nothing after that."""
    whole = even_tokens_per_step(block_length, num_steps)
    settled = [min(num_masked, before) for before in accumulate(whole, initial=0)]
    counts = (after - before for before, after in pairwise(settled))
    return tuple(count for count in counts if count)


def dream_tokens_per_step(num_masked: int, num_steps: int) -> tuple[int, ...]:
    """Dream's (generation_utils.py): time runs linearly from 1 to epsilon, a step from t to s settles
    int(masked * (1 - s / t)) positions, the last one all that is left. In fp32, as there; zeros left out."""
    left, quotas = num_masked, []
    for step, share in enumerate(_dream_unmask_fractions(num_steps)):
        tokens_per_step = int(left * share) if step < num_steps - 1 else left
        quotas.append(tokens_per_step)
        left -= tokens_per_step
    return tuple(tokens_per_step for tokens_per_step in quotas if tokens_per_step)


def dream_unmask_probabilities(num_steps: int) -> tuple[float, ...]:
    """Dream's ``origin``: with which probability each masked position is settled in a step, at last all."""
    return (*(float(share) for share in _dream_unmask_fractions(num_steps)[:-1]), 1.0)


def linear_unmask_probabilities(num_steps: int) -> tuple[float, ...]:
    """The same for time that runs linearly from 1 to 0 in steps of 1 / steps: 1 - s / t (MDLM's linear schedule)."""
    return tuple(1.0 / (num_steps - step) for step in range(num_steps))


def _dream_unmask_fractions(num_steps: int) -> torch.Tensor:
    """1 - s / t of each step, in fp32."""
    times = torch.linspace(1.0, DREAM_FINAL_TIME, num_steps + 1)
    return 1.0 - times[1:] / times[:-1]
