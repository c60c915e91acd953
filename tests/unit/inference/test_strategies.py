"""Strategies: what a class must have, ends of unmasking schedules, ties and deferred tokens.

`tests/reference/decoding` compares the rules and schedules with transcriptions of the published samplers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from diffusionlm.inference import strategies
from diffusionlm.inference.strategies import STRATEGIES
from diffusionlm.inference.strategy import DecodeState, Strategy, select_most_confident

INF = float("inf")


def build(name: str, **options: Any) -> Strategy:
    return STRATEGIES[name](**options)


def select(
    strategy: Strategy, confidence: list[float] | NDArray[np.float64], schedule_value: float = 1, **state: Any
) -> list[int]:
    """Selected positions; all are masked, unless the state says otherwise."""
    M = len(confidence)
    defaults = {
        "is_masked_M": np.ones(M, dtype=np.bool_),
        "positions_M": np.arange(M),
        "uniforms_M": np.zeros(M),
        "step": 0,
        "num_steps": 1,
    }
    values: dict[str, Any] = {
        "confidence_M": np.array(confidence),
        "schedule_value": schedule_value,
        **defaults,
        **state,
    }
    return np.flatnonzero(strategy.select_positions(DecodeState(**values))).tolist()


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
            state = {"uniforms_M": rng.random(len(positions)), "is_masked_M": is_masked[positions], "step": step}
            chosen = select(strategy, confidence, schedule_value, num_steps=len(schedule), **state)
            is_selected = np.isin(np.arange(len(positions)), chosen)
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


@pytest.mark.parametrize("alg_temp", [1e-310, 1e300])
def test_extreme_alg_temp(alg_temp: float) -> None:
    strategy = build("low_confidence", alg_temp=alg_temp)
    uniforms = np.array([0.5, 0.0, 0.9, 1 - 2.0**-53])
    positions = select(strategy, [0.9, 0.7, -INF, 0.1], 2, uniforms_M=uniforms)
    assert positions == ([0, 1] if alg_temp < 1 else [0, 3]), "the most confident, or by the uniforms alone"
    positions = select(strategy, [0.1, 0.7, -INF, 0.8], 3, uniforms_M=uniforms)
    assert positions == [0, 1, 3], "a deferred token is last, whatever its uniform is"
