"""Batches, estimators and statistics of the tests of corruption."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from config.training.objective import Estimator, LossWeighting
from diffusionlm.diffusion.corruption import (
    MaskSample,
    sample_masks,
)
from diffusionlm.diffusion.noised_batch import CleanBatch, NoiseKey

MASK, LENGTH, BLOCK = 50, 24, 5


def batch_of(rows: int) -> CleanBatch:
    """Random rows with prompts, padding and documents; every eighth row has no target."""
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(0, MASK, (rows, LENGTH)))
    documents, targets = np.zeros((rows, LENGTH), dtype=np.int64), np.ones((rows, LENGTH), dtype=np.bool_)
    for row in range(rows):
        documents[row, 3 + row % 11 :] = 1
        documents[row, LENGTH - 2 * (row % 3) :] = -1
        targets[row, : row % 5] = False
        targets[row, row % 13] = False
    targets &= documents >= 0
    targets[5::8] = False
    return CleanBatch(tokens, torch.from_numpy(targets), torch.from_numpy(documents))


def full_groups(rows: int, length: int, block: int | None = None) -> Any:
    return np.broadcast_to(np.arange(length) // (block or length), (rows, length))


def noise_of(
    group_ids_BL: Any, estimator: Estimator, *, step: int = 0, seed: int = 0, weight: LossWeighting = "elbo"
) -> MaskSample:
    [noise] = sample_masks(group_ids_BL, NoiseKey(seed, step, 0, len(group_ids_BL)), estimator, weight)
    return noise


def chi_square(counts: Any) -> float:
    """Of counts that should all be equal."""
    return float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
