"""Which masked positions become final after a forward.

A policy knows nothing of models, blocks or time: it turns probabilities into confidences, says how many positions each
forward of a block should settle, and chooses them. A new strategy is one frozen dataclass here and one arm in
`build_policy`.

Shapes: R rows of a forward, V vocabulary, M masked positions of one request's block, in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.generation import DEFAULT_CONFIDENCE_THRESHOLD, GenerationConfig


class Policy(Protocol):
    """What the decoding loop knows of a strategy."""

    def confidence(self, probs_RV: Tensor, tokens_R: Tensor, uniforms_R: Tensor) -> Tensor:
        """How sure each row is, [R]; ``tokens_R`` were chosen, ``uniforms_R`` are fresh numbers in [0, 1)."""

    def quotas(self, num_masked: int, num_steps: int) -> tuple[int, ...]:
        """Positions that each forward settles, in order: positive, their sum is ``num_masked``. There may be fewer
        than ``num_steps``: a forward that settles nothing is left out."""

    def choose(self, confidence_M: NDArray[np.float64], quota: int) -> NDArray[np.bool_]:
        """The positions that become final now, at least ``quota`` of them."""


@dataclass(frozen=True)
class LowConfidence:
    """LLaDA's ``low_confidence``: what is least confident stays masked (Nie et al. 2025, generate.py)."""

    def confidence(self, probs_RV: Tensor, tokens_R: Tensor, uniforms_R: Tensor) -> Tensor:
        return chosen_probability(probs_RV, tokens_R)

    def quotas(self, num_masked: int, num_steps: int) -> tuple[int, ...]:
        return even_quotas(num_masked, num_steps)

    def choose(self, confidence_M: NDArray[np.float64], quota: int) -> NDArray[np.bool_]:
        return most_confident(confidence_M, quota)


@dataclass(frozen=True)
class Random:
    """LLaDA's ``random``: any positions, all equally likely."""

    def confidence(self, probs_RV: Tensor, tokens_R: Tensor, uniforms_R: Tensor) -> Tensor:
        return uniforms_R

    def quotas(self, num_masked: int, num_steps: int) -> tuple[int, ...]:
        return even_quotas(num_masked, num_steps)

    def choose(self, confidence_M: NDArray[np.float64], quota: int) -> NDArray[np.bool_]:
        return most_confident(confidence_M, quota)


@dataclass(frozen=True)
class TopkMargin:
    """Dream's ``topk_margin``: the probability of the best token less that of the second (Ye et al. 2025)."""

    def confidence(self, probs_RV: Tensor, tokens_R: Tensor, uniforms_R: Tensor) -> Tensor:
        best_R2 = probs_RV.topk(2, dim=1).values
        return best_R2[:, 0] - best_R2[:, 1]

    def quotas(self, num_masked: int, num_steps: int) -> tuple[int, ...]:
        return dream_quotas(num_masked, num_steps)

    def choose(self, confidence_M: NDArray[np.float64], quota: int) -> NDArray[np.bool_]:
        return most_confident(confidence_M, quota)


@dataclass(frozen=True)
class Entropy:
    """Dream's ``entropy``: the distributions of least entropy first (Ye et al. 2025)."""

    def confidence(self, probs_RV: Tensor, tokens_R: Tensor, uniforms_R: Tensor) -> Tensor:
        return torch.xlogy(probs_RV, probs_RV).sum(dim=1)

    def quotas(self, num_masked: int, num_steps: int) -> tuple[int, ...]:
        return dream_quotas(num_masked, num_steps)

    def choose(self, confidence_M: NDArray[np.float64], quota: int) -> NDArray[np.bool_]:
        return most_confident(confidence_M, quota)


@dataclass(frozen=True)
class Sequential:
    """SDAR's ``sequential``: the first masked positions, whatever the model says (Cheng et al. 2025)."""

    def confidence(self, probs_RV: Tensor, tokens_R: Tensor, uniforms_R: Tensor) -> Tensor:
        return torch.zeros_like(uniforms_R)

    def quotas(self, num_masked: int, num_steps: int) -> tuple[int, ...]:
        return even_quotas(num_masked, num_steps)

    def choose(self, confidence_M: NDArray[np.float64], quota: int) -> NDArray[np.bool_]:
        return np.arange(len(confidence_M)) < quota


@dataclass(frozen=True)
class Threshold:
    """Fast-dLLM's ``threshold``: everything of at least this probability, at least the best one (Wu et al. 2025)."""

    confidence_threshold: float

    def confidence(self, probs_RV: Tensor, tokens_R: Tensor, uniforms_R: Tensor) -> Tensor:
        return chosen_probability(probs_RV, tokens_R)

    def quotas(self, num_masked: int, num_steps: int) -> tuple[int, ...]:
        return (1,) * num_masked

    def choose(self, confidence_M: NDArray[np.float64], quota: int) -> NDArray[np.bool_]:
        return most_confident(confidence_M, quota) | (confidence_M >= self.confidence_threshold)


def build_policy(config: GenerationConfig) -> Policy:
    """The policy that ``remasking_strategy`` names."""
    match config.remasking_strategy:
        case "low_confidence":
            return LowConfidence()
        case "random":
            return Random()
        case "topk_margin":
            return TopkMargin()
        case "entropy":
            return Entropy()
        case "sequential":
            return Sequential()
        case "threshold":
            given = config.confidence_threshold
            return Threshold(DEFAULT_CONFIDENCE_THRESHOLD if given is None else given)
        case _:
            assert_never(config.remasking_strategy)


def even_quotas(total: int, num_steps: int) -> tuple[int, ...]:
    """LLaDA's: total // steps each, the surplus one by one to the first; zeros left out."""
    share, surplus = divmod(total, num_steps)
    quotas = (share + (1 if step < surplus else 0) for step in range(num_steps))
    return tuple(quota for quota in quotas if quota)


DREAM_EPSILON = 1e-3
"""Where Dream's time ends."""


def dream_quotas(num_masked: int, num_steps: int) -> tuple[int, ...]:
    """Dream's (generation_utils.py): time runs linearly from 1 to epsilon, a step from t to s settles
    int(masked * (1 - s / t)) positions, the last one all that is left. In fp32, as there; zeros left out."""
    times = torch.linspace(1.0, DREAM_EPSILON, num_steps + 1)
    left, quotas = num_masked, []
    for step in range(num_steps):
        share = 1.0 - times[step + 1] / times[step]
        quota = int(left * share) if step < num_steps - 1 else left
        quotas.append(quota)
        left -= quota
    return tuple(quota for quota in quotas if quota)


def most_confident(confidence_M: NDArray[np.float64], count: int) -> NDArray[np.bool_]:
    """The ``count`` most confident positions; among equals the first ones."""
    chosen_M = np.zeros(len(confidence_M), dtype=np.bool_)
    chosen_M[np.argsort(-confidence_M, kind="stable")[:count]] = True
    return chosen_M


def chosen_probability(probs_RV: Tensor, tokens_R: Tensor) -> Tensor:
    """Probability of each row's token, [R]."""
    return probs_RV.gather(1, tokens_R[:, None])[:, 0]
