"""Noise groups, levels and masks: written out, distributed as they should be, and keyed."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from config.training.objective import (
    BlockDiffusionConfig,
    Estimator,
    FixedCountMasking,
    IndependentMasking,
    MaskedDiffusionConfig,
    NextTokenConfig,
)
from diffusionlm.diffusion.corruption import (
    assign_noise_groups,
    exclude_mask_tokens,
    masked_counts_at_levels,
    sample_group_levels,
    sample_masks,
    sample_replacement_tokens,
    sample_sequence_offsets,
)
from diffusionlm.diffusion.noised_batch import CleanBatch, NoiseKey
from diffusionlm.diffusion.objectives import build_objective
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.diffusion.segments import NoiseSequences, segment_starts
from tests.conftest import MakeConfig
from tests.unit.diffusion.noise_cases import (
    BLOCK,
    LENGTH,
    MASK,
    batch_of,
    chi_square,
    full_groups,
    noise_of,
)

ESTIMATORS: list[tuple[str, Estimator]] = [
    ("counts", FixedCountMasking()),
    ("complementary", FixedCountMasking(complementary=True)),
    ("stratified", IndependentMasking(epsilon=0.1)),
    ("antithetic", IndependentMasking(times="antithetic")),
    ("uniform", IndependentMasking(times="uniform")),
    ("contiguous", FixedCountMasking(contiguous_probability=0.5)),
    ("contiguous times", IndependentMasking(contiguous_probability=0.5, min_masking_rate=0.2)),
]


def estimator_id(value: object) -> str | None:
    return value if isinstance(value, str) else None


# ----------------------------------------------------------------------------------------------------------------------
# Fixed-count masking


@pytest.mark.parametrize(
    ("rows", "length", "block"),
    [(12, 12, None), (36, 12, None), (30, 12, None), (7, 12, None), (64, 1, None), (3, 32, 4), (1, 64, 8), (5, 24, 3)],
)
def test_counts_are_stratified_over_all_groups_of_the_step(rows: int, length: int, block: int | None) -> None:
    size, group_ids = block or length, full_groups(rows, length, block)
    total = rows * length // size
    for step in range(20):
        masked = noise_of(group_ids, FixedCountMasking(), step=step, seed=4).masked_BL
        counts = masked.reshape(total, size).sum(axis=1)
        histogram = np.bincount(counts, minlength=size + 1)
        assert histogram[0] == 0
        # Evenly spaced levels: so many bins of equal width differ by at most one.
        assert histogram[1:].max() - histogram[1:].min() <= (0 if total % size == 0 else 1)


def test_complementary_masks_partition_the_targets() -> None:
    batch = batch_of(16)
    maskable = batch.loss_mask_BL.numpy()
    group_ids = assign_noise_groups(batch, maskable, "block", BLOCK)
    shares: set[float] = set()
    for step in range(20):
        pair = sample_masks(group_ids, NoiseKey(0, step, 0, 16), FixedCountMasking(complementary=True), "elbo")
        one, other = pair
        assert np.array_equal(one.masked_BL ^ other.masked_BL, maskable)
        assert not (one.masked_BL & other.masked_BL).any()
        for noise in pair:
            assert not noise.weights_BL[~noise.masked_BL].any()
            for row in range(16):
                for group in range(group_ids[row].max() + 1):
                    here = group_ids[row] == group
                    n, k = here.sum(), noise.masked_BL[row, here].sum()
                    shares.add(float(k / n))
                    assert noise.weights_BL[row, here & noise.masked_BL[row]] == pytest.approx((n + 1) / max(2 * k, 1))
    assert {0.0, 1.0} < shares


# ----------------------------------------------------------------------------------------------------------------------
# Independent masking


def test_the_smallest_times_give_finite_weights() -> None:
    for kind in ("linear", "power", "square_root", "cosine", "raised_cosine", "clean_cosine", "sigmoid", "logarithmic"):
        for epsilon in (0.0, 1e-3):
            estimator = IndependentMasking.model_validate(
                {"schedule": kind, "epsilon": epsilon, "range": [0.0, 1e-300]}
            )
            with np.errstate(all="raise", under="ignore"):
                noise = noise_of(full_groups(100, 50), estimator)
            assert np.isfinite(noise.weights_BL).all()


def test_min_masking_rate_raises_small_probabilities() -> None:
    estimator = IndependentMasking(min_masking_rate=0.6, epsilon=0.0)
    noise = noise_of(full_groups(500, 40), estimator, weight="inverse_p")
    p = 1 / noise.weights_BL.max(axis=1)
    assert p.min() == pytest.approx(0.6) and (p < 0.6 + 1e-9).mean() == pytest.approx(0.6, abs=0.01)
    raised = noise.masked_BL[p < 0.6 + 1e-9]
    assert raised.mean() == pytest.approx(0.6, abs=4 * math.sqrt(0.24 / raised.size))


# ----------------------------------------------------------------------------------------------------------------------
# Options of both


def test_range_limits_the_levels() -> None:
    counts = noise_of(full_groups(60, 20), FixedCountMasking(range=(0.25, 0.5))).masked_BL.sum(axis=1)
    assert np.bincount(counts, minlength=21)[6:11].tolist() == [12] * 5
    linear = noise_of(full_groups(60, 20), IndependentMasking(range=(0.25, 0.5), epsilon=0.0), weight="inverse_p")
    p = 1 / linear.weights_BL.max(axis=1)
    np.testing.assert_allclose(np.sort(p), 0.25 + 0.25 * (np.arange(60) + 0.5) / 60, atol=0.25 / 120 + 1e-12)


@pytest.mark.parametrize("complementary", [False, True])
def test_reweight_cap_is_the_largest_weight(complementary: bool) -> None:
    """Of the two masks of a pair together: a cap of 1 is no weighting at all, for pairs as for single masks."""
    parts = 1 + complementary
    for cap in (1.0, 3.0):
        capped = FixedCountMasking(reweight_cap=cap, complementary=complementary)
        for one, other in zip(
            sample_masks(full_groups(12, 12), NoiseKey(0, 0, 0, 12), capped, "elbo"),
            sample_masks(
                full_groups(12, 12), NoiseKey(0, 0, 0, 12), FixedCountMasking(complementary=complementary), "elbo"
            ),
            strict=True,
        ):
            assert np.array_equal(one.masked_BL, other.masked_BL)
            assert np.array_equal(one.weights_BL, np.minimum(other.weights_BL, cap / parts))
            assert (other.weights_BL > cap / parts).any()
    p = noise_of(full_groups(50, 20), IndependentMasking(reweight_cap=4.0)).weights_BL
    assert p.max() == 4.0 and p[p > 0].min() < 2.0


@pytest.mark.parametrize(
    "estimator",
    [FixedCountMasking(contiguous_probability=1.0), IndependentMasking(contiguous_probability=1.0, epsilon=0.05)],
    ids=["counts", "times"],
)
def test_contiguous_masks_are_contiguous(estimator: Estimator) -> None:
    batch = batch_of(24)
    maskable = batch.loss_mask_BL.numpy()
    group_ids = assign_noise_groups(batch, maskable, "document", None)
    starts = set()
    for step in range(10):
        masked = noise_of(group_ids, estimator, step=step).masked_BL
        assert not (masked & ~maskable).any()
        for row in range(24):
            for group in range(group_ids[row].max() + 1):
                among = np.flatnonzero(masked[row, group_ids[row] == group])
                assert len(among) >= 1 and (np.diff(among) == 1).all()
                starts.add(int(among[0]))
    assert len(starts) > 5


def test_contiguous_runs_start_anywhere_and_keep_the_counts() -> None:
    chosen = np.zeros((1500, 6), dtype=np.bool_)
    for step in range(1500):
        estimator = FixedCountMasking(contiguous_probability=1.0, range=(0.4, 0.41))  # three of six
        chosen[step] = noise_of(full_groups(1, 6), estimator, step=step).masked_BL
    assert (chosen.sum(axis=1) == 3).all()
    assert chi_square(np.bincount(np.argmax(chosen, axis=1), minlength=4)[:4]) < 21.2  # 3 degrees of freedom: p = 1e-4
    masks = np.stack(
        [
            noise_of(
                full_groups(1, 12), FixedCountMasking(contiguous_probability=0.3, range=(0.45, 0.46)), step=step
            ).masked_BL[0]
            for step in range(600)
        ]
    )
    runs = np.array([(np.diff(np.flatnonzero(row)) == 1).all() for row in masks])
    # Scattered ones are a run by chance in 7 of C(12, 6) = 924 cases.
    assert runs.mean() == pytest.approx(0.3 + 0.7 * 7 / 924, abs=4 * math.sqrt(0.21 / 600))


def test_replacement_is_any_token_but_the_mask() -> None:
    key = NoiseKey(0, 0, 0, 40)
    for mask in (0, 3, 6):
        tokens = sample_replacement_tokens((40, 60), 7, mask, key)
        counts = np.bincount(tokens.flatten(), minlength=7)
        assert len(counts) == 7 and counts[mask] == 0
        assert chi_square(np.delete(counts, mask)) < 25.8  # 5 degrees of freedom: p = 1e-4
    part = sample_replacement_tokens((3, 60), 7, 6, dataclasses.replace(key, first_sequence=11))
    assert np.array_equal(part, tokens[11:14])


# ----------------------------------------------------------------------------------------------------------------------
# Keys


@pytest.mark.parametrize(("name", "estimator"), ESTIMATORS, ids=estimator_id)
def test_masks_differ_by_seed_step_and_sequence(name: str, estimator: Estimator) -> None:
    group_ids = full_groups(8, LENGTH)
    key = NoiseKey(1, 1, 0, 64)
    keys = [key, dataclasses.replace(key, seed=2), dataclasses.replace(key, step=2), NoiseKey(1, 1, 8, 64)]
    drawn = [sample_masks(group_ids, stream_keys, estimator, "elbo")[0].masked_BL for stream_keys in keys]
    for index, one in enumerate(drawn):
        assert all(not np.array_equal(one, other) for other in drawn[:index])
        assert len({tuple(row) for row in one.tolist()}) > 4
    assert np.array_equal(sample_masks(group_ids, key, estimator, "elbo")[0].masked_BL, drawn[0])


def test_equal_keys_give_equal_numbers_and_others_do_not() -> None:
    assert keyed_rng(1, RngStream.MASKS, 3).random() == keyed_rng(1, RngStream.MASKS, 3).random()
    keys = [(), (2,), (2, 3), (3, 2), (0,), (0, 0), (2, 3, 0)]
    values = [keyed_rng(seed, RngStream.MASKS, *key).random() for seed in (0, 1) for key in keys]
    assert len(set(values)) == len(values)


def test_rng_streams_never_collide() -> None:
    """Names of one value would be one stream, and keys of another stream must not be those of this one."""
    assert len(RngStream.__members__) == len(list(RngStream)) == len({int(stream) for stream in RngStream})
    keys = [key for size in range(3) for key in itertools.product(range(3), repeat=size)]
    values = {keyed_rng(0, stream, *key).random() for stream in RngStream for key in keys}
    assert len(values) == len(RngStream) * len(keys)


def test_noise_groups_written_out() -> None:
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 2, -1]])
    tokens = torch.zeros(1, 10, dtype=torch.int64)
    targets = torch.tensor([[False, True, True, True, True, True, False, True, True, False]])
    batch, maskable = CleanBatch(tokens, targets, documents), targets.numpy()
    assert assign_noise_groups(batch, maskable, "row", None).tolist() == [[-1, 0, 0, 0, 0, 0, -1, 0, 0, -1]]
    assert assign_noise_groups(batch, maskable, "document", None).tolist() == [[-1, 0, 0, 0, 0, 1, -1, 1, 2, -1]]
    # Blocks start with the document; the last of each is short.
    assert assign_noise_groups(batch, maskable, "block", 3).tolist() == [[-1, 0, 0, 1, 1, 2, -1, 2, 3, -1]]
    assert assign_noise_groups(batch, maskable, "block", 2).tolist() == [[-1, 0, 1, 1, 2, 3, -1, 4, 5, -1]]
    alone = CleanBatch(tokens, targets)
    assert assign_noise_groups(alone, maskable, "document", None).tolist() == [[-1, 0, 0, 0, 0, 0, -1, 0, 0, -1]]
    assert assign_noise_groups(alone, maskable, "block", 4).tolist() == [[-1, 0, 0, 0, 1, 1, -1, 1, 2, -1]]


def test_groups_without_a_target_have_no_index() -> None:
    targets = torch.tensor([[False, False, True, False, False, False, True, True]])
    batch = CleanBatch(torch.zeros(1, 8, dtype=torch.int64), targets, torch.tensor([[0, 0, 1, 2, 2, 2, 3, 3]]))
    assert assign_noise_groups(batch, targets.numpy(), "document", None).tolist() == [[-1, -1, 0, -1, -1, -1, 1, 1]]
    assert assign_noise_groups(batch, targets.numpy(), "block", 1).tolist() == [[-1, -1, 0, -1, -1, -1, 1, 2]]


def test_a_mask_token_in_the_data_is_not_maskable() -> None:
    batch = batch_of(8)
    batch.tokens_BL[:, 4] = MASK
    maskable = exclude_mask_tokens(batch, MASK)
    assert not maskable[:, 4].any()
    assert np.array_equal(np.delete(maskable, 4, axis=1), np.delete(batch.loss_mask_BL.numpy(), 4, axis=1))
    assert np.array_equal(exclude_mask_tokens(batch, None), batch.loss_mask_BL.numpy())


# ----------------------------------------------------------------------------------------------------------------------
# Noise levels


@pytest.mark.parametrize("rows", [6, 7])
def test_antithetic_offsets_come_in_pairs(rows: int) -> None:
    offsets = sample_sequence_offsets(NoiseKey(3, 0, 0, rows), rows, "antithetic")
    np.testing.assert_allclose(offsets[0:6:2] + offsets[1:6:2], 1.0, atol=1e-15)
    assert len(offsets) == rows


def test_noise_levels_of_a_sequence() -> None:
    rng = np.random.default_rng(0)
    for times in ("stratified", "antithetic", "uniform"):
        assert sample_group_levels(0.3, 1, rng, times).tolist() == [0.3]
        assert sample_group_levels(0.3, 0, rng, times).tolist() == []
    levels = sample_group_levels(0.3, 5, rng)
    np.testing.assert_allclose(np.sort(levels), (np.arange(5) + 0.3) / 5)
    pairs = sample_group_levels(0.3, 5, rng, "antithetic")
    np.testing.assert_allclose(pairs[:4:2] + pairs[1:4:2], 1.0)
    assert pairs[0] == 0.3 and len(set(pairs.tolist())) == 5
    assert sample_group_levels(0.3, 5, rng, "uniform")[0] == 0.3


@pytest.mark.parametrize("times", ["stratified", "antithetic", "uniform"])
def test_level_of_every_group_is_uniform(times: str) -> None:
    """Over the steps, for each row and noise group: nothing is tied to a place."""
    levels = np.zeros((800, 2, 3))
    for step in range(800):
        offsets = sample_sequence_offsets(NoiseKey(1, step, 0, 2), 2, times)
        for row in range(2):
            levels[step, row] = sample_group_levels(offsets[row], 3, np.random.default_rng((step, row)), times)
    for row in range(2):
        for group in range(3):
            bins = np.bincount(np.minimum(levels[:, row, group] * 8, 7).astype(int), minlength=8)
            assert chi_square(bins) < 29.9  # 7 degrees of freedom: p = 1e-4


def test_counts_are_uniform_where_levels_are() -> None:
    levels = (np.arange(700) + 0.5) / 700
    counts = masked_counts_at_levels(levels, np.full(700, 7))
    assert np.bincount(counts).tolist() == [0, *[100] * 7]
    assert masked_counts_at_levels(np.array([0.0, 1.0, 1.0]), np.array([4, 4, 0])).tolist() == [1, 4, 1]


def test_segments_written_out() -> None:
    segments = torch.tensor([[3, 3, 5, 5, 5, -1], [0, 1, 1, -1, -1, -1]])
    assert [segment_starts(row.numpy()).tolist() for row in segments] == [[0, 2], [0, 1]]
    tokens, targets = torch.arange(12).view(2, 6), segments % 2 == 1
    sequences = NoiseSequences.from_batch(CleanBatch(tokens, targets & (segments >= 0), None, segments))
    assert sequences.batch.tokens_BL.tolist() == [[0, 1, 0], [2, 3, 4], [6, 0, 0], [7, 8, 0]]
    assert sequences.batch.loss_mask_BL.int().tolist() == [[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 1, 0]]
    values = np.arange(12).reshape(2, 6)
    assert sequences.scatter(sequences.gather(values)).tolist() == [[0, 1, 2, 3, 4, 0], [6, 7, 8, 0, 0, 0]]


def test_rows_of_padding_have_no_segment(make_config: MakeConfig) -> None:
    padding = torch.full((2, 5), -1)
    batch = CleanBatch(torch.zeros_like(padding), padding > 0, padding, padding)
    assert NoiseSequences.from_batch(batch).batch.tokens_BL.shape == (0, 0)
    model = make_config(logit_alignment="shifted")
    for config in (MaskedDiffusionConfig(), BlockDiffusionConfig(block_length=3), NextTokenConfig()):
        noised = build_objective(config, model).build_noised_batch(batch, NoiseKey(1, 0, 2, 5))
        assert noised.denominator == noised.num_targets == len(noised.positions_N) == 0
