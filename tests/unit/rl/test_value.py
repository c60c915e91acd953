"""The value function: advantages of steps by the recursion of TraceRL, and a head that learns the rewards."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from config.finetune.rl import ValueConfig
from diffusionlm.models.transformer import Transformer
from diffusionlm.rl.value import ValueHead, discount_rewards, estimate_advantages
from tests.conftest import MakeModel

STEPS = np.array([1, 1, 2, 3, 3, 3])
VALUES = np.array([0.3, -0.2, 0.5, 0.1, 0.4, -0.6])
REWARDS = np.array([0.2, -0.1, 1.0])


def test_advantages_follow_the_recursion() -> None:
    gamma, factor = 0.9, 0.8
    means = [VALUES[step == STEPS].mean() for step in (1, 2, 3)] + [0.0]
    of_steps = [0.0] * 4
    for step in (2, 1, 0):
        delta = REWARDS[step] - means[step] + gamma * means[step + 1]
        of_steps[step] = delta + gamma * factor * of_steps[step + 1]
    expected = [
        REWARDS[step - 1] - value + gamma * means[step] + gamma * factor * of_steps[step]
        for value, step in zip(VALUES, STEPS, strict=True)
    ]
    np.testing.assert_allclose(estimate_advantages(VALUES, STEPS, REWARDS, gamma, factor), expected)


def test_without_discount_the_advantage_is_the_reward_to_come_less_the_value() -> None:
    to_come = np.array([1.1, 1.1, 0.9, 1.0, 1.0, 1.0])
    np.testing.assert_allclose(estimate_advantages(VALUES, STEPS, REWARDS, 1.0, 1.0), to_come - VALUES)
    np.testing.assert_allclose(discount_rewards(REWARDS, 0.5), [0.2 + 0.5 * (-0.1 + 0.5), -0.1 + 0.5, 1.0])


@pytest.fixture
def model(tiny_model: MakeModel) -> Transformer:
    return tiny_model(torch.float64)


def learn(head: ValueHead, model: Transformer, features: torch.Tensor, returns: torch.Tensor, parts: int) -> float:
    """An update on hidden states in some micro-batches, with a position that does not count in each."""
    values: list[torch.Tensor] = []
    for own, targets in zip(features.chunk(parts), returns.chunk(parts), strict=True):
        padded = torch.cat([own, 100.0 * own[:1]])
        is_counted = torch.tensor([1.0] * len(own) + [0.0], dtype=torch.float64)
        with head.record(model, torch.cat([targets, targets[:1]]), is_counted, values):
            for hook in model.model.norm._forward_hooks.values():
                hook(model.model.norm, (), padded)
    assert [len(own) for own in values] == [len(features) // parts + 1] * parts
    return head.update(lambda sums: sums)


def test_a_head_learns_a_linear_value_whatever_the_micro_batches(model: Transformer) -> None:
    rng = torch.Generator().manual_seed(0)
    features = torch.randn(12, model.config.hidden_size, generator=rng, dtype=torch.float64)
    returns = features[:, 0] - 2.0 * features[:, 1] + 0.5
    config = ValueConfig(learning_rate=0.05)
    heads = [ValueHead(config, model.config.hidden_size, torch.device("cpu")) for _ in range(2)]
    errors = [
        [learn(head, model, features, returns, parts) for _ in range(300)]
        for head, parts in zip(heads, (1, 3), strict=True)
    ]
    np.testing.assert_allclose(errors[0], errors[1], rtol=1e-6, atol=1e-12)
    assert errors[0][0] == pytest.approx(float(returns.square().mean())) and errors[0][-1] < 1e-3
    resumed = ValueHead(config, model.config.hidden_size, torch.device("cpu"))
    resumed.load_state_dict(json.loads(json.dumps(heads[0].state)))
    assert learn(resumed, model, features, returns, 1) == learn(heads[0], model, features, returns, 1)
    assert resumed.state == heads[0].state
