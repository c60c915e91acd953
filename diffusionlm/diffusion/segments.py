"""Segments of conversations as sequences of their own: segments are noised alike in one row and in separate rows.

Shapes: B sequences, L tokens, Q segments of all sequences, M tokens of the longest segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionlm.diffusion.noised_batch import CleanBatch

Scalar = TypeVar("Scalar", bound=np.generic)


def segment_starts(segments_L: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Positions of a row where a segment starts, ascending; negative numbers are padding."""
    is_start_L = segments_L >= 0
    is_start_L[1:] &= segments_L[1:] != segments_L[:-1]
    return np.flatnonzero(is_start_L)


@dataclass(frozen=True)
class NoiseSequences:
    """The parts of a batch that are noised independently: its segments, or its rows if it has none."""

    batch: CleanBatch
    """Each of them as a row, Q rows of M tokens; the rest of a row is no target."""
    shape_BL: tuple[int, int]
    indices_QM: NDArray[np.int64] | None
    """Flat index into B * L of each token of each segment, in order; -1 after its end. None: the rows themselves."""

    @classmethod
    def from_batch(cls, batch: CleanBatch) -> NoiseSequences:
        """The sequences of a batch, in the order of rows and positions."""
        B, L = batch.tokens_BL.shape
        if batch.segment_BL is None:
            return cls(batch, (B, L), None)
        segments_BL = batch.segment_BL.numpy()
        starts_Q = np.concatenate([row * L + segment_starts(segments_BL[row]) for row in range(B)])
        segment_of_token = np.searchsorted(starts_Q, np.flatnonzero(segments_BL >= 0), side="right") - 1
        sizes_Q = np.bincount(segment_of_token, minlength=len(starts_Q))
        offsets_M = np.arange(sizes_Q.max(initial=0))
        indices_QM = np.where(offsets_M < sizes_Q[:, None], starts_Q[:, None] + offsets_M, -1)

        def gather(tensor: Tensor) -> Tensor:
            return torch.from_numpy(_gather(tensor.numpy(), indices_QM))

        is_eos_padding_QM = None if batch.is_eos_padding_BL is None else gather(batch.is_eos_padding_BL)
        segments = CleanBatch(gather(batch.tokens_BL), gather(batch.loss_mask_BL), is_eos_padding_BL=is_eos_padding_QM)
        return cls(segments, (B, L), indices_QM)

    def gather(self, values_BL: NDArray[Scalar]) -> NDArray[Scalar]:
        """The values of each sequence, [Q, M]; zero after its end."""
        return values_BL if self.indices_QM is None else _gather(values_BL, self.indices_QM)

    def scatter(self, values_QM: NDArray[Scalar]) -> NDArray[Scalar]:
        """The inverse of `gather`, [B, L]; zero outside of all sequences."""
        if self.indices_QM is None:
            return values_QM
        values_BL = np.zeros(self.shape_BL, dtype=values_QM.dtype)
        is_token_QM = self.indices_QM >= 0
        values_BL.reshape(-1)[self.indices_QM[is_token_QM]] = values_QM[is_token_QM]
        return values_BL


def _gather(values_BL: NDArray[Scalar], indices_QM: NDArray[np.int64]) -> NDArray[Scalar]:
    return np.append(values_BL, values_BL.dtype.type(0))[indices_QM]
