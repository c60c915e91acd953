"""Weights of masks and of times against the sum over all masks M of CE(M) / (|M| C(L, |M|)), in fp64.

Sources: Sahoo et al. 2024 (MDLM), Ou et al. 2024 (RADD), Nie et al. 2025 (LLaDA).
"""

from __future__ import annotations

import itertools
import math
from typing import get_args

import numpy as np
import pytest
import torch

from config.training.objective import FixedCountMasking, IndependentMasking, MaskedDiffusionConfig
from diffusionlm.diffusion.corruption import sample_masks
from diffusionlm.diffusion.noised_batch import CleanBatch, NoiseKey
from diffusionlm.diffusion.objectives import build_objective
from diffusionlm.diffusion.schedules import CosineSchedule, NoiseSchedule, PowerSchedule, SigmoidSchedule
from tests.reference.enumeration import assert_mean, subsets, table_config

V, L = 3, 4
SETS = subsets(range(L))
EXACT = {M: 1.0 / (len(M) * math.comb(L, len(M))) for M in SETS}
"""Weight of each mask's cross-entropy in the NELBO."""
COSTS = dict(zip(SETS, np.random.default_rng(3).exponential(size=len(SETS)).tolist(), strict=True))


@pytest.mark.parametrize("complementary", [False, True])
def test_each_mask_has_its_weight_in_the_nelbo(complementary: bool) -> None:
    """Weight times probability; draws are collected until each mask has come, always with one weight."""
    config = MaskedDiffusionConfig(estimator=FixedCountMasking(complementary=complementary))
    objective, rows = build_objective(config, table_config(V, L)), 64
    batch = CleanBatch(torch.zeros(rows, L, dtype=torch.int64), torch.ones(rows, L, dtype=torch.bool))
    weights: dict[tuple[int, ...], float] = {}
    for step in range(4):
        draw = objective.build_noised_batch(batch, NoiseKey(0, step, 0, rows))
        assert draw.denominator == draw.num_targets == rows * L
        flat = torch.zeros(draw.inputs_BS.numel(), dtype=torch.float64)
        flat[draw.positions_N] = draw.weights_N
        for inputs_L, weights_L in zip(draw.inputs_BS, flat.view(-1, L), strict=True):
            M = tuple((inputs_L == V).nonzero()[:, 0].tolist())
            assert len(set(weights_L[list(M)].tolist())) <= 1
            assert not M or weights.setdefault(M, float(weights_L[M[0]])) == float(weights_L[M[0]])
    # Complementary: k is uniform on 0 ... L, and the mask comes once as such and once as a complement.
    numerator, num_counts = (2, L + 1) if complementary else (1, L)
    products = {M: weights[M] * numerator / (num_counts * math.comb(L, len(M))) for M in weights}
    assert products == pytest.approx(EXACT, rel=1e-12)


SCHEDULES: list[NoiseSchedule] = [
    *(kind() for kind in get_args(get_args(NoiseSchedule)[0])),
    PowerSchedule(exponent=1.7),
    PowerSchedule(exponent=3.0),
    SigmoidSchedule(steepness=12.0),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.kind)
def test_nelbo_does_not_depend_on_the_schedule(schedule: NoiseSchedule) -> None:
    """The integral of -alpha'(t) / (1 - alpha(t)) times the expected cost (Sahoo et al. 2024, eq. 10).

    t = sin(pi u^2 / 2)^2, so that roots and powers are smooth at both ends.
    """
    np.testing.assert_allclose(schedule.alpha(np.array([0.0, 1.0])), [1.0, 0.0], rtol=0.0, atol=1e-12)
    nodes, node_weights = np.polynomial.legendre.leggauss(120)
    total = 0.0
    for u, node_weight in zip((nodes + 1) / 2, node_weights / 2, strict=True):
        angle = math.pi / 2 * u**2
        t = np.array(math.sin(angle) ** 2)
        p = 1.0 - float(schedule.alpha(t))
        if p == 0.0:
            continue  # A share below the rounding of 1 - alpha has no part in the integral.
        cost = sum(p ** len(M) * (1 - p) ** (L - len(M)) * COSTS[M] for M in SETS)
        slope = 2 * math.pi * u * math.sin(angle) * math.cos(angle)
        total += node_weight * slope * -float(schedule.alpha_prime(t)) / p * cost
    assert total == pytest.approx(sum(EXACT[M] * COSTS[M] for M in SETS), rel=1e-11)


# ----------------------------------------------------------------------------------------------------------------------
# Position-dependent noise: the loss is the bound of orders that are drawn by rates

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
    rng = np.random.default_rng(num_tokens)
    costs = {(token, frozenset(M)): float(rng.exponential()) for M in subsets(range(num_tokens)) for token in M}
    values = estimates(ESTIMATORS[name], costs, num_tokens, rows=40, steps=30)
    assert_mean(values, bound_of_orders(costs, num_tokens, RATIO), relative_error=0.3)
    error = values.std(ddof=1) / math.sqrt(len(values))
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
