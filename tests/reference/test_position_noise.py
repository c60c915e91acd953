"""Position-dependent noise against enumeration: the loss is the bound of orders that are drawn by rates."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from config.training.objective import FixedCountMasking, IndependentMasking
from diffusionlm.diffusion.corruption import sample_masks
from diffusionlm.diffusion.noised_batch import NoiseKey
from diffusionlm.diffusion.schedules import CosineSchedule

Estimator = FixedCountMasking | IndependentMasking
Costs = dict[tuple[int, frozenset[int]], float]
"""(token, masked tokens) -> its cross-entropy."""

RATIO = 6.0
ESTIMATORS: dict[str, Estimator] = {
    "counts": FixedCountMasking(position_ratio=RATIO),
    "linear": IndependentMasking(position_ratio=RATIO, epsilon=0.0),
    "cosine": IndependentMasking(position_ratio=RATIO, epsilon=0.0, schedule=CosineSchedule()),
}


def bound_of_orders(costs: Costs, num_tokens: int, ratio: float) -> float:
    """The mean over all orders of their costs, with the probabilities of Plackett and Luce."""
    rates = [ratio ** -(index / max(num_tokens - 1, 1)) for index in range(num_tokens)]
    bound = 0.0
    for order in itertools.permutations(range(num_tokens)):
        left, probability, cost = set(range(num_tokens)), 1.0, 0.0
        for token in order:
            probability *= rates[token] / sum(rates[other] for other in left)
            cost += costs[token, frozenset(left)]
            left.remove(token)
        bound += probability * cost
    return bound


def random_costs(num_tokens: int) -> Costs:
    rng = np.random.default_rng(num_tokens)
    sets = [M for size in range(1, num_tokens + 1) for M in itertools.combinations(range(num_tokens), size)]
    return {(token, frozenset(M)): float(rng.exponential()) for M in sets for token in M}


def estimates(estimator: Estimator, costs: Costs, num_tokens: int, rows: int, steps: int) -> np.ndarray:
    """The mean over the rows of each step."""
    group_ids_BL = np.zeros((rows, num_tokens), dtype=np.int64)
    values = []
    for step in range(steps):
        (sample,) = sample_masks(group_ids_BL, NoiseKey(5, step, 0, rows), estimator, "elbo")
        values.append(
            sum(
                weights_L[token] * costs[token, frozenset(np.flatnonzero(masked_L).tolist())]
                for masked_L, weights_L in zip(sample.masked_BL, sample.weights_BL, strict=True)
                for token in np.flatnonzero(masked_L).tolist()
            )
            / rows
        )
    return np.array(values)


@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_loss_is_the_bound_of_its_orders(name: str, num_tokens: int) -> None:
    costs = random_costs(num_tokens)
    values = estimates(ESTIMATORS[name], costs, num_tokens, rows=40, steps=30)
    error = values.std(ddof=1) / math.sqrt(len(values))
    expected = bound_of_orders(costs, num_tokens, RATIO)
    assert abs(values.mean() - expected) < 4 * error + 1e-9
    if name == "counts" and num_tokens > 1:  # the one with the least variance
        assert abs(values.mean() - bound_of_orders(costs, num_tokens, 1.0)) > 4 * error, "all orders alike"


def test_later_tokens_are_masked_more() -> None:
    """With a linear schedule token i is masked with probability 1 / (1 + its rate), in each group."""
    group_ids_BL = np.array([[0, -1, 0, 0, 1, 1]]).repeat(2000, 0)
    estimator = IndependentMasking(position_ratio=9.0, epsilon=0.0)
    (sample,) = sample_masks(group_ids_BL, NoiseKey(3, 0, 0, 2000), estimator, "inverse_p")
    rates_L = np.array([3.0, np.nan, 1.0, 1 / 3, 3.0, 1 / 3])
    expected_L = np.where(np.isnan(rates_L), 0.0, 1.0 / (1.0 + rates_L))
    assert np.abs(sample.masked_BL.mean(0) - expected_L).max() < 4 * 0.5 / math.sqrt(2000)
    # Weights 1 / p: each token counts 1 in the mean.
    np.testing.assert_allclose(sample.weights_BL.mean(0)[[2, 3, 5]], 1.0, atol=0.35)
