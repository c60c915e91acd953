"""Segments become rows of their own for the noise. What they are packed with: tests/reference/test_answer_losses.py."""

from __future__ import annotations

import numpy as np
import torch

from config.training.objective import (
    BlockDiffusionConfig,
    MaskedDiffusionConfig,
    NextTokenConfig,
)
from diffusionlm.diffusion.noised_batch import CleanBatch, NoiseKey
from diffusionlm.diffusion.objectives import build_objective
from diffusionlm.diffusion.segments import NoiseSequences, segment_starts
from tests.conftest import MakeConfig


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
