"""Draws: keyed by the place in the step, stratified over it, and blind to prompts and padding."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from config.objective import Bernoulli, Counts, MaskedDiffusion
from diffusionlm.diffusion.batch import Batch, Draw, DrawKey
from diffusionlm.diffusion.corruption import draw_masks, generator, stratified_uniforms
from diffusionlm.diffusion.objectives import Objective, build_objective
from diffusionlm.models.patterns import Bidirectional

MASK, LENGTH = 50, 12
ESTIMATORS = [Counts(), Bernoulli(epsilon=0.1)]


def objective_of(estimator: Counts | Bernoulli) -> Objective:
    return build_objective(MaskedDiffusion(estimator=estimator), MASK)


def batch_of(rows: int, *, everything: bool = False) -> Batch:
    """Random rows with a prompt of ``row % 4`` tokens and some padding; row 5 has no target at all."""
    chance = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, MASK, (rows, LENGTH), generator=chance)
    is_target = torch.ones(rows, LENGTH, dtype=torch.bool)
    if not everything:
        for row in range(rows):
            is_target[row, : row % 4] = False
            is_target[row, LENGTH - row % 3 :] = False
        is_target[5::8] = False
    return Batch(tokens, is_target, torch.where(is_target, 0, -1))


def part(batch: Batch, first: int, last: int) -> Batch:
    assert batch.document_BL is not None
    return Batch(batch.tokens_BL[first:last], batch.is_target_BL[first:last], batch.document_BL[first:last])


def masked_of(draw: Draw) -> torch.Tensor:
    flat = torch.zeros(draw.inputs_BL.numel(), dtype=torch.bool)
    flat[draw.rows_R] = True
    return flat.view_as(draw.inputs_BL)


@pytest.mark.parametrize("size", [4, 2, 1])
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: e.kind)
def test_micro_batches_see_the_same_noise(estimator: Counts | Bernoulli, size: int) -> None:
    batch, key = batch_of(8), DrawKey(seed=7, step=3, first_row=0, rows_in_step=8)
    whole = objective_of(estimator).draw(batch, key)
    parts = [
        objective_of(estimator).draw(part(batch, first, first + size), dataclasses.replace(key, first_row=first))
        for first in range(0, 8, size)
    ]
    assert torch.equal(torch.cat([each.inputs_BL for each in parts]), whole.inputs_BL)
    assert torch.equal(torch.cat([each.targets_R for each in parts]), whole.targets_R)
    assert torch.equal(torch.cat([each.weights_R for each in parts]), whole.weights_R)
    rows = [each.rows_R + first * LENGTH for first, each in zip(range(0, 8, size), parts, strict=True)]
    assert torch.equal(torch.cat(rows), whole.rows_R)
    assert sum(each.num_targets for each in parts) == whole.num_targets == int(batch.is_target_BL.sum())


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: e.kind)
def test_chance_differs_by_seed_step_and_row(estimator: Counts | Bernoulli) -> None:
    tokens = torch.arange(LENGTH).repeat(8, 1)
    batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool))
    key = DrawKey(1, 1, 0, 64)
    keys = [key, dataclasses.replace(key, seed=2), dataclasses.replace(key, step=2), DrawKey(1, 1, 8, 64)]
    drawn = [masked_of(objective_of(estimator).draw(batch, each)) for each in keys]
    for index, one in enumerate(drawn):
        assert all(not torch.equal(one, other) for other in drawn[:index])
        assert len({tuple(row.tolist()) for row in one}) > 4
    assert torch.equal(masked_of(objective_of(estimator).draw(batch, key)), drawn[0])


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: e.kind)
def test_a_draw_holds_together(estimator: Counts | Bernoulli) -> None:
    batch = batch_of(32)
    clean = batch.tokens_BL.clone()
    for step in range(5):
        draw = objective_of(estimator).draw(batch, DrawKey(0, step, 0, 32))
        masked = masked_of(draw)
        assert not (masked & ~batch.is_target_BL).any(), "prompt or padding was masked"
        assert torch.equal(draw.inputs_BL, torch.where(masked, MASK, batch.tokens_BL))
        assert torch.equal(draw.targets_R, batch.tokens_BL[masked])
        assert (draw.rows_R.diff() > 0).all()
        assert draw.weights_R.dtype == torch.float32 and draw.rows_R.dtype == torch.int64
        assert torch.equal(batch.tokens_BL, clean), "the batch was changed"


def test_counts_weights_and_positions() -> None:
    batch = batch_of(32)
    for step in range(5):
        masked, weights = draw_masks(batch, DrawKey(0, step, 0, 32), Counts())
        eligible = batch.is_target_BL.numpy()
        for row in range(32):
            n, k = eligible[row].sum(), masked[row].sum()
            if n == 0:
                assert k == 0 and not weights[row].any()
                continue
            assert 1 <= k <= n
            np.testing.assert_allclose(weights[row][masked[row]], n / k, rtol=1e-6)
            assert not weights[row][~masked[row]].any()


@pytest.mark.parametrize(("rows", "length"), [(12, 12), (36, 12), (30, 12), (7, 12), (64, 1)])
def test_counts_are_stratified_over_the_step(rows: int, length: int) -> None:
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool))
    for step in range(20):
        masked, _ = draw_masks(batch, DrawKey(4, step, 0, rows), Counts())
        histogram = np.bincount(masked.sum(axis=1), minlength=length + 1)[1:]
        assert histogram.max() - histogram.min() <= (1 if rows % length == 0 else 2)
        if rows % length == 0:
            assert (np.abs(histogram - rows // length) <= 1).all()


def test_count_of_a_row_is_uniform_over_steps() -> None:
    """Each place of the step gets each count equally often: strata are permuted, not tied to the place."""
    tokens = torch.zeros(4, 6, dtype=torch.int64)
    batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool))
    steps = 1500
    histogram, positions = np.zeros((4, 6)), np.zeros(6)
    for step in range(steps):
        masked, _ = draw_masks(batch, DrawKey(9, step, 0, 4), Counts())
        histogram[np.arange(4), masked.sum(axis=1) - 1] += 1
        positions += masked.sum(axis=0)
    expected = steps / 6
    assert (((histogram - expected) ** 2 / expected).sum(axis=1) < 25.7).all()  # chi2 of 5, p = 1e-4
    assert abs(positions / positions.mean() - 1).max() < 0.06


def test_strata_span_the_step_and_not_the_batch() -> None:
    key = DrawKey(0, 0, 0, 24)
    whole = stratified_uniforms(key, 24)
    assert np.array_equal(np.sort((whole * 24).astype(int)), np.arange(24))
    for first in (0, 5, 20):
        assert np.array_equal(
            stratified_uniforms(dataclasses.replace(key, first_row=first), 4), whole[first : first + 4]
        )
    assert ((whole >= 0) & (whole < 1)).all()


def test_bernoulli_probabilities() -> None:
    tokens = torch.zeros(2000, 30, dtype=torch.int64)
    batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool))
    epsilon = 0.2
    masked, weights = draw_masks(batch, DrawKey(0, 0, 0, 2000), Bernoulli(epsilon=epsilon))
    some = masked.any(axis=1)
    probability = 1 / weights[some].max(axis=1)
    assert probability.min() >= epsilon - 1e-6 and probability.max() <= 1 + 1e-6
    for row, p in zip(np.flatnonzero(some), probability, strict=True):
        np.testing.assert_allclose(weights[row][masked[row]], 1 / p, rtol=1e-6)
    assert probability.mean() == pytest.approx((1 + epsilon) / 2, abs=4 * 0.8 / 12**0.5 / 2000**0.5 + 1e-3)
    residual = masked[some].mean(axis=1) - probability
    assert abs(residual.mean()) < 4 * residual.std() / len(residual) ** 0.5 + 2e-4
    # E[sum of weights] is the number of tokens: p times 1 / p.
    totals = weights.sum(axis=1)
    assert totals.mean() == pytest.approx(30, abs=float(4 * totals.std() / 2000**0.5))


def test_mask_token_in_the_data_is_data() -> None:
    """It is a target like any other: counted, scored when masked, and not scored when not."""
    batch = batch_of(16, everything=True)
    batch.tokens_BL[:, 3] = MASK
    seen = {True: 0, False: 0}
    for step in range(4):
        draw = objective_of(Counts()).draw(batch, DrawKey(0, step, 0, 16))
        masked = masked_of(draw)
        assert draw.num_targets == 16 * LENGTH
        assert (draw.inputs_BL[:, 3] == MASK).all()
        assert torch.equal(draw.targets_R, batch.tokens_BL[masked])
        for row in range(16):
            seen[bool(masked[row, 3])] += 1
    assert min(seen.values()) > 0


def test_rows_without_targets_are_left_alone() -> None:
    tokens = torch.zeros(3, 5, dtype=torch.int64)
    batch = Batch(tokens, torch.zeros_like(tokens, dtype=torch.bool))
    for estimator in ESTIMATORS:
        draw = objective_of(estimator).draw(batch, DrawKey(0, 0, 0, 3))
        assert draw.num_targets == 0 and len(draw.rows_R) == len(draw.targets_R) == len(draw.weights_R) == 0
        assert torch.equal(draw.inputs_BL, tokens)


def test_weights_estimate_the_number_of_targets() -> None:
    """With a cross-entropy of one everywhere the estimate is exact for counts, row by row."""
    batch = batch_of(24)
    _, weights = draw_masks(batch, DrawKey(0, 0, 0, 24), Counts())
    np.testing.assert_allclose(weights.sum(axis=1), batch.is_target_BL.sum(dim=1).numpy(), rtol=1e-6)


def test_score_divides_and_excludes_the_mask() -> None:
    draw = objective_of(Counts()).draw(batch_of(8), DrawKey(0, 0, 0, 8))
    score = objective_of(Counts()).score(draw, denominator=17)
    torch.testing.assert_close(score.weights_R, draw.weights_R / 17)
    assert score.excluded_token == MASK and torch.equal(score.targets_R, draw.targets_R)


def test_pattern_has_documents_only_where_needed() -> None:
    one = batch_of(4, everything=True)
    assert objective_of(Counts()).draw(one, DrawKey(0, 0, 0, 4)).pattern == Bidirectional()
    padded = batch_of(4)
    pattern = objective_of(Counts()).draw(padded, DrawKey(0, 0, 0, 4)).pattern
    assert pattern.documents_BL is not None and torch.equal(pattern.documents_BL, padded.document_BL)
    different = Batch(one.tokens_BL, one.is_target_BL, torch.arange(4)[:, None].expand(4, LENGTH))
    assert objective_of(Counts()).draw(different, DrawKey(0, 0, 0, 4)).pattern.is_unrestricted


def test_generator_is_keyed() -> None:
    assert generator(1, 2, 3).random() == generator(1, 2, 3).random()
    values = {generator(*key).random() for key in [(1,), (1, 2), (1, 2, 3), (1, 3, 2), (2, 1, 3), (1, 2, 3, 0)]}
    assert len(values) == 6
    state = np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    generator(0, 1).random(10)
    assert np.array_equal(state, np.random.get_state()[1])  # type: ignore[index, arg-type]
