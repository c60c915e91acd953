"""Identities of the NELBO, on tables: V = 3 tokens, L = 4, all 81 sequences at once, fp64.

Sources: Sahoo et al. 2024 (MDLM), Ou et al. 2024 (RADD), Nie et al. 2025 (LLaDA), Lou et al. 2024 (SEDD).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.training.objective import (
    FixedCountMasking,
    MaskedDiffusionConfig,
)
from diffusionlm.diffusion.noised_batch import CleanBatch, NoiseKey
from diffusionlm.diffusion.objectives import build_objective
from diffusionlm.diffusion.schedules import (
    NoiseSchedule,
    PowerSchedule,
    SigmoidSchedule,
)
from diffusionlm.evaluation.nelbo import nelbo
from tests.reference.enumeration import (
    IdealTable,
    Places,
    Posterior,
    RandomTable,
    StandIn,
    all_sequences,
    subsets,
    table_config,
    table_nll,
)

V, L = 3, 4
SETS = subsets(range(L))
ALL = all_sequences(V, L)
P = torch.softmax(2 * torch.randn(len(ALL), dtype=torch.float64, generator=torch.Generator().manual_seed(3)), dim=0)
SOURCE = IdealTable(ALL, P, V)
RANDOM = RandomTable(V, L)
CONFIG = table_config(V, L)
EXACT: dict[str, Any] = {"rtol": 0.0, "atol": 1e-12}


@cache
def nll(posterior: Posterior) -> dict[Places, Tensor]:
    return table_nll(posterior, ALL)


def elbo_weight(schedule: NoiseSchedule, t: NDArray[np.float64]) -> float:
    """-alpha'(t) / (1 - alpha(t)), the weight of masked cross-entropies in the NELBO (Sahoo et al. 2024, eq. 10)."""
    masked_share = 1.0 - float(schedule.alpha(t))
    return -float(schedule.alpha_prime(t)) / masked_share if masked_share > 0.0 else math.inf


@cache
def ce(posterior: Posterior) -> dict[Places, Tensor]:
    """CE(M), [81] each."""
    return {M: values.sum(1) for M, values in nll(posterior).items()}


def masked_ce(posterior: Posterior, p: float) -> Tensor:
    """f(p): expected cross-entropy where each token is masked with probability p, [81]."""
    return sum(p ** len(M) * (1 - p) ** (L - len(M)) * ce(posterior)[M] for M in SETS)  # type: ignore[return-value]


def by_masks(posterior: Posterior) -> Tensor:
    return sum(ce(posterior)[M] / (len(M) * math.comb(L, len(M))) for M in SETS)  # type: ignore[return-value]


def by_counts(posterior: Posterior) -> Tensor:
    """k uniform on 1 ... L, then a uniform mask, L / k."""
    return sum(  # type: ignore[return-value]
        torch.stack([L / k * ce(posterior)[M] for M in SETS if len(M) == k]).mean(0) / L for k in range(1, L + 1)
    )


def integral(function: Callable[[float], Any], nodes: int = 24) -> Tensor:
    """Over [0, 1]; exact for polynomials of degree below twice the nodes."""
    x, w = np.polynomial.legendre.leggauss(nodes)
    return sum(wi / 2 * function((xi + 1) / 2) for xi, wi in zip(x, w, strict=True))


def by_times(posterior: Posterior) -> Tensor:
    """Continuous time, linear schedule, weight 1 / t."""
    return integral(lambda t: masked_ce(posterior, t) / t)


def by_realised_counts(posterior: Posterior) -> Tensor:
    """t uniform, masks by coin, weight E[1 / t | mask] = (L + 1) / |M|."""
    return integral(
        lambda t: sum(t ** len(M) * (1 - t) ** (L - len(M)) * (L + 1) / len(M) * ce(posterior)[M] for M in SETS)
    )


def by_orders(posterior: Posterior) -> Tensor:
    """Chain rule along a random order, each token alone given those before it."""
    total = torch.zeros(len(ALL), dtype=torch.float64)
    for order in itertools.permutations(range(L)):
        for step, place in enumerate(order):
            M = tuple(sorted(order[step:]))
            total += nll(posterior)[M][:, M.index(place)]
    return total / math.factorial(L)


def by_scores(posterior: Posterior) -> Tensor:
    """Denoising score entropy with scores s = q p, q = alpha / (1 - alpha) = 1 / expm1(sigma), log-linear sigma."""

    def at(t: float) -> Tensor:
        sigma, slope = -math.log1p(-t), 1 / (1 - t)
        q = 1 / math.expm1(sigma)
        total = torch.zeros(len(ALL), dtype=torch.float64)
        for M in SETS:
            rng = t ** len(M) * (1 - t) ** (L - len(M))
            positive = len(M) * q  # the scores of a place sum to q
            negative = (q * (math.log(q) - nll(posterior)[M])).sum(1)
            constant = len(M) * q * (math.log(q) - 1)
            total += slope * rng * (positive - negative + constant)
        return total

    return integral(at)


def by_product(posterior: Posterior, complementary: bool = False) -> Tensor:
    """Every draw that the objective makes, with the weight that it gives it and the probability that it should have.

    Draws are collected until each mask has come; a mask's weight must always be the same.
    """
    objective = build_objective(MaskedDiffusionConfig(estimator=FixedCountMasking(complementary=complementary)), CONFIG)
    rows = 64
    batch = CleanBatch(torch.zeros(rows, L, dtype=torch.int64), torch.ones(rows, L, dtype=torch.bool))
    weights: dict[Places, float] = {}
    for step in range(4):
        draw = objective.build_noised_batch(
            batch, NoiseKey(seed=0, step=step, first_sequence=0, num_sequences_in_step=rows)
        )
        assert draw.denominator == draw.num_targets == rows * L
        flat = torch.zeros(draw.inputs_BS.numel(), dtype=torch.float64)
        flat[draw.positions_N] = draw.weights_N
        for inputs_L, weights_L in zip(draw.inputs_BS, flat.view(-1, L), strict=True):
            M = tuple((inputs_L == V).nonzero()[:, 0].tolist())
            assert len(set(weights_L[list(M)].tolist())) <= 1
            assert not M or weights.setdefault(M, float(weights_L[M[0]])) == float(weights_L[M[0]])
    assert sorted(weights) == sorted(SETS)
    # Complementary: k is uniform on 0 ... L, and the mask comes once as such and once as a complement.
    numerator, num_counts = (2, L + 1) if complementary else (1, L)
    probability = {M: numerator / (num_counts * math.comb(L, len(M))) for M in SETS}
    return sum(probability[M] * weights[M] * ce(posterior)[M] for M in SETS)  # type: ignore[return-value]


FORMS = {
    "counts": by_counts,
    "times": by_times,
    "realised": by_realised_counts,
    "orders": by_orders,
    "scores": by_scores,
    "product": by_product,
    "complementary": lambda posterior: by_product(posterior, complementary=True),
}


@pytest.mark.parametrize("posterior", [RANDOM, SOURCE], ids=["random", "ideal"])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_the_nelbo_are_equal(form: str, posterior: Posterior) -> None:
    torch.testing.assert_close(FORMS[form](posterior), by_masks(posterior), **EXACT)


SCHEDULES: list[NoiseSchedule] = [
    *(kind() for kind in get_args(get_args(NoiseSchedule)[0])),
    PowerSchedule(exponent=1.7),
    PowerSchedule(exponent=3.0),
    SigmoidSchedule(steepness=12.0),
]


@pytest.mark.parametrize("config", SCHEDULES, ids=lambda config: config.kind)
def test_nelbo_does_not_depend_on_the_schedule(config: NoiseSchedule) -> None:
    """t = sin(pi u^2 / 2)^2, so that roots and powers are smooth at both ends."""
    schedule = config
    assert float(schedule.alpha(np.array(0.0))) == pytest.approx(1.0, abs=1e-12)
    assert float(schedule.alpha(np.array(1.0))) == pytest.approx(0.0, abs=1e-12)

    def at(u: float) -> Tensor:
        angle = math.pi / 2 * u**2
        t = np.array(math.sin(angle) ** 2)
        weight, masked = elbo_weight(schedule, t), 1.0 - float(schedule.alpha(t))
        # A share below the rounding of 1 - alpha has no weight, and no part in the integral.
        slope = 2 * math.pi * u * math.sin(angle) * math.cos(angle)
        return slope * weight * masked_ce(RANDOM, masked) if masked > 0.0 else torch.zeros(len(ALL))

    torch.testing.assert_close(integral(at, nodes=120), by_masks(RANDOM), rtol=1e-11, atol=0.0)


# ----------------------------------------------------------------------------------------------------------------------
# Likelihoods


def random_order_likelihood(posterior: Posterior) -> Tensor:
    """One token at a time, any order: dynamic programming over subsets, [81]."""

    @cache
    def of(M: Places) -> Tensor:
        if not M:
            return torch.ones(len(ALL), dtype=torch.float64)
        parts = [(-nll(posterior)[M][:, place]).exp() * of(tuple(j for j in M if j != i)) for place, i in enumerate(M)]
        return torch.stack(parts).mean(0)

    return of(tuple(range(L)))


def ancestral_likelihood(posterior: Posterior, steps: int) -> Tensor:
    """T steps of the linear schedule: at t = k / T each masked token is revealed with probability 1 / k, [81]."""
    states = {tuple(range(L)): torch.ones(len(ALL), dtype=torch.float64)}
    for k in range(steps, 0, -1):
        after: dict[Places, Tensor] = {}
        for M, mass in states.items():
            for revealed in [(), *subsets(M)]:
                left = tuple(i for i in M if i not in revealed)
                rng = (1 / k) ** len(revealed) * (1 - 1 / k) ** len(left)
                if rng > 0:
                    conditional_nll = sum(nll(posterior)[M][:, M.index(i)] for i in revealed)
                    p = torch.exp(-torch.as_tensor(conditional_nll, dtype=torch.float64))
                    after[left] = after.get(left, 0) + mass * rng * p
        states = after
    assert list(states) == [()]
    return states[()]


def discrete_bound(posterior: Posterior, steps: int) -> Tensor:
    """NELBO of T steps: the sum of f(k / T) / k."""
    return sum(masked_ce(posterior, k / steps) / k for k in range(1, steps + 1))  # type: ignore[return-value]


def test_ideal_denoiser_reaches_the_entropy() -> None:
    for nats in (by_masks(SOURCE), -random_order_likelihood(SOURCE).log()):
        torch.testing.assert_close(nats, -P.log(), **EXACT)
    assert float(P @ by_masks(SOURCE)) == pytest.approx(SOURCE.entropy, abs=1e-12)
    assert float(P @ by_masks(RANDOM)) > SOURCE.entropy + 1


def test_bound_is_above_the_random_order_likelihood() -> None:
    gap = by_masks(RANDOM) + random_order_likelihood(RANDOM).log()
    assert gap.min() > 0.1
    assert (by_masks(SOURCE) + random_order_likelihood(SOURCE).log()).abs().max() < 1e-12


@pytest.mark.parametrize("posterior", [RANDOM, SOURCE], ids=["random", "ideal"])
def test_likelihoods_sum_to_one(posterior: Posterior) -> None:
    likelihoods = [random_order_likelihood(posterior)]
    likelihoods += [ancestral_likelihood(posterior, steps) for steps in (1, 2, 3, 7)]
    for likelihood in likelihoods:
        assert float(likelihood.sum()) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("alignment", ["same_position", "shifted"])
def test_evaluated_likelihood_of_one_token_blocks_sums_to_one(alignment: str) -> None:
    """Shifted outputs cannot predict the first token: it is given, once each."""
    config = table_config(V, L, logit_alignment=alignment)
    report = nelbo(StandIn(RANDOM, config), ALL, block_length=1, num_mc_samples=3)  # type: ignore[arg-type]
    expected = V if alignment == "shifted" else 1
    assert sum(math.exp(-nats) for nats in report.row_nats) == pytest.approx(expected, abs=1e-12)


@pytest.mark.slow
def test_bounds_of_block_likelihoods_leave_no_more_than_one() -> None:
    """exp(-NELBO) is at most the likelihood: over all sequences it sums to less than one, in every block length."""
    sums = []
    for block_length in (1, 2, 3, None):
        reports = [
            nelbo(StandIn(RANDOM, CONFIG), ALL, block_length=block_length, num_mc_samples=8, seed=seed)  # type: ignore[arg-type]
            for seed in range(4)
        ]
        row_nats = np.mean([report.row_nats for report in reports], axis=0)
        sums.append(float(np.exp(-row_nats).sum()))
    assert sums[0] == pytest.approx(1.0, abs=1e-12)
    assert all(total < 0.999 for total in sums[1:])


@pytest.mark.parametrize("steps", [1, 2, 4, 9])
def test_discrete_time_bound(steps: int) -> None:
    for posterior in (RANDOM, SOURCE):
        gap = discrete_bound(posterior, steps) + ancestral_likelihood(posterior, steps).log()
        assert gap.min() > -1e-12
        assert steps > 1 or gap.abs().max() < 1e-12, "one step is exact"
        assert steps == 1 or gap.max() > 1e-3


def test_more_steps_cost_an_ideal_denoiser_less() -> None:
    bounds = [float(P @ discrete_bound(SOURCE, steps)) for steps in (1, 2, 4, 16, 64, 256)]
    assert all(few > many for few, many in itertools.pairwise(bounds))
    assert SOURCE.entropy < bounds[-1] < SOURCE.entropy + 0.02
