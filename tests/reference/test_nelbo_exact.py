"""Every estimate of the NELBO against enumeration: the sum over all masks M of CE(M) / (|M| C(L, |M|)).

The exact values are those of a second implementation of the model (`enumeration.py`). Estimates are means over seeded
draws, and must be within four standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from config.training.objective import (
    BlockDiffusionConfig,
    FixedCountMasking,
    IndependentMasking,
    MaskedDiffusionConfig,
)
from diffusionlm.diffusion.corruption import sample_masks
from diffusionlm.diffusion.noised_batch import CleanBatch, NoiseKey
from diffusionlm.diffusion.objectives import build_objective, find_nelbo_deviation
from diffusionlm.diffusion.schedules import (
    NoiseSchedule,
    PowerSchedule,
)
from diffusionlm.evaluation.nelbo import nelbo
from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeModel
from tests.reference.enumeration import StandIn, assert_mean, exact_nelbo, exact_units, score_batch, table_config

Estimator = FixedCountMasking | IndependentMasking

VOCAB, MASK, L = 4, 3, 4
X = torch.tensor([[0, 2, 1, 1]])
TWO = torch.tensor([[0, 2, 1, 1], [2, 2, 0, 1]])
PACKED = torch.tensor([0, 0, 0, 1])


@pytest.fixture(scope="module")
def model(tiny_model: MakeModel) -> Transformer:
    return small(tiny_model)


def small(tiny_model: MakeModel, **changes: Any) -> Transformer:
    vocabulary = {"vocab_size": VOCAB, "mask_token_id": MASK, "eos_token_id": 0, "pad_token_id": 0}
    return tiny_model(torch.float64, num_hidden_layers=1, scale=0.4, **vocabulary, **changes)


# ----------------------------------------------------------------------------------------------------------------------
# Training


class Case:
    """An objective on the rows TWO, alternating, and what its loss should be on average."""

    def __init__(
        self, model: Transformer, estimator: Estimator, block_length: int | None, document_ids_L: Tensor | None = None
    ) -> None:
        self.model, self.document_ids_L = model, document_ids_L
        self.config: MaskedDiffusionConfig | BlockDiffusionConfig
        if block_length is None:
            self.config = MaskedDiffusionConfig(estimator=estimator)
        else:
            self.config = BlockDiffusionConfig(block_length=block_length, estimator=estimator)
        epsilon = estimator.epsilon if isinstance(estimator, IndependentMasking) else 0.0
        units = [unit for row in TWO for unit in exact_units(model, row, block_length, document_ids_L=document_ids_L)]
        self.tokens = sum(max(len(M) for M in unit.sets) for unit in units)
        exact = torch.stack([unit.bound(epsilon) for unit in units]).sum() / self.tokens
        gradient = torch.autograd.grad(exact, list(model.parameters()))
        # Derivatives are taken along the exact gradient, where they should be one.
        self.direction = [g / sum(float(each.square().sum()) for each in gradient) for g in gradient]
        self.expected = np.array([float(exact.detach()), 1.0])

    def estimates(self, steps: int, rows: int = 32) -> np.ndarray:
        """The loss of each step, and its derivative along the exact gradient, [steps, 2]."""
        objective = build_objective(self.config, self.model.config)
        tokens = TWO.repeat(rows // 2, 1)
        documents = None if self.document_ids_L is None else self.document_ids_L.expand(rows, -1)
        batch = CleanBatch(tokens, torch.ones_like(tokens, dtype=torch.bool), documents)
        values = []
        for step in range(steps):
            draw = objective.build_noised_batch(
                batch, NoiseKey(seed=11, step=step, first_sequence=0, num_sequences_in_step=rows)
            )
            assert draw.denominator == draw.num_targets == self.tokens * rows / 2
            loss = score_batch(self.model, objective, draw, draw.denominator).loss_sum
            gradient = torch.autograd.grad(loss, list(self.model.parameters()))
            slope = sum(float((g * d).sum()) for g, d in zip(gradient, self.direction, strict=True))
            values.append([float(loss.detach()), slope])
        return np.array(values)

    def check(self, relative_error: float = 0.1) -> None:
        assert_mean(self.estimates(steps=24), self.expected, relative_error)


UNBIASED: dict[str, Estimator] = {
    "counts": FixedCountMasking(),
    "complementary": FixedCountMasking(complementary=True),
    "stratified": IndependentMasking(epsilon=0.0),
    "antithetic": IndependentMasking(epsilon=0.0, times="antithetic"),
    "uniform": IndependentMasking(epsilon=0.0, times="uniform", weight="inverse_p"),
}


@pytest.mark.parametrize("block_length", [None, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4))])
@pytest.mark.parametrize("name", UNBIASED)
def test_objective_is_unbiased(model: Transformer, name: str, block_length: int | None) -> None:
    case = Case(model, UNBIASED[name], block_length)
    assert find_nelbo_deviation(case.config) is None
    case.check()


@pytest.mark.parametrize("alignment", ["same_position", pytest.param("shifted", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("unit", "block_length"), [("row", None), ("document", None), ("row", 2), ("document", 2), ("block", 2)]
)
@pytest.mark.parametrize(
    "estimator", [partial(FixedCountMasking), partial(IndependentMasking, epsilon=0.0)], ids=["counts", "bernoulli"]
)
def test_packed_objective_is_unbiased_whatever_shares_a_level(
    tiny_model: MakeModel, estimator: Callable[..., Estimator], unit: str, block_length: int | None, alignment: str
) -> None:
    model = small(tiny_model, logit_alignment=alignment)
    case = Case(model, estimator(draw_per=unit), block_length, PACKED)
    assert find_nelbo_deviation(case.config) is None
    case.check(relative_error=0.15)


SCHEDULES: list[NoiseSchedule] = [
    *(kind() for kind in get_args(get_args(NoiseSchedule)[0])),
    PowerSchedule(exponent=1.5),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda config: config.kind)
@pytest.mark.parametrize("epsilon", [0.0, 0.05])
def test_drawn_times_probabilities_and_weights_fit_together(schedule: NoiseSchedule, epsilon: float) -> None:
    """p is recovered from the weights 1 / p, t from p: times are strata of one grid, the ELBO weight is p' / p."""
    rows, size = 24, 400
    group_ids_BL = np.zeros((rows, size), dtype=int)
    estimator = IndependentMasking(schedule=schedule, epsilon=epsilon)
    key = NoiseKey(2, 0, 0, rows)
    (plain,) = sample_masks(group_ids_BL, key, estimator, "inverse_p")
    (weighted,) = sample_masks(group_ids_BL, key, estimator, "elbo")
    np.testing.assert_array_equal(plain.masked_BL, weighted.masked_BL)
    some = plain.masked_BL.any(1)
    p = 1.0 / plain.weights_BL[some].max(1)

    def masked(t: np.ndarray) -> np.ndarray:
        return (1 - epsilon) * (1 - schedule.alpha(t)) + epsilon

    low, high = np.zeros(len(p)), np.ones(len(p))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = np.where(masked(middle) < p, middle, low), np.where(masked(middle) < p, high, middle)
    offsets = low * rows % 1.0
    assert np.ptp(offsets) < 1e-6, "one offset for all strata"
    assert len(np.unique((low * rows).astype(int))) == len(p) >= rows - 2
    step = 1e-6
    slope = (masked(low + step) - masked(low - step)) / (2 * step)
    np.testing.assert_allclose(weighted.weights_BL[some].max(1) * p, slope, rtol=1e-5)
    deviations = (plain.masked_BL[some].mean(1) - p) / np.sqrt(p * (1 - p) / size + 1e-9)
    assert np.abs(deviations).max() < 4


@pytest.mark.parametrize("block_length", [None, 2])
def test_truncation_is_told_from_the_full_integral(model: Transformer, block_length: int | None) -> None:
    case = Case(model, IndependentMasking(epsilon=0.5), block_length)
    values = case.estimates(steps=32)
    assert_mean(values, case.expected, 0.05)
    full = Case(model, FixedCountMasking(), block_length).expected[0]
    assert abs(values[:, 0].mean() - full) > 6 * values[:, 0].std() / math.sqrt(len(values))


BIASED: dict[str, Estimator] = {
    "unweighted": FixedCountMasking(weight="uniform"),
    "capped": FixedCountMasking(reweight_cap=1.5),
    "clipped": FixedCountMasking(range=(0.3, 0.8)),
    "runs": FixedCountMasking(contiguous_probability=1.0),
    "inverse_p": IndependentMasking(schedule=PowerSchedule(exponent=0.1), weight="inverse_p", epsilon=0.0),
    "floor": IndependentMasking(min_masking_rate=0.6, epsilon=0.0),
    "epsilon": IndependentMasking(epsilon=0.5),
}


@pytest.mark.parametrize("name", BIASED)
def test_biased_objective_differs_from_the_nelbo(model: Transformer, name: str) -> None:
    case = Case(model, BIASED[name], None)
    exact = Case(model, FixedCountMasking(), None).expected[0]
    assert find_nelbo_deviation(case.config) is not None
    values = case.estimates(steps=40)[:, 0]
    assert abs(values.mean() - exact) > 5 * values.std(ddof=1) / math.sqrt(len(values))


# ----------------------------------------------------------------------------------------------------------------------
# Counts


@pytest.mark.parametrize("rows", [3, pytest.param(7, marks=pytest.mark.slow), pytest.param(16, marks=pytest.mark.slow)])
def test_counts_of_a_row_are_uniform_over_the_steps(rows: int) -> None:
    """Chi-squared of each row's counts with any number of rows, of each of its blocks, one of them short."""
    group_ids_BL = np.array([[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, -1]]).repeat(rows, 0)
    sizes, steps = (4, 4, 2), 400
    counts = np.zeros((steps, rows, 3), dtype=int)
    for step in range(steps):
        (noise,) = sample_masks(group_ids_BL, NoiseKey(9, step, 0, rows), FixedCountMasking(), "elbo")
        assert not noise.masked_BL[:, -1].any()
        counts[step] = np.add.reduceat(noise.masked_BL[:, :-1], [0, 4, 8], axis=1)
    for row in range(rows):
        for unit, size in enumerate(sizes):
            seen = np.bincount(counts[:, row, unit], minlength=size + 1)
            assert seen[0] == 0 and len(seen) == size + 1
            chi2 = float(((seen[1:] - steps / size) ** 2 / (steps / size)).sum())
            assert chi2 < {4: 24.0, 2: 18.0}[size], (row, unit, seen)  # p about 2e-5


def test_masks_of_equal_count_are_equally_likely() -> None:
    group_ids_BL = np.zeros((64, 4), dtype=int)
    seen: dict[bytes, int] = {}
    for step in range(60):
        (noise,) = sample_masks(group_ids_BL, NoiseKey(1, step, 0, 64), FixedCountMasking(), "elbo")
        for masked in noise.masked_BL[noise.masked_BL.sum(1) == 2]:
            seen[masked.tobytes()] = seen.get(masked.tobytes(), 0) + 1
    total = sum(seen.values())
    assert len(seen) == 6 and total == 60 * 16
    assert sum((each - total / 6) ** 2 / (total / 6) for each in seen.values()) < 26  # p about 1e-4


# ----------------------------------------------------------------------------------------------------------------------
# Evaluation


@pytest.mark.parametrize("alignment", ["same_position", "shifted"])
@pytest.mark.parametrize("block_length", [None, 2, 3])
@pytest.mark.parametrize("num_mc_samples", [1, pytest.param(2, marks=pytest.mark.slow)])  # fewer than masks of a block
@torch.no_grad()
def test_evaluated_nelbo_is_unbiased_and_its_error_plausible(
    tiny_model: MakeModel, num_mc_samples: int, block_length: int | None, alignment: str
) -> None:
    model = small(tiny_model, logit_alignment=alignment)
    tokens = X.repeat(24, 1)  # equal rows: draws are all that varies
    targets = 24 * (L if alignment == "same_position" else L - 1)
    reports = [
        nelbo(model, tokens, block_length=block_length, num_mc_samples=num_mc_samples, seed=seed) for seed in range(24)
    ]
    values = np.array([report.nats_per_token for report in reports])
    exact = float(exact_nelbo(model, X, block_length)) * 24 / targets
    assert_mean(values, exact, 0.04)
    reported = np.mean([report.standard_error for report in reports])
    # Counts are spread over the rows, which the error per row cannot see: it may well be larger than the spread.
    assert 0.3 < values.std(ddof=1) / reported < 1.4
    assert reports[0].num_tokens == targets
    assert reports[0].nats == pytest.approx(reports[0].nats_per_token * targets)
    assert reports[0].nats == pytest.approx(sum(reports[0].row_nats))


@pytest.mark.parametrize("alignment", ["same_position", pytest.param("shifted", marks=pytest.mark.slow)])
@pytest.mark.parametrize("block_length", [None, 2])
@torch.no_grad()
def test_evaluated_nelbo_of_packed_documents_is_the_sum_of_theirs(
    tiny_model: MakeModel, block_length: int | None, alignment: str
) -> None:
    """Masked counts are those of the row without blocks, whatever its documents; the bound is the same."""
    model = small(tiny_model, logit_alignment=alignment)
    units = [unit for row in TWO for unit in exact_units(model, row, block_length, document_ids_L=PACKED)]
    exact = float(sum(unit.bound() for unit in units))
    rows, documents = TWO.repeat(12, 1), PACKED.expand(24, -1)
    reports = [nelbo(model, rows, block_length=block_length, seed=seed, document_BL=documents) for seed in range(24)]
    assert_mean(np.array([report.nats / 12 for report in reports]), exact, 0.02)
    assert reports[0].num_tokens == 24 * (L if alignment == "same_position" else L - 2)


def test_curve_of_a_model_whose_cost_is_the_masked_count() -> None:
    """k nats with k of ten tokens masked. As many draws as targets: every count comes once in each row."""
    model: Any = StandIn(lambda inputs_RL, targets_R: (inputs_RL == MASK).sum(1), table_config(MASK, 10))
    for seed in range(3):
        report = nelbo(model, torch.zeros(4, 10, dtype=torch.int64), num_mc_samples=10, seed=seed)
        assert report.row_nats == pytest.approx([sum(range(1, 11))] * 4)
        curve = [((k - 1) / 10, k / 10, k) for k in range(1, 11)]
        np.testing.assert_allclose(report.by_masked_fraction, curve)


def test_evaluation_does_not_depend_on_the_batch_size(model: Transformer) -> None:
    tokens = TWO.repeat(5, 1)
    for block_length in (None, 2):
        whole = nelbo(model, tokens, block_length=block_length, seed=3)
        for batch_size in (1, 3, 10):
            part = nelbo(model, tokens, block_length=block_length, seed=3, batch_size=batch_size)
            assert part.row_nats == pytest.approx(whole.row_nats, rel=1e-12)
            assert part.standard_error == pytest.approx(whole.standard_error, rel=1e-9)


@pytest.mark.parametrize("block_length", [None, 2])
@torch.no_grad()
def test_prompt_and_padding_are_context_only(model: Transformer, block_length: int | None) -> None:
    """Targets 1 and 2 alone: the others are always visible, where the blocks let them be seen at all."""
    is_target = torch.tensor([[False, True, True, False]])
    units = exact_units(model, X[0], block_length, loss_mask_L=is_target[0])
    exact = float(sum(unit.bound() for unit in units))
    reports = [
        nelbo(model, X.repeat(16, 1), is_target.repeat(16, 1), block_length, num_mc_samples=2, seed=s)
        for s in range(24)
    ]
    assert_mean(np.array([report.nats / 16 for report in reports]), exact, 0.02)
    assert reports[0].num_tokens == 32


def test_rows_without_targets_add_nothing(model: Transformer) -> None:
    is_target = torch.tensor([[True] * L, [False] * L])
    report = nelbo(model, TWO, is_target, num_mc_samples=2, seed=0, batch_size=2)
    assert report.num_tokens == L and math.isfinite(report.nats)
    alone = nelbo(model, TWO, is_target, num_mc_samples=2, seed=0, batch_size=1)
    assert alone.nats == pytest.approx(report.nats, rel=1e-6)
    with pytest.raises(ValueError, match="loss_mask_BL"):
        nelbo(model, TWO, torch.zeros_like(is_target))
    assert nelbo(model, X).standard_error == math.inf
