"""An ideal denoiser's NELBO is the entropy of its source, whatever the block length: a sticky Markov chain, Shidoku.

Tables stand in for the model, so that `nelbo` and the objectives themselves are run.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from config.training.objective import (
    BlockDiffusionConfig,
    FixedCountMasking,
    IndependentMasking,
    MaskedDiffusionConfig,
    NextTokenConfig,
)
from diffusionlm.diffusion.noised_batch import CleanBatch, NoiseKey
from diffusionlm.diffusion.objectives import build_objective, find_nelbo_deviation
from diffusionlm.evaluation.likelihood.scoring import conditional_likelihood
from diffusionlm.evaluation.nelbo import NUM_FRACTION_BINS, nelbo
from tests.reference.enumeration import IdealTable, StandIn, assert_mean, table_config

# ----------------------------------------------------------------------------------------------------------------------
# A sticky Markov chain: the next symbol is the last one with probability STAY, else any other, all equally likely


V, L, STAY = 8, 32, 0.8
MOVES = torch.full((V, V), (1 - STAY) / (V - 1), dtype=torch.float64).fill_diagonal_(STAY)
POWERS = torch.stack([torch.linalg.matrix_power(MOVES, steps) for steps in range(L + 1)])
ENTROPY = math.log(V) - (L - 1) * (STAY * math.log(STAY) + (1 - STAY) * math.log((1 - STAY) / (V - 1)))


def markov_posterior(context_RL: Tensor, places_R: Tensor) -> Tensor:
    """From the nearest visible neighbours."""
    index_1L, places_R1, length = torch.arange(context_RL.shape[1])[None], places_R[:, None], context_RL.shape[1]
    left_R1 = torch.where((context_RL >= 0) & (index_1L < places_R1), index_1L, -1).amax(1, keepdim=True)
    right_R1 = torch.where((context_RL >= 0) & (index_1L > places_R1), index_1L, length).amin(1, keepdim=True)
    before, after = context_RL.gather(1, left_R1.clamp(min=0)), context_RL.gather(1, right_R1.clamp(max=length - 1))
    forward_RV = POWERS[(places_R1 - left_R1)[:, 0], before[:, 0]]
    backward_RV = POWERS[(right_R1 - places_R1)[:, 0], :, after[:, 0]]
    p_RV = torch.where(left_R1 >= 0, forward_RV, 1 / V) * torch.where(right_R1 < length, backward_RV, 1.0)
    return p_RV / p_RV.sum(1, keepdim=True)


def markov_rows(rows: int, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    columns = [torch.randint(0, V, (rows,), generator=rng)]
    for _ in range(L - 1):
        columns.append(torch.multinomial(MOVES[columns[-1]], 1, generator=rng)[:, 0])
    return torch.stack(columns, dim=1)


@cache
def between(left: int | None, right: int | None) -> float:
    """Entropy of a symbol, given one so far to the left and one so far to the right; None: there is none."""
    ways = POWERS[left][:, :, None] if left is not None else torch.ones(V, V, 1, dtype=torch.float64) / V
    ways = ways * (POWERS[right][None] if right is not None else 1.0)
    joint = ways / ways.sum()
    conditional = joint / joint.sum(1, keepdim=True)
    return float(-(joint * conditional.log()).sum())


@cache
def neighbourhoods(place: int) -> list[tuple[int, int, float]]:
    """Masked and visible positions that make a pair of distances, and the entropy then."""
    spans_with_neighbors = []
    for left, right in itertools.product([*range(1, place + 1), None], [*range(1, L - place), None]):
        masked = 1 + (place if left is None else left - 1) + (L - 1 - place if right is None else right - 1)
        spans_with_neighbors.append((masked, (left is not None) + (right is not None), between(left, right)))
    return spans_with_neighbors


def ideal_curve(count: int) -> float:
    """Mean entropy of a masked token, where ``count`` of the L are masked."""
    ways = [
        math.comb(L - masked - visible, count - masked) * entropy
        for place in range(L)
        for masked, visible, entropy in neighbourhoods(place)
        if masked <= count <= L - visible
    ]
    return sum(ways) / (math.comb(L, count) * count)


def test_markov_chain_in_closed_form() -> None:
    """The integral of f(p) / p, the sum over counts and the entropy are one number."""
    assert pytest.approx(29.656560, abs=5e-7) == ENTROPY
    assert sum(ideal_curve(count) for count in range(1, L + 1)) == pytest.approx(ENTROPY, abs=1e-10)
    nodes, weights = np.polynomial.legendre.leggauss(24)
    integral = sum(
        w / 2 * p ** (masked - 1) * (1 - p) ** visible * entropy
        for p, w in zip((nodes + 1) / 2, weights, strict=True)
        for place in range(L)
        for masked, visible, entropy in neighbourhoods(place)
    )
    assert integral == pytest.approx(ENTROPY, abs=1e-10)


def markov(alignment: str = "same_position") -> Any:
    """A `StandIn`, untyped because it takes the place of a `Transformer`."""
    return StandIn(markov_posterior, table_config(V, L, logit_alignment=alignment))


@pytest.mark.parametrize(
    ("block_length", "alignment"),
    [
        (None, "same_position"),
        (5, "shifted"),
        (1, "same_position"),
        (1, "shifted"),
        *(pytest.param(length, "same_position", marks=pytest.mark.slow) for length in (4, 5, L)),
        *(pytest.param(length, "shifted", marks=pytest.mark.slow) for length in (None, 4, L)),
    ],
)
def test_evaluated_markov_chain_is_its_entropy(block_length: int | None, alignment: str) -> None:
    """Shifted outputs do not score the first symbol."""
    entropy = ENTROPY - (math.log(V) if alignment == "shifted" else 0.0)
    values, errors = [], []
    for seed in range(12):
        report = nelbo(
            markov(alignment), markov_rows(128, seed), block_length=block_length, num_mc_samples=2, seed=seed
        )
        values.append(report.nats / 128)
        errors.append(report.standard_error * report.num_tokens / 128)
        assert abs(values[-1] - entropy) < 3.5 * errors[-1]
    assert_mean(np.array(values), entropy, 0.01, sigmas=3.0)
    assert 0.4 < np.std(values, ddof=1) / np.mean(errors) < 1.6


def test_evaluated_chain_rule_is_the_exact_likelihood_of_each_row() -> None:
    rows = markov_rows(64, seed=1)
    log_p = -math.log(V) + MOVES[rows[:, :-1], rows[:, 1:]].log().sum(1)
    report = nelbo(markov(), rows, block_length=1)
    np.testing.assert_allclose(report.row_nats, -log_p.numpy(), rtol=0.0, atol=1e-11)
    answer = conditional_likelihood(markov("shifted"), rows[0, :10].tolist(), rows[0, 10:].tolist(), block_length=1)
    exact = float(MOVES[rows[0, 9:-1], rows[0, 10:]].log().sum())
    assert answer.log_likelihood == pytest.approx(exact, abs=1e-11) and answer.standard_error == 0.0


@pytest.mark.parametrize("alignment", ["same_position", "shifted"])
def test_the_bound_of_an_answer_is_its_log_likelihood(alignment: str) -> None:
    """An ideal denoiser has the same probability in every order, so that its bound is exact."""
    row, start = markov_rows(1, seed=2)[0], L - 6
    exact = float(MOVES[row[start - 1 : -1], row[start:]].log().sum())
    prompt, answer = row[:start].tolist(), row[start:].tolist()
    enumerated = conditional_likelihood(markov(alignment), prompt, answer)
    assert enumerated.log_likelihood == pytest.approx(exact, abs=1e-10) and enumerated.standard_error == 0.0
    sampled = [
        conditional_likelihood(markov(alignment), prompt, answer, num_mc_samples=32, seed=seed) for seed in range(40)
    ]
    assert_mean(np.array([estimate.log_likelihood for estimate in sampled]), exact, 0.03)


@pytest.mark.slow
def test_evaluated_curve_is_the_ideal_one() -> None:
    """Cross-entropy by masked share, in nats of a masked token: counts are equally frequent, tokens are not."""
    curves = []
    for seed in range(16):
        report = nelbo(markov(), markov_rows(128, 100 + seed), num_mc_samples=4, seed=seed)
        assert [(round(low * 10), round(high * 10)) for low, high, _ in report.by_masked_fraction] == [
            (bin, bin + 1) for bin in range(NUM_FRACTION_BINS)
        ]
        curves.append([value for _, _, value in report.by_masked_fraction])
    ideal = []
    for bin in range(NUM_FRACTION_BINS):
        counts = [count for count in range(1, L + 1) if bin * L < count * NUM_FRACTION_BINS <= (bin + 1) * L]
        ideal.append(sum(count * ideal_curve(count) for count in counts) / sum(counts))
    assert_mean(np.array(curves), np.array(ideal), 0.08)


ESTIMATORS: dict[str, FixedCountMasking | IndependentMasking] = {
    "counts": FixedCountMasking(),
    "complementary": FixedCountMasking(complementary=True),
    "per-row": FixedCountMasking(draw_per="row"),
    "bernoulli": IndependentMasking(epsilon=0.0),
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("block_length", [None, 1, 4])
def test_training_loss_of_an_ideal_denoiser_is_the_entropy(estimator: str, block_length: int | None) -> None:
    chosen, model = ESTIMATORS[estimator], markov()
    config = (
        MaskedDiffusionConfig(estimator=chosen)
        if block_length is None
        else BlockDiffusionConfig(block_length=block_length, estimator=chosen)
    )
    assert find_nelbo_deviation(config) is None
    assert_mean(losses(config, model), ENTROPY / L, 0.05)


def test_next_token_loss_of_an_ideal_denoiser_is_the_entropy() -> None:
    assert_mean(losses(NextTokenConfig(), markov("shifted")), (ENTROPY - math.log(V)) / (L - 1), 0.02)


def losses(config: MaskedDiffusionConfig | BlockDiffusionConfig | NextTokenConfig, model: StandIn) -> np.ndarray:
    """Of forty steps of new rows."""
    objective, values = build_objective(config, model.config), []
    for step in range(40):
        tokens = markov_rows(24, step)
        draw = objective.build_noised_batch(CleanBatch(tokens, tokens >= 0), NoiseKey(1, step, 0, len(tokens)))
        loss_inputs = objective.build_loss_inputs(draw, draw.denominator)
        scored = model(draw.inputs_BS, pattern=draw.pattern, output_positions=draw.positions_N, loss_inputs=loss_inputs)
        values.append(float(scored.loss_sum))
    return np.array(values)


# ----------------------------------------------------------------------------------------------------------------------
# Shidoku: 4 x 4 Sudoku


def shidoku_grids() -> Tensor:
    """All of them, [N, 16]."""
    rows = list(itertools.permutations(range(4)))
    columns_fit = [grid for grid in itertools.product(rows, repeat=4) if all(map(_differ, zip(*grid, strict=True)))]
    boxes_fit = [
        grid
        for grid in columns_fit
        if all(_differ(grid[r][c : c + 2] + grid[r + 1][c : c + 2]) for r in (0, 2) for c in (0, 2))
    ]
    return torch.tensor(boxes_fit).flatten(1)


def _differ(cells: tuple[int, ...]) -> bool:
    return len(set(cells)) == len(cells)


@pytest.fixture(scope="module")
def shidoku() -> IdealTable:
    grids = shidoku_grids()
    return IdealTable(grids, torch.full((len(grids),), 1 / len(grids), dtype=torch.float64), 4)


def test_shidoku_is_288_grids(shidoku: IdealTable) -> None:
    assert len(shidoku.sequences_NL) == 288
    assert shidoku.entropy == pytest.approx(math.log(288), abs=1e-12)


@pytest.mark.parametrize("block_length", [None, *(pytest.param(length, marks=pytest.mark.slow) for length in (4, 6))])
def test_evaluated_shidoku_is_its_entropy(shidoku: IdealTable, block_length: int | None) -> None:
    """All grids once: the draws are all that is left to chance."""
    model: Any = StandIn(shidoku, table_config(4, 16))
    grids = shidoku.sequences_NL
    reports = [nelbo(model, grids, block_length=block_length, num_mc_samples=2, seed=seed) for seed in range(4)]
    for report in reports:
        off = report.nats / len(grids) - math.log(288)
        assert abs(off) < 3 * report.standard_error * 16, (off, report.standard_error * 16)
    assert_mean(np.array([report.nats / len(grids) for report in reports]), math.log(288), 0.05, sigmas=5.0)


def test_evaluated_chain_rule_of_each_shidoku_grid(shidoku: IdealTable) -> None:
    model: Any = StandIn(shidoku, table_config(4, 16))
    report = nelbo(model, shidoku.sequences_NL, block_length=1)
    np.testing.assert_allclose(report.row_nats, math.log(288), rtol=0.0, atol=1e-12)
