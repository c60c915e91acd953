"""How much each step of a block settles: published plans."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from diffusionlm.inference.unmasking_schedules import (
    dream_tokens_per_step,
    dream_unmask_probabilities,
    even_tokens_per_step,
    linear_fractions,
    linear_unmask_probabilities,
    whole_block_tokens_per_step,
)


@pytest.mark.parametrize(
    ("total", "steps", "expected"),
    [(8, 4, (2, 2, 2, 2)), (10, 4, (3, 3, 2, 2)), (3, 5, (1, 1, 1)), (7, 1, (7,)), (0, 3, ())],
)
def test_even_quotas_put_the_surplus_first(total: int, steps: int, expected: tuple[int, ...]) -> None:
    assert even_tokens_per_step(total, steps) == expected


@pytest.mark.parametrize(
    ("masked", "steps", "length", "expected"),
    [
        (8, 3, 8, (3, 3, 2)),
        (7, 3, 8, (3, 3, 1)),
        (4, 3, 8, (3, 1)),  # LLaDA's would be (2, 1, 1)
        (3, 8, 4, (1, 1, 1)),
        (0, 2, 4, ()),
    ],
)
def test_block_quotas_are_those_of_the_whole_block(
    masked: int, steps: int, length: int, expected: tuple[int, ...]
) -> None:
    assert whole_block_tokens_per_step(masked, steps, length) == expected


def test_dream_quotas_are_those_of_its_time_steps() -> None:
    # t = 1, 0.75025, 0.5005, 0.25075, 0.001: 1 - s / t of the first three is a little below 1/4, 1/3, 1/2.
    assert dream_tokens_per_step(12, 4) == (2, 3, 3, 4)
    assert dream_tokens_per_step(5, 1) == (5,)
    assert dream_tokens_per_step(0, 3) == ()


def test_counts_settle_everything() -> None:
    for steps in (1, 3, 16, 40):
        for masked in range(20):
            for counts in (
                even_tokens_per_step(masked, steps),
                whole_block_tokens_per_step(masked, steps, 19),
                dream_tokens_per_step(masked, steps),
            ):
                assert sum(counts) == masked
                assert all(count > 0 for count in counts)
                assert len(counts) <= steps


def plain_dream_counts(num_masked: int, num_steps: int) -> tuple[int, ...]:
    """As in generation_utils.py, step by step."""
    times = torch.linspace(1, 1e-3, num_steps + 1)
    counts = []
    for step in range(num_steps):
        is_last = step == num_steps - 1
        count = num_masked if is_last else int(num_masked * (1 - times[step + 1] / times[step]))
        counts.append(count)
        num_masked -= count
    return tuple(count for count in counts if count)


def test_dream_counts_with_steps_left_out() -> None:
    for num_steps in (*range(1, 40), 999):
        for num_masked in (0, 1, 2, 7, 64, 1000):
            assert dream_tokens_per_step(num_masked, num_steps) == plain_dream_counts(num_masked, num_steps)


def test_many_steps_take_no_more_memory_than_tokens() -> None:
    assert even_tokens_per_step(7, 10**12) == (1,) * 7
    assert whole_block_tokens_per_step(5, 10**12, 7) == (1,) * 5
    assert len(dream_tokens_per_step(7, 100_000)) <= 7
    for schedule in (linear_unmask_probabilities, linear_fractions, dream_unmask_probabilities):
        assert schedule(100_000) is schedule(100_000), "not shared by blocks"


@pytest.mark.parametrize("steps", [1, 2, 5, 64])
def test_linear_probabilities_match_the_schedule(steps: int) -> None:
    masked_share = Fraction(1)
    for step, probability in enumerate(linear_unmask_probabilities(steps)):
        masked_share *= 1 - Fraction(probability).limit_denominator(steps)
        assert masked_share == Fraction(steps - step - 1, steps)


def test_dream_probabilities() -> None:
    assert dream_unmask_probabilities(1) == (1.0,)
    # t = 1, 0.50050, 0.001; the last step settles all, although its time says 0.998.
    first, last = dream_unmask_probabilities(2)
    assert first == pytest.approx(0.4995, abs=1e-7) and last == 1.0
    assert dream_unmask_probabilities(4)[:3] == pytest.approx((0.24975, 0.24975 / 0.75025, 0.24975 / 0.5005), abs=1e-6)
