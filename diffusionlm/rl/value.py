"""A value function of the steps of an answer, and generalized advantage estimates (TraceRL, Wang et al. 2025, section
4.3; Schulman et al. 2016).

The value of a token is a linear function of the hidden state that predicts it, of a model that gets no gradient from
it. With gamma = lambda = 1 the advantage of a token is the rewards from its step on, minus its value.

Shapes: N scored positions, D hidden, J tokens of an answer, U forwards of an answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.finetune.rl import ValueConfig
from diffusionlm.models.transformer import Transformer

BETAS, EPSILON = (0.9, 0.999), 1e-8
"""Of Adam."""


def discount_rewards(rewards_U: NDArray[np.float64], gamma: float) -> NDArray[np.float64]:
    """Rewards from each forward on, ``R_u = r_u + gamma R_(u+1)``, [U]."""
    return estimate_advantages(np.zeros(len(rewards_U)), np.arange(1, len(rewards_U) + 1), rewards_U, gamma, 1.0)


def estimate_advantages(
    values_J: NDArray[np.float64],
    steps_J: NDArray[np.int64],
    rewards_U: NDArray[np.float64],
    gamma: float,
    gae_lambda: float,
) -> NDArray[np.float64]:
    """Advantage of each token, [J]: ``r_u - V_j + gamma V_(u+1) + gamma lambda A_(u+1)``, where the value of a step is
    the mean over its tokens, and ``A_u = r_u - V_u + gamma V_(u+1) + gamma lambda A_(u+1)``.

    Args:
        steps_J: forward of each token, from 1 on.
    """
    counts_U = np.bincount(steps_J - 1, minlength=len(rewards_U))
    means_U = np.bincount(steps_J - 1, weights=values_J, minlength=len(rewards_U)) / counts_U.clip(min=1)
    following_U = np.zeros(len(rewards_U))
    """What comes after each step: gamma V_(u+1) + gamma lambda A_(u+1)."""
    for step in range(len(rewards_U) - 1, 0, -1):
        advantage = rewards_U[step] - means_U[step] + following_U[step]
        following_U[step - 1] = gamma * means_U[step] + gamma * gae_lambda * advantage
    return (rewards_U + following_U)[steps_J - 1] - values_J


class ValueHead:
    """A linear function of hidden states, trained by Adam on the squared error. All ranks have the same one."""

    def __init__(self, config: ValueConfig, hidden_size: int, device: torch.device) -> None:
        self.config = config
        self._vectors = torch.zeros(4, hidden_size + 1, dtype=torch.float64, device=device)
        """Weights and bias, the two moments of Adam, and the gradient of the step."""
        self._num_updates = 0
        self._totals = torch.zeros(2, dtype=torch.float64, device=device)
        """Sum of squared errors, and number of values, of the step."""
        self.state: dict[str, Any] = {}
        """A JSON value that `load_state_dict` reads: that of the last update, in the same dict."""
        self._write_state()

    @contextmanager
    def record(
        self, model: Transformer, returns_N: Tensor, is_counted_N: Tensor, values: list[Tensor]
    ) -> Iterator[None]:
        """Context of a forward at N output positions, whose values are appended, [N]; the gradient of those that count
        is accumulated."""

        def add(_module: Any, _inputs: Any, hidden_ND: Tensor) -> None:
            features = torch.cat([hidden_ND.double(), torch.ones_like(hidden_ND[:, :1], dtype=torch.float64)], dim=1)
            values_N = features @ self._vectors[0]
            errors_N = (values_N - returns_N) * is_counted_N
            self._vectors[3] += errors_N @ features
            self._totals += torch.stack([errors_N.square().sum(), is_counted_N.sum()])
            values.append(values_N)

        handle = model.model.norm.register_forward_hook(add)
        try:
            yield
        finally:
            handle.remove()

    def update(self, all_reduce: Callable[[Tensor], Tensor]) -> float:
        """Make a step of Adam with the mean gradient over all ranks. Returns the mean squared error before it."""
        weights, first, second, gradient = self._vectors
        sums = all_reduce(torch.cat([gradient, self._totals]))
        squared_error, count = sums[-2:].tolist()
        gradient.copy_(sums[:-2] / max(count, 1.0))
        if not math.isfinite(squared_error):  # the step is skipped as well
            gradient.zero_()
        self._num_updates += 1
        first.lerp_(gradient, 1.0 - BETAS[0])
        second.lerp_(gradient.square(), 1.0 - BETAS[1])
        corrections = [1.0 - beta**self._num_updates for beta in BETAS]
        weights -= self.config.learning_rate * (first / corrections[0]) / ((second / corrections[1]).sqrt() + EPSILON)
        gradient.zero_()
        self._totals.zero_()
        self._write_state()
        return float(squared_error / max(count, 1.0))

    def _write_state(self) -> None:
        self.state.update(vectors=self._vectors[:3].tolist(), num_updates=self._num_updates)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self._vectors[:3] = torch.tensor(state["vectors"], dtype=torch.float64)
        self._num_updates = state["num_updates"]
        self._write_state()
