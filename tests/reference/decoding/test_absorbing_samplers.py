"""`generate` is MDLM's, P2's and ReMDM's sampler: canvas by canvas against slow transcriptions, and in distribution
against enumeration.

Shapes: V tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest

from diffusionlm.inference.generate import generate
from tests.reference.decoding.absorbing import (
    equal_counts,
    first_hitting,
    largest_sigma,
    loop_alpha,
    mdlm_ddpm_cache,
    p2,
    remdm,
    remdm_cap_rates,
    remdm_loop_rates,
)
from tests.reference.decoding.choosing import softmax
from tests.reference.decoding.standins import (
    MASK,
    TableModel,
    assert_like,
    assert_same,
    choice,
    has_taken_back,
    settings,
    spread,
    table_model,
)

PROMPTS = [[], [3], [1, 2, MASK, 4, 5]]
FILTERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
]


@pytest.fixture(scope="module")
def model() -> TableModel:
    return table_model(seed=4)


@pytest.mark.parametrize(("new", "block", "steps"), [(10, 10, 4), (10, 10, 30), (9, 4, 6), (5, 5, 1)])
def test_ancestral_is_mdlms_cached_sampler(model: TableModel, new: int, block: int, steps: int) -> None:
    left_out = 0
    for seed, (prompt, values) in enumerate(spread(PROMPTS, FILTERS, steps)):
        config = settings(
            max_new_tokens=new, block_length=block, denoising_steps=steps, remasking_strategy="ancestral", **values
        )
        done, text = assert_like(mdlm_ddpm_cache, model, prompt, config, seed, block_length=block, steps=steps)
        left_out += text.step - done.num_forwards
    assert left_out > 0 or steps < new


@pytest.mark.parametrize("values", FILTERS)
def test_first_hitting_and_equal_counts(model: TableModel, values: dict[str, Any]) -> None:
    for seed, prompt in enumerate(PROMPTS):
        config = settings(max_new_tokens=9, remasking_strategy="first_hitting", **values)
        assert_like(first_hitting, model, prompt, config, seed)
        for steps in (9, 4, 2):
            config = settings(max_new_tokens=9, remasking_strategy="equal_counts", denoising_steps=steps, **values)
            assert_like(equal_counts, model, prompt, config, seed, steps=steps)


@pytest.mark.parametrize(("new", "block", "steps"), [(10, 10, 10), (10, 10, 4), (9, 4, 3), (6, 6, 8), (7, 3, 1)])
def test_p2(model: TableModel, new: int, block: int, steps: int) -> None:
    taken_back = 0
    for seed, (prompt, values) in enumerate(spread(PROMPTS, FILTERS, steps)):
        for source in ("filtered", "unfiltered"):
            own: dict[str, Any] = {"remasking_strategy": "p2", "confidence_from": source, **values}
            config = settings(max_new_tokens=new, block_length=block, denoising_steps=steps, **own)
            _, text = assert_like(p2, model, prompt, config, seed, block_length=block, steps=steps)
            taken_back += has_taken_back(text.history)
    assert taken_back > 0 or steps == 1


@pytest.mark.parametrize("steps", [1, 7, 24])
@pytest.mark.parametrize("loop", [False, True])
def test_remdm(model: TableModel, steps: int, loop: bool) -> None:
    taken_back = 0
    shape: dict[str, Any] = {"remasking_strategy": "remdm_loop" if loop else "remdm_cap", "remdm_eta": 0.3}
    shape |= {"remdm_t_on": 0.7, "remdm_t_off": 0.2, "remdm_alpha_on": 0.6} if loop else {}
    rates = remdm_loop_rates(steps, 0.3, 0.7, 0.2, 0.6) if loop else remdm_cap_rates(steps, 0.3)
    for seed, (prompt, values) in enumerate(spread(PROMPTS, FILTERS, steps)):
        config = settings(max_new_tokens=12, denoising_steps=steps, **shape, **values)
        _, text = assert_like(remdm, model, prompt, config, seed, rates=rates)
        taken_back += has_taken_back(text.history)
    assert taken_back > 0 or steps == 1


def test_remdms_defaults(model: TableModel) -> None:
    for name, rates in (("remdm_cap", remdm_cap_rates(40, 0.02)), ("remdm_loop", remdm_loop_rates(40, 0.02))):
        config = settings(max_new_tokens=20, denoising_steps=40, remasking_strategy=name)
        sampled = choice(config.model_copy(update={"temperature": 1.0}), 3, "filtered")
        assert_same(model, [1], config, 3, remdm(model.table, [1], sampled, gen_length=20, rates=rates))


@pytest.mark.parametrize("steps", [3, 7, 20])
def test_rates_of_remdm_keep_the_share_of_masks(steps: int) -> None:
    """That of the forward process at each time, however much is masked again."""
    times = [(steps - i) / steps for i in range(steps + 1)]
    cases = [
        (remdm_cap_rates(steps, 0.3), [1.0 - time for time in times]),
        (remdm_loop_rates(steps, 0.3, 0.7, 0.2, 0.6), [loop_alpha(time, 0.7, 0.2, 0.6) for time in times]),
    ]
    for rates, alphas in cases:
        share = 0.0
        for i, (settle, remask) in enumerate(rates):
            assert 0.0 <= settle <= 1.0 + 1e-12
            assert 0.0 <= remask <= largest_sigma(alphas[i], alphas[i + 1]) + 1e-12
            share = share * (1.0 - remask) + (1.0 - share) * settle
            assert share == pytest.approx(alphas[i + 1], abs=1e-12)
        assert share == pytest.approx(1.0)


# ----------------------------------------------------------------------------------------------------------------------
# Distributions: three tokens, three positions, every way that chance can take


V, N, HIDDEN = 3, 3, 3
State = tuple[int, ...]
Moves = Iterator[tuple[State, float]]
DRAWS = 1500


@cache
def three_tokens() -> TableModel:
    return table_model(V, seed=5, scale=1.5)


@cache
def probabilities(state: State) -> list[list[float]]:
    """Of each token at each position."""
    return [softmax(logits_V[:V]).tolist() for logits_V in three_tokens().table(state)]


def masked(state: State) -> list[int]:
    return [position for position in range(N) if state[position] == HIDDEN]


def filled(state: State, positions: tuple[int, ...]) -> Moves:
    """Tokens drawn at these places."""
    for tokens in product(range(V), repeat=len(positions)):
        following, weight = list(state), 1.0
        for position, token in zip(positions, tokens, strict=True):
            following[position] = token
            weight *= probabilities(state)[position][token]
        yield tuple(following), weight


def each_by_itself(settle: float, remask: float) -> Callable[[State], Moves]:
    """Every position goes its own way."""

    def moves(state: State) -> Moves:
        for changes in product((False, True), repeat=N):
            rates = [settle if state[position] == HIDDEN else remask for position in range(N)]
            weight = 1.0
            for change, rate in zip(changes, rates, strict=True):
                weight *= rate if change else 1.0 - rate
            chosen = tuple(position for position in masked(state) if changes[position])
            for following, probability in filled(state, chosen) if weight > 0.0 else ():
                next_state = [
                    HIDDEN if changes[position] and state[position] != HIDDEN else token
                    for position, token in enumerate(following)
                ]
                yield tuple(next_state), weight * probability

    return moves


def some_at_random(count: int) -> Callable[[State], Moves]:
    def moves(state: State) -> Moves:
        sets = list(combinations(masked(state), count))
        for chosen in sets:
            yield from ((following, weight / len(sets)) for following, weight in filled(state, chosen))

    return moves


def the_most_confident(count: int) -> Callable[[State], Moves]:
    """A token is drawn everywhere; those stay that are the most probable."""

    def moves(state: State) -> Moves:
        for following, weight in filled(state, tuple(masked(state))):
            sure = {position: probabilities(state)[position][following[position]] for position in masked(state)}
            most_confident = sorted(sure, key=lambda position, sure=sure: (-sure[position], position))[:count]  # type: ignore[misc]
            yield (
                tuple(
                    token if position in most_confident else state[position] for position, token in enumerate(following)
                ),
                weight,
            )

    return moves


def exact(steps: list[Callable[[State], Moves]]) -> dict[State, float]:
    now = {(HIDDEN,) * N: 1.0}
    for moves in steps:
        following: dict[State, float] = {}
        for state, mass in now.items():
            for other, weight in moves(state):
                following[other] = following.get(other, 0.0) + mass * weight
        now = following
    return now


def remasking(rates: list[tuple[float, float]]) -> list[Callable[[State], Moves]]:
    return [*(each_by_itself(*rate) for rate in rates[:-1]), each_by_itself(1.0, 0.0)]


SAMPLERS: dict[str, tuple[dict[str, Any], list[Callable[[State], Moves]]]] = {
    "ancestral": ({"denoising_steps": 2}, [each_by_itself(0.5, 0.0), each_by_itself(1.0, 0.0)]),
    "first_hitting": ({}, [some_at_random(1)] * 3),
    "equal_counts": ({"denoising_steps": 2}, [some_at_random(2), some_at_random(1)]),
    "remdm_cap": ({"denoising_steps": 4, "remdm_eta": 0.4}, remasking(remdm_cap_rates(4, 0.4))),
    "remdm_loop": (
        {"denoising_steps": 8, "remdm_eta": 0.5, "remdm_alpha_on": 0.6},
        remasking(remdm_loop_rates(8, 0.5, alpha_on=0.6)),
    ),
    "low_confidence": ({"denoising_steps": 2, "temperature": 1.0}, [the_most_confident(2), the_most_confident(1)]),
}


def chi_square(counts: Counter[State], expected: dict[State, float]) -> float:
    """In standard deviations from what is likely (Wilson and Hilferty); rare texts are counted as one."""
    common = [text for text in expected if expected[text] * DRAWS >= 5.0]
    cells = [(counts[text], expected[text] * DRAWS) for text in common]
    cells.append((DRAWS - sum(observed for observed, _ in cells), DRAWS - sum(expected for _, expected in cells)))
    total = sum((observed - expected) ** 2 / expected for observed, expected in cells if expected > 1e-9)
    freedom = 2.0 / (9.0 * (len(cells) - 1))
    return float(((total / (len(cells) - 1)) ** (1 / 3) - (1.0 - freedom)) / freedom**0.5)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("ancestral", "remdm_cap") else pytest.mark.slow) for name in SAMPLERS],
)
def test_samples_follow_the_exact_distribution(name: str) -> None:
    """And no other sampler's."""
    values, steps = SAMPLERS[name]
    expected = exact(steps)
    assert sum(expected.values()) == pytest.approx(1.0, abs=1e-12)
    assert all(HIDDEN not in text for text in expected)
    config = settings(max_new_tokens=N, remasking_strategy=name, **values)
    results = generate(three_tokens(), [[]] * DRAWS, config, range(DRAWS))
    counts = Counter(result.token_ids for result in results)
    assert counts.keys() <= expected.keys()
    assert chi_square(counts, expected) < 3.3
    distances = {other: chi_square(counts, exact(rule)) for other, (_, rule) in SAMPLERS.items() if other != name}
    assert max(distances.values()) > 5.0, distances
