"""Noise groups and their noise levels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diffusionlm.diffusion.corruption import (
    assign_noise_groups,
    exclude_mask_tokens,
    masked_counts_at_levels,
    sample_group_levels,
    sample_sequence_offsets,
)
from diffusionlm.diffusion.noised_batch import CleanBatch, NoiseKey
from tests.unit.diffusion.noise_cases import (
    MASK,
    batch_of,
    chi_square,
)


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
