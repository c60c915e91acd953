"""Strategies: their confidences, plans and choices."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from config.generation import STRATEGIES, GenerationConfig, RemaskingStrategy
from config.model import ModelConfig
from diffusionlm.inference.settings import fill_defaults
from diffusionlm.inference.strategies import DecodeState, Strategy, build_strategy, select_most_confident

MODEL = ModelConfig(
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=8,
    max_position_embeddings=64,
    vocab_size=5,
    mask_token_id=4,
)
SEEING: tuple[RemaskingStrategy, ...] = tuple(
    name for name, strategy in STRATEGIES.items() if "defer_token_ids" in strategy.keys
)
BLIND: tuple[RemaskingStrategy, ...] = tuple(name for name in STRATEGIES if name not in SEEING)
INF = float("inf")


def policy_of(strategy: RemaskingStrategy, **options: Any) -> Strategy:
    config = GenerationConfig.model_validate({"remasking_strategy": strategy, **options})
    return build_strategy(fill_defaults(config, MODEL))


def look(
    confidence: list[float] | NDArray[np.float64],
    tokens_per_step: float = 1,
    *,
    uniforms: NDArray[np.float64] | None = None,
    masked: NDArray[np.bool_] | None = None,
    step: int = 0,
    num_steps: int = 1,
) -> DecodeState:
    N = len(confidence)
    return DecodeState(
        confidence_M=np.array(confidence, dtype=np.float64),
        is_masked_M=np.ones(N, dtype=np.bool_) if masked is None else masked,
        uniforms_M=np.zeros(N) if uniforms is None else uniforms,
        tokens_per_step=tokens_per_step,
        step=step,
        num_steps=num_steps,
    )


def chosen(policy: Strategy, confidence: list[float], tokens_per_step: float = 1) -> list[int]:
    return np.flatnonzero(policy.select_positions(look(confidence, tokens_per_step))).tolist()


def chi_square(counts: list[int], probabilities: list[float]) -> float:
    total = sum(counts)
    return sum(
        (count - total * share) ** 2 / (total * share) for count, share in zip(counts, probabilities, strict=True)
    )


def test_ties_go_to_the_first_positions() -> None:
    confidence = np.array([0.5, 0.9, 0.5, 0.9, 0.9])
    assert select_most_confident(confidence, 2).tolist() == [False, True, False, True, False]
    assert select_most_confident(confidence, 4).tolist() == [True, True, False, True, True]


@pytest.mark.parametrize(
    "strategy", ["low_confidence", "low_confidence_static", "maskgit_plus", "topk_margin", "entropy"]
)
def test_ranked_strategies_take_the_most_confident(strategy: RemaskingStrategy) -> None:
    policy = policy_of(strategy)
    assert policy.is_deterministic
    assert chosen(policy, [0.1, 0.4, 0.3, 0.4], 1) == [1]
    assert chosen(policy, [0.1, 0.4, 0.3, 0.4], 3) == [1, 2, 3]


def test_plans() -> None:
    def unmasking_schedule(strategy: RemaskingStrategy, **options: Any) -> tuple[float, ...]:
        return policy_of(strategy, **options).unmasking_schedule(num_masked=5, num_steps=3, block_length=8)

    assert (
        unmasking_schedule("low_confidence")
        == unmasking_schedule("random")
        == unmasking_schedule("random_topk")
        == unmasking_schedule("equal_counts")
        == (2, 2, 1)
    )
    assert (
        unmasking_schedule("sequential")
        == unmasking_schedule("low_confidence_static")
        == unmasking_schedule("low_confidence_dynamic")
        == (3, 2)
    )
    assert unmasking_schedule("low_confidence_dynamic", threshold_fallback="one") == (1,) * 5
    assert (
        unmasking_schedule("threshold")
        == unmasking_schedule("factor")
        == unmasking_schedule("entropy_bounded")
        == unmasking_schedule("first_hitting")
        == (1,) * 5
    )
    assert (
        unmasking_schedule("maskgit_plus")
        == unmasking_schedule("topk_margin")
        == unmasking_schedule("entropy")
        == (1, 1, 3)
    )
    assert unmasking_schedule("ancestral") == (1 / 3, 1 / 2, 1.0)
    assert unmasking_schedule("origin") == pytest.approx((0.333, 0.333 / 0.667, 1.0), abs=1e-6)
    assert unmasking_schedule("p2") == (1 / 3, 2 / 3, 1.0)


def test_confidences() -> None:
    probs = torch.tensor([[0.5, 0.2, 0.3, 0.0], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    tokens = torch.tensor([1, 3])
    entropies = [-sum(p * math.log(p) for p in (0.5, 0.2, 0.3)), math.log(4)]
    for strategy in SEEING:
        policy = policy_of(strategy)
        expected = [0.2, 0.25]
        if strategy == "topk_margin":
            expected = [0.2, 0.0]
        elif strategy in ("entropy", "entropy_bounded"):
            expected = [-entropy for entropy in entropies]
        assert policy.confidence(probs, tokens).tolist() == pytest.approx(expected), strategy
        assert policy.needs_distribution == (strategy in ("topk_margin", "entropy", "entropy_bounded"))
    for strategy in BLIND:
        assert policy_of(strategy).confidence(probs, tokens).tolist() == [0.0, 0.0]


def test_who_is_blind_remasks_and_needs_no_chance() -> None:
    assert {name for name in STRATEGIES if policy_of(name).is_model_independent} == set(BLIND)
    assert {name for name in STRATEGIES if policy_of(name).can_remask} == {"p2", "remdm_cap", "remdm_loop"}
    by_chance = {"random", "random_topk", "origin", "ancestral", "first_hitting", "equal_counts"}
    by_chance |= {"p2", "remdm_cap", "remdm_loop"}
    assert {name for name in STRATEGIES if not policy_of(name).is_deterministic} == by_chance
    assert not policy_of("entropy", alg_temp=0.1).is_deterministic


def test_threshold_is_inclusive_and_takes_at_least_the_best() -> None:
    policy = policy_of("threshold", confidence_threshold=0.75)
    assert chosen(policy, [0.75, 0.7, 0.8]) == [0, 2]
    assert chosen(policy, [0.1, 0.3, 0.3]) == [1]
    strict = policy_of("threshold", confidence_threshold=0.75, threshold_comparison=">")
    assert chosen(strict, [0.75, 0.7, 0.8]) == [2]
    assert chosen(strict, [0.75, 0.7, 0.75]) == [0]
    assert chosen(policy_of("threshold"), [0.9, 0.89]) == [0]
    assert chosen(policy_of("threshold", confidence_threshold=0.0), [0.0, -INF]) == [0]


def test_dynamic_takes_what_is_above_the_threshold_if_that_is_enough() -> None:
    for fallback in ("quota", "leftmost", "one"):
        policy = policy_of("low_confidence_dynamic", threshold_fallback=fallback)
        assert chosen(policy, [0.9, 0.85, 0.86, 0.2], 2) == [0, 2]
        assert chosen(policy, [0.9, 0.95, 0.86, 0.2], 2) == [0, 1, 2]
    inclusive = policy_of("low_confidence_dynamic", threshold_comparison=">=")
    assert chosen(inclusive, [0.9, 0.85, 0.86, 0.2], 2) == [0, 1, 2]


def test_dynamic_has_three_ways_where_too_few_pass() -> None:
    confidence = [0.1, 0.2, 0.9, 0.4]
    assert chosen(policy_of("low_confidence_dynamic"), confidence, 3) == [1, 2, 3]
    leftmost = policy_of("low_confidence_dynamic", threshold_fallback="leftmost")
    assert chosen(leftmost, confidence, 3) == [0, 1, 2]
    assert chosen(leftmost, [-INF, 0.2, 0.9, 0.4], 2) == [1, 2], "what is put off is not the first"
    one = policy_of("low_confidence_dynamic", threshold_fallback="one")
    assert chosen(one, confidence) == [2]
    assert chosen(one, [0.1, 0.2, 0.2]) == [1]


@pytest.mark.parametrize(
    ("factor", "confidence", "expected"),
    [
        # Needed: 0.5, 2/3, 0.75, 0.8.
        (1.0, [0.75, 0.1, 0.9, 0.7], [0, 2]),
        (1.0, [0.75, 0.8, 0.9, 0.1], [0, 1, 2]),
        (1.0, [0.79, 0.8, 0.9, 0.78], [0, 1, 2]),  # exactly the last one fails, and is not taken
        (1.0, [0.8, 0.8, 0.9, 0.8], [0, 1, 2, 3]),
        (1.0, [0.1, 0.2], [1]),  # the first always
        (1.0, [0.4, 0.99], [1]),
        (1.0, [0.6, 0.6, 0.76], [2]),  # the second fails
        # Needed: 0, 1/3, 0.5, 0.6.
        (2.0, [0.3, 0.5, 0.55, 0.1], [1, 2]),
        (100.0, [0.0, 0.1], [0, 1]),
    ],
)
def test_factor(factor: float, confidence: list[float], expected: list[int]) -> None:
    assert chosen(policy_of("factor", factor=factor), confidence) == expected


@pytest.mark.parametrize(
    ("bound", "entropies", "expected"),
    [
        (0.5, [0.25, 0.5, 0.125], [0, 2]),  # sums 0.125, 0.375, 0.875
        (0.375, [0.25, 0.5, 0.125], [2]),  # less than the bound, not equal to it
        (0.1, [0.25, 0.5, 0.125], [2]),
        (10.0, [0.25, 0.5, 0.125], [0, 1, 2]),
        (1.0, [0.5, 0.0, 0.0], [0, 1, 2]),
        (0.35, [0.5, 0.5], [0]),
    ],
)
def test_entropy_bounded(bound: float, entropies: list[float], expected: list[int]) -> None:
    policy = policy_of("entropy_bounded", entropy_bound=bound)
    assert chosen(policy, [-entropy for entropy in entropies]) == expected


def test_sequential_takes_the_first() -> None:
    assert chosen(policy_of("sequential"), [0.0, 0.0, 0.0], 2) == [0, 1]


def test_first_drawn_position_is_one_of_the_softmax() -> None:
    policy = policy_of("entropy", alg_temp=0.4)
    confidence = np.array([-0.3, -1.0, -0.6, -0.1])
    weights = np.exp(confidence / 0.4)
    shares = (weights / weights.sum()).tolist()
    rng = np.random.default_rng(0)
    first, second = Counter[int](), Counter[tuple[int, int]]()
    for _ in range(3000):
        uniforms = rng.random(4)
        [best] = np.flatnonzero(policy.select_positions(look(confidence, 1, uniforms=uniforms))).tolist()
        pair = np.flatnonzero(policy.select_positions(look(confidence, 2, uniforms=uniforms))).tolist()
        assert best in pair
        first[best] += 1
        second[pair[0], pair[1]] += 1
    # 99.9% of 3 and of 5 degrees of freedom.
    assert chi_square([first[place] for place in range(4)], shares) < 16.27
    pairs = list(combinations(range(4), 2))
    of_pairs = [shares[a] * shares[b] * (1 / (1 - shares[a]) + 1 / (1 - shares[b])) for a, b in pairs]
    assert chi_square([second[pair] for pair in pairs], of_pairs) < 20.52


@pytest.mark.parametrize("alg_temp", [1e-310, 1e300])
def test_extreme_temperatures_of_positions(alg_temp: float) -> None:
    policy = policy_of("low_confidence", alg_temp=alg_temp)
    uniforms = np.array([0.5, 0.0, 0.9, 1 - 2.0**-53])
    picked = np.flatnonzero(policy.select_positions(look([0.9, 0.7, -INF, 0.1], 2, uniforms=uniforms))).tolist()
    assert picked == ([0, 1] if alg_temp < 1 else [0, 3]), "the best, or any"
    picked = np.flatnonzero(policy.select_positions(look([0.1, 0.7, -INF, 0.8], 3, uniforms=uniforms))).tolist()
    assert picked == [0, 1, 3], "what is put off comes last, whatever chance says"


def test_random_topk_shuffles_equals_alone() -> None:
    policy = policy_of("random_topk")
    rng = np.random.default_rng(1)
    confidence = [0.5, 1.0 - 1e-9, 0.5, 1.0, -INF]
    seen = Counter[tuple[int, ...]]()
    for _ in range(1000):
        uniforms = rng.random(5)
        seen[tuple(np.flatnonzero(policy.select_positions(look(confidence, 1, uniforms=uniforms))).tolist())] += 1
        assert np.flatnonzero(policy.select_positions(look(confidence, 2, uniforms=uniforms))).tolist() == [1, 3]
        assert set(np.flatnonzero(policy.select_positions(look(confidence, 3, uniforms=uniforms))).tolist()) > {1, 3}
        assert not policy.select_positions(look(confidence, 4, uniforms=uniforms))[4]
    assert seen.keys() == {(1,), (3,)}
    assert chi_square(list(seen.values()), [0.5, 0.5]) < 10.83


@pytest.mark.parametrize(("strategy", "tokens_per_step"), [("random", 2), ("equal_counts", 2), ("first_hitting", 1)])
def test_blind_choices_are_uniform(strategy: RemaskingStrategy, tokens_per_step: int) -> None:
    policy, rng = policy_of(strategy), np.random.default_rng(2)
    sets = list(combinations(range(4), tokens_per_step))
    seen = Counter[tuple[int, ...]]()
    for _ in range(3000):
        seen[
            tuple(
                np.flatnonzero(
                    policy.select_positions(look([0.0] * 4, tokens_per_step, uniforms=rng.random(4)))
                ).tolist()
            )
        ] += 1
    assert seen.keys() == set(sets)
    assert chi_square([seen[each] for each in sets], [1 / len(sets)] * len(sets)) < 20.52


@pytest.mark.parametrize("strategy", ["origin", "ancestral"])
def test_independent_choices_have_the_planned_probability(strategy: RemaskingStrategy) -> None:
    policy, grid = policy_of(strategy), (np.arange(1000) + 0.5) / 1000
    for tokens_per_step in (0.25, 0.5):
        assert policy.select_positions(look(grid, tokens_per_step, uniforms=grid)).sum() == 1000 * tokens_per_step
    assert policy.select_positions(look(grid, 1.0, uniforms=np.full(1000, 1 - 2.0**-53))).all()
    assert not policy.select_positions(look(grid, 0.25, uniforms=np.full(1000, 0.25))).any()


def test_p2_masks_the_least_confident_again() -> None:
    policy = policy_of("p2")
    confidence = [0.3, 0.9, 0.3, 0.8, 0.3]
    masked = np.array([True, False, False, True, True])
    held = [
        policy.select_positions(
            look(confidence, masked=masked, step=step, num_steps=4, tokens_per_step=(step + 1) / 4)
        ).tolist()
        for step in range(4)
    ]
    # floor(5 * 3/4) = 3, 2, 1 and 0 masks; among equals the later positions.
    assert held[0] == [False, True, False, True, False]
    assert held[1] == [True, True, False, True, False]
    assert held[2] == [True, True, True, True, False]
    assert held[3] == [True] * 5


def test_p2_counts_in_whole_numbers() -> None:
    held = policy_of("p2").select_positions(look([0.5] * 10, 0.9, step=8, num_steps=10))
    assert held.sum() == 9, "(1 - 0.9) * 10 is 0.9999999999999998 in floats"


LOOPS = [
    ("remdm_cap", {}),
    ("remdm_cap", {"remdm_eta": 1.0}),
    ("remdm_loop", {}),
    ("remdm_loop", {"remdm_eta": 0.5, "remdm_t_on": 0.6, "remdm_t_off": 0.2, "remdm_alpha_on": 0.5}),
]


@pytest.mark.parametrize(("strategy", "options"), LOOPS)
@pytest.mark.parametrize("steps", [1, 2, 7, 20])
def test_remdm_keeps_the_marginals(strategy: RemaskingStrategy, options: dict[str, float], steps: int) -> None:
    """alpha_t (1 - sigma) + (1 - alpha_t) p = alpha_s, 0 <= sigma <= sigma_max, and nothing is left at the end."""
    policy, grid = policy_of(strategy, **options), (np.arange(20_000) + 0.5) / 20_000
    alpha = 0.0
    for step, tokens_per_step in enumerate(policy.unmasking_schedule(16, steps, 16)):
        looks = [
            look(grid, tokens_per_step, uniforms=grid, masked=np.full(len(grid), masked), step=step, num_steps=steps)
            for masked in (True, False)
        ]
        settles, stays = (float(policy.select_positions(each).mean()) for each in looks)
        before, alpha = alpha, alpha * stays + (1.0 - alpha) * settles
        time = (steps - step - 1) / steps
        if strategy == "remdm_cap":
            expected = 1.0 - time
            bound = min(options.get("remdm_eta", 0.02), 1.0, (1 - expected) / before if before > 1e-9 else 1.0)
            assert 1.0 - stays == pytest.approx(bound, abs=1e-3)
        else:
            on, off = options.get("remdm_t_on", 0.55), options.get("remdm_t_off", 0.05)
            level = options.get("remdm_alpha_on", 0.9)
            expected = level * (1 - time) / (1 - on) if time > on else max(level, 1 - (1 - level) * time / off)
            is_on = time + 1 / steps <= on + 1e-12 and time >= off - 1e-12
            assert 1.0 - stays == pytest.approx(options.get("remdm_eta", 0.02) if is_on else 0.0, abs=1e-4)
        assert alpha == pytest.approx(expected, abs=1e-3)
    assert alpha == 1.0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_settles_everything(strategy: RemaskingStrategy) -> None:
    """On any confidences, in no more steps than are planned; what is put off comes last."""
    policy, rng = policy_of(strategy), np.random.default_rng(3)
    for size, given, steps in [(1, 0, 1), (6, 0, 3), (6, 2, 6), (9, 4, 4), (8, 0, 20)]:
        masked = np.ones(size - given, dtype=np.bool_)
        unmasking_schedule = policy.unmasking_schedule(len(masked), steps, size)
        for step, tokens_per_step in enumerate(unmasking_schedule):
            if not policy.can_remask and not masked.any():
                break
            places = np.arange(len(masked)) if policy.can_remask else np.flatnonzero(masked)
            confidence = np.where(rng.random(len(places)) < 0.2, -INF, -2 * rng.random(len(places)))
            if policy.is_model_independent:
                confidence = np.zeros(len(places))
            held = policy.select_positions(
                look(
                    confidence,
                    tokens_per_step,
                    uniforms=rng.random(len(places)),
                    masked=masked[places],
                    step=step,
                    num_steps=len(unmasking_schedule),
                )
            )
            assert policy.is_model_independent or policy.can_remask or held.any()
            if strategy in SEEING:
                assert not (held & np.isneginf(confidence)).any() or held[~np.isneginf(confidence)].all()
            masked[places] = ~held
        assert not masked.any(), (size, given, steps)
