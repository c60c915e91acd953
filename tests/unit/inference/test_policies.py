"""Strategies: their confidences, counts and choices."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from config.generation import GenerationConfig, RemaskingStrategy
from diffusionlm.inference.policies import (
    Entropy,
    LowConfidence,
    Random,
    Sequential,
    Threshold,
    TopkMargin,
    build_policy,
    dream_quotas,
    even_quotas,
    most_confident,
)

STRATEGIES: tuple[RemaskingStrategy, ...] = (
    "low_confidence",
    "random",
    "topk_margin",
    "entropy",
    "sequential",
    "threshold",
)


@pytest.mark.parametrize(
    ("total", "steps", "expected"),
    [(8, 4, (2, 2, 2, 2)), (10, 4, (3, 3, 2, 2)), (3, 5, (1, 1, 1)), (7, 1, (7,)), (0, 3, ())],
)
def test_even_quotas_put_the_surplus_first(total: int, steps: int, expected: tuple[int, ...]) -> None:
    assert even_quotas(total, steps) == expected


def test_dream_quotas_are_those_of_its_time_steps() -> None:
    # t = 1, 0.75025, 0.5005, 0.25075, 0.001: 1 - s / t of the first three is a little below 1/4, 1/3, 1/2.
    assert dream_quotas(12, 4) == (2, 3, 3, 4)
    assert dream_quotas(5, 1) == (5,)
    assert dream_quotas(0, 3) == ()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("steps", [1, 3, 16, 40])
def test_quotas_settle_everything(strategy: RemaskingStrategy, steps: int) -> None:
    for masked in range(30):
        quotas = build_policy(GenerationConfig(remasking_strategy=strategy)).quotas(masked, steps)
        assert sum(quotas) == masked
        assert all(quota > 0 for quota in quotas)
        assert strategy == "threshold" or len(quotas) <= steps


def test_ties_go_to_the_first_positions() -> None:
    confidence = np.array([0.5, 0.9, 0.5, 0.9, 0.9])
    assert most_confident(confidence, 2).tolist() == [False, True, False, True, False]
    assert most_confident(confidence, 4).tolist() == [True, True, False, True, True]


def test_threshold_is_inclusive_and_takes_at_least_the_best() -> None:
    policy = Threshold(0.75)
    assert policy.choose(np.array([0.75, 0.7, 0.8]), 1).tolist() == [True, False, True]
    assert policy.choose(np.array([0.1, 0.3, 0.3]), 1).tolist() == [False, True, False]


def test_sequential_takes_the_first() -> None:
    assert Sequential().choose(np.array([0.1, 0.9, 0.5]), 2).tolist() == [True, True, False]
    assert Sequential().quotas(7, 3) == (3, 2, 2)


def test_confidences() -> None:
    probs = torch.tensor([[0.5, 0.2, 0.3, 0.0], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    tokens, uniforms = torch.tensor([1, 3]), torch.tensor([0.7, 0.1], dtype=torch.float64)
    assert LowConfidence().confidence(probs, tokens, uniforms).tolist() == [0.2, 0.25]
    assert Threshold(0.5).confidence(probs, tokens, uniforms).tolist() == [0.2, 0.25]
    assert Random().confidence(probs, tokens, uniforms).tolist() == [0.7, 0.1]
    assert TopkMargin().confidence(probs, tokens, uniforms).tolist() == pytest.approx([0.2, 0.0])
    entropy = -sum(p * math.log(p) for p in (0.5, 0.2, 0.3))
    assert Entropy().confidence(probs, tokens, uniforms).tolist() == pytest.approx([-entropy, -math.log(4)])


def test_build_policy() -> None:
    assert build_policy(GenerationConfig(remasking_strategy="threshold")) == Threshold(0.9)
    assert build_policy(GenerationConfig(remasking_strategy="threshold", confidence_threshold=0.0)) == Threshold(0.0)
    assert build_policy(GenerationConfig()) == LowConfidence()
    assert build_policy(GenerationConfig(remasking_strategy="sequential")) == Sequential()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"steps": 4, "denoising_steps": 2}, ["steps = 4", "denoising_steps = 2", "remove one"]),
        ({"steps": 4, "remasking_strategy": "threshold"}, ["steps = 4", "no effect", "remove it"]),
        ({"confidence_threshold": 0.5}, ["confidence_threshold = 0.5", "threshold", "low_confidence"]),
        ({"top_p": 0.0}, ["top_p", "greater than 0"]),
        ({"temperature": -1.0}, ["temperature"]),
        ({"stop_token_ids": [-1]}, ["stop_token_ids"]),
    ],
)
def test_config_errors(values: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        GenerationConfig.model_validate(values)
    assert all(word in str(caught.value) for word in words)
