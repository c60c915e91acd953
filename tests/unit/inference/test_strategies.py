"""Strategies: what a class must have, traits, unmasking schedules, ties and deferred tokens.

`tests/reference/decoding` compares the rules with transcriptions of the published samplers.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from diffusionlm.inference import strategies
from diffusionlm.inference.strategies import STRATEGIES
from diffusionlm.inference.strategy import (
    NEGATIVE_ENTROPY,
    TOKEN_PROBABILITY,
    TOP2_MARGIN,
    DecodeState,
    Strategy,
    dream_tokens_per_step,
    select_most_confident,
)

INF = float("inf")


def build(name: str, **options: Any) -> Strategy:
    return STRATEGIES[name](**options)


def decode_state(
    confidence: list[float] | NDArray[np.float64],
    schedule_value: float = 1,
    *,
    uniforms: NDArray[np.float64] | None = None,
    is_masked: NDArray[np.bool_] | None = None,
    step: int = 0,
    num_steps: int = 1,
) -> DecodeState:
    M = len(confidence)
    return DecodeState(
        confidence_M=np.array(confidence, dtype=np.float64),
        is_masked_M=np.ones(M, dtype=np.bool_) if is_masked is None else is_masked,
        uniforms_M=np.zeros(M) if uniforms is None else uniforms,
        schedule_value=schedule_value,
        step=step,
        num_steps=num_steps,
    )


def select(
    strategy: Strategy, confidence: list[float] | NDArray[np.float64], schedule_value: float = 1, **state: Any
) -> list[int]:
    return np.flatnonzero(strategy.select_positions(decode_state(confidence, schedule_value, **state))).tolist()


def chi_square(counts: list[int], probabilities: list[float]) -> float:
    total = sum(counts)
    return sum(
        (count - total * share) ** 2 / (total * share) for count, share in zip(counts, probabilities, strict=True)
    )


# ----------------------------------------------------------------------------------------------------------------------
# The contract


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_every_strategy_is_complete(strategy: type[Strategy]) -> None:
    missing = [key for key in Strategy.__annotations__ if not hasattr(strategy, key)]
    missing += [*strategy.__abstractmethods__, *([] if strategy.__doc__ else ["docstring"])]
    for key, option in strategy.model_fields.items():
        missing += [f"default of {key}"] * option.is_required()
        missing += [f"docstring of {key}"] * (not option.description)
    assert not missing


def test_names_and_option_types_are_unique() -> None:
    classes = [value for value in vars(strategies).values() if isinstance(value, type) and issubclass(value, Strategy)]
    assert sum("name" in vars(value) for value in classes) == len(STRATEGIES)
    annotations: dict[str, Any] = {}
    for strategy in STRATEGIES.values():
        for key, option in strategy.model_fields.items():
            assert annotations.setdefault(key, option.rebuild_annotation()) == option.rebuild_annotation(), key


def test_traits() -> None:
    """Those of the published strategies: the exact likelihood, streaming and the fast greedy path depend on them."""
    published = {name: build(name) for names in PUBLISHED_SCHEDULES for name in names}
    without_measure = {"random", "sequential", "origin", "ancestral", "first_hitting", "equal_counts"}
    without_measure |= {"remdm_cap", "remdm_loop"}
    assert {name for name, strategy in published.items() if strategy.measure is None} == without_measure
    other_measures = {
        name: strategy.measure
        for name, strategy in published.items()
        if strategy.measure not in (None, TOKEN_PROBABILITY)
    }
    assert other_measures == {
        "topk_margin": TOP2_MARGIN,
        "entropy": NEGATIVE_ENTROPY,
        "entropy_bounded": NEGATIVE_ENTROPY,
    }
    assert {name for name, strategy in published.items() if strategy.can_remask} == {"p2", "remdm_cap", "remdm_loop"}
    assert {name for name, strategy in published.items() if not strategy.has_exact_likelihood} == {
        *("random", "random_topk", "origin", "ancestral", "first_hitting", "equal_counts"),
        *("p2", "remdm_cap", "remdm_loop"),
    }
    assert not build("entropy", alg_temp=0.1).is_deterministic


def test_confidence_measures() -> None:
    probs_NV = torch.tensor([[0.5, 0.2, 0.3, 0.0], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    tokens_N = torch.tensor([1, 3])
    entropies = [-sum(p * math.log(p) for p in (0.5, 0.2, 0.3)), math.log(4)]
    assert TOKEN_PROBABILITY.compute(probs_NV, tokens_N).tolist() == [0.2, 0.25]
    assert TOP2_MARGIN.compute(probs_NV, tokens_N).tolist() == pytest.approx([0.2, 0.0])
    assert NEGATIVE_ENTROPY.compute(probs_NV, tokens_N).tolist() == pytest.approx([-value for value in entropies])


PUBLISHED_SCHEDULES: dict[tuple[str, ...], Any] = {
    ("low_confidence", "random", "random_topk", "equal_counts"): (2, 2, 1),
    ("sequential", "low_confidence_static", "low_confidence_dynamic"): (3, 2),
    ("threshold", "factor", "entropy_bounded", "first_hitting"): (1, 1, 1, 1, 1),
    ("maskgit_plus", "topk_margin", "entropy"): (1, 1, 3),
    ("ancestral",): (1 / 3, 1 / 2, 1.0),
    ("origin",): pytest.approx((0.333, 0.333 / 0.667, 1.0), abs=1e-6),
    ("p2", "remdm_cap", "remdm_loop"): (1 / 3, 2 / 3, 1.0),
}


def test_published_schedules() -> None:
    for names, expected in PUBLISHED_SCHEDULES.items():
        for name in names:
            assert build(name).unmasking_schedule(num_masked=5, num_steps=3, block_length=8) == expected, name
    one = build("low_confidence_dynamic", threshold_fallback="one")
    assert one.unmasking_schedule(num_masked=5, num_steps=3, block_length=8) == (1,) * 5


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("num_steps", [1, 3, 16, 40, 100_000])
def test_every_schedule_has_an_end(name: str, num_steps: int) -> None:
    """Counts commit all tokens, in at most as many steps as there are tokens; probabilities end with 1."""
    schedule = build(name).unmasking_schedule
    for num_masked in range(1, 20):
        entries = schedule(num_masked, num_steps, 19)
        if isinstance(entries[0], int):
            assert sum(entries) == num_masked and all(entries), "a step without tokens"
        else:
            assert entries[-1] == 1.0 and len(entries) == num_steps
            assert entries is schedule(20, num_steps, 19), "not shared by blocks"


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
            assert dream_tokens_per_step(num_masked, num_steps, 0) == plain_dream_counts(num_masked, num_steps)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_commits_everything(name: str) -> None:
    """Whatever the confidences, within the schedule; deferred tokens come last."""
    strategy, rng = build(name), np.random.default_rng(3)
    for size, num_given, num_steps in [(1, 0, 1), (6, 0, 3), (6, 2, 6), (9, 4, 4), (8, 0, 20)]:
        is_masked = np.ones(size - num_given, dtype=np.bool_)
        schedule = strategy.unmasking_schedule(len(is_masked), num_steps, size)
        for step, schedule_value in enumerate(schedule):
            if not strategy.can_remask and not is_masked.any():
                break
            positions = np.arange(len(is_masked)) if strategy.can_remask else np.flatnonzero(is_masked)
            confidence = np.where(rng.random(len(positions)) < 0.2, -INF, -2 * rng.random(len(positions)))
            if strategy.measure is None:
                confidence = np.zeros(len(positions))
            state = decode_state(
                confidence,
                schedule_value,
                uniforms=rng.random(len(positions)),
                is_masked=is_masked[positions],
                step=step,
                num_steps=len(schedule),
            )
            is_selected = strategy.select_positions(state)
            assert strategy.measure is None or strategy.can_remask or is_selected.any()
            is_deferred = np.isneginf(confidence)
            assert not (is_selected & is_deferred).any() or is_selected[~is_deferred].all()
            is_masked[positions] = ~is_selected
        assert not is_masked.any(), (size, num_given, num_steps)


# ----------------------------------------------------------------------------------------------------------------------
# The rules


def test_ties_go_to_the_first_positions() -> None:
    confidence = np.array([0.5, 0.9, 0.5, 0.9, 0.9])
    assert select_most_confident(confidence, 2).tolist() == [False, True, False, True, False]
    assert select_most_confident(confidence, 4).tolist() == [True, True, False, True, True]


def test_deferred_tokens_are_last_from_the_left() -> None:
    leftmost = build("low_confidence_dynamic", threshold_fallback="leftmost")
    assert select(leftmost, [0.1, 0.2, 0.9, 0.4], 3) == [0, 1, 2]
    assert select(leftmost, [-INF, 0.2, 0.9, 0.4], 2) == [1, 2]


def test_alg_temp_samples_without_replacement_from_the_softmax() -> None:
    strategy = build("entropy", alg_temp=0.4)
    confidence = np.array([-0.3, -1.0, -0.6, -0.1])
    weights = np.exp(confidence / 0.4)
    probs = (weights / weights.sum()).tolist()
    rng = np.random.default_rng(0)
    first, pairs = Counter[int](), Counter[tuple[int, int]]()
    for _ in range(3000):
        uniforms = rng.random(4)
        [best] = select(strategy, confidence, 1, uniforms=uniforms)
        pair = select(strategy, confidence, 2, uniforms=uniforms)
        assert best in pair
        first[best] += 1
        pairs[pair[0], pair[1]] += 1
    # 99.9% of 3 and of 5 degrees of freedom.
    assert chi_square([first[position] for position in range(4)], probs) < 16.27
    all_pairs = list(combinations(range(4), 2))
    pair_probs = [probs[a] * probs[b] * (1 / (1 - probs[a]) + 1 / (1 - probs[b])) for a, b in all_pairs]
    assert chi_square([pairs[pair] for pair in all_pairs], pair_probs) < 20.52


@pytest.mark.parametrize("alg_temp", [1e-310, 1e300])
def test_extreme_alg_temp(alg_temp: float) -> None:
    strategy = build("low_confidence", alg_temp=alg_temp)
    uniforms = np.array([0.5, 0.0, 0.9, 1 - 2.0**-53])
    positions = select(strategy, [0.9, 0.7, -INF, 0.1], 2, uniforms=uniforms)
    assert positions == ([0, 1] if alg_temp < 1 else [0, 3]), "the most confident, or by the uniforms alone"
    positions = select(strategy, [0.1, 0.7, -INF, 0.8], 3, uniforms=uniforms)
    assert positions == [0, 1, 3], "a deferred token is last, whatever its uniform is"
