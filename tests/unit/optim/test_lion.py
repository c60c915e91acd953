"""Lion against a transcription of its algorithm, number by number."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from diffusionlm.optim.lion import Lion


def transcribed(weight: float, gradients: list[float], rates: list[float], betas: tuple[float, float]) -> list[float]:
    """Algorithm 2 of Chen et al. 2023 with decay 0.3: the weight after the last step, and the moment."""
    moment, (first, second) = 0.0, betas
    for gradient, rate in zip(gradients, rates, strict=True):
        update = first * moment + (1 - first) * gradient
        sign = math.copysign(1.0, update) if update else 0.0
        weight = weight - rate * (sign + 0.3 * weight)
        moment = second * moment + (1 - second) * gradient
    return [weight, moment]


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.5, 0.2)])
def test_updates_are_those_of_the_paper(betas: tuple[float, float]) -> None:
    steps, rates = 5, [0.1, 0.2, 0.05, 0.1, 0.01]
    gradients = torch.randn(steps, 3, 4, dtype=torch.float64)
    gradients[:, 0, 0] = 0.0
    start = torch.randn(3, 4, dtype=torch.float64)
    parameter = nn.Parameter(start.clone())
    optimizer = Lion([parameter], lr=1.0, betas=betas, weight_decay=0.3)
    for gradient, rate in zip(gradients, rates, strict=True):
        parameter.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    weights, moments = parameter.detach().tolist(), optimizer.state[parameter]["exp_avg"].tolist()
    for row in range(3):
        for column in range(4):
            expected = transcribed(float(start[row, column]), gradients[:, row, column].tolist(), rates, betas)
            assert [weights[row][column], moments[row][column]] == pytest.approx(expected, abs=1e-12)


def test_groups_have_their_own_settings_and_gradients_may_be_missing() -> None:
    one, two, three = (nn.Parameter(torch.ones(2)) for _ in range(3))
    one.grad, two.grad = torch.tensor([1.0, -1.0]), torch.tensor([2.0, 0.0])
    groups: list[dict[str, Any]] = [{"params": [one, three]}, {"params": [two], "lr": 0.5, "weight_decay": 1.0}]
    optimizer = Lion(groups, lr=0.1, betas=(0.9, 0.99), weight_decay=0.0)
    optimizer.step()
    torch.testing.assert_close(one.detach(), torch.tensor([0.9, 1.1]))
    torch.testing.assert_close(two.detach(), torch.tensor([0.0, 0.5]))
    assert torch.equal(three, torch.ones(2)) and three not in optimizer.state
