"""The images of a forward: patches or features, where they stand in the text, and the positions of the text.

Shapes: B sequences, S positions that the model reads, M image positions out of B * S, P patches, C values of a patch, F
positions of all images, E features of a position (the merged one, then one for each DeepStack layer), D hidden size of
the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, compress

import torch
from torch import Tensor

Grid = tuple[int, int]
"""Rows and columns of an image in positions of the text; each is a square of merged patches."""


@dataclass(frozen=True)
class ImageInputs:
    """Images of a forward: first those whose features are stored, then those whose patches the tower reads."""

    positions_3BS: Tensor
    """Position ids in time, rows and columns (M-RoPE), int64; all equal for text."""
    indices_M: Tensor
    """Flat indices into B * S of the image positions, ascending. Several copies of an image are several positions."""
    feature_rows_M: Tensor
    """Which of the F feature rows each of these positions has."""
    grids: tuple[Grid, ...]
    """Of each image, in the order of the feature rows."""
    digests: tuple[bytes, ...] = ()
    """Of each image, by which its features are stored."""
    patches_PC: Tensor | None = None
    """Normalized pixels of each patch: image by image, each square by square; C = channels * size * size. None: all
    images are stored."""
    features_EFD: Tensor | None = None
    """Features that were computed before, of the stored images. None: there are none."""

    @classmethod
    def none(cls, positions: Tensor) -> ImageInputs:
        """No images in a text with these position ids, [S] or [B, S]."""
        indices_0 = positions.new_empty(0)
        return cls(positions.view(-1, positions.shape[-1]).expand(3, -1, -1), indices_0, indices_0, ())

    @property
    def num_stored(self) -> int:
        """Images whose features are stored."""
        num_rows = 0 if self.features_EFD is None else self.features_EFD.shape[1]
        return sum(end <= num_rows for end in accumulate(map(math.prod, self.grids)))

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> ImageInputs:
        """Apply a function to all tensors."""
        tensors = {name: function(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)  # type: ignore[arg-type]

    def repeat(self, num_copies: int) -> ImageInputs:
        """The images of copies of the batch, one after the other."""
        offsets = torch.arange(num_copies)[:, None] * self.positions_3BS[0].numel()
        return replace(
            self,
            positions_3BS=self.positions_3BS.repeat(1, num_copies, 1),
            indices_M=(self.indices_M + offsets).flatten(),
            feature_rows_M=self.feature_rows_M.repeat(num_copies),
        )

    def double(self) -> ImageInputs:
        """The images of two streams: each sequence stands twice in its row."""
        S = self.positions_3BS.shape[-1]
        first_M = self.indices_M // S * 2 * S + self.indices_M % S
        indices_2M, order = torch.cat([first_M, first_M + S]).sort()
        return replace(
            self,
            positions_3BS=self.positions_3BS.repeat(1, 1, 2),
            indices_M=indices_2M,
            feature_rows_M=self.feature_rows_M.repeat(2)[order],
        )

    def select(self, sequences: slice) -> ImageInputs | None:
        """The images of some of the sequences; None: they have none."""
        _, B, S = self.positions_3BS.shape
        start, stop, step = sequences.indices(B)
        assert step == 1, "sequences that follow each other"
        is_own_M = (self.indices_M >= start * S) & (self.indices_M < stop * S)
        if not is_own_M.any():
            return None
        rows_M, sizes = self.feature_rows_M[is_own_M], torch.tensor([math.prod(grid) for grid in self.grids])
        image_of_row_F = torch.arange(len(sizes)).repeat_interleave(sizes)
        is_used = torch.zeros(len(sizes), dtype=torch.bool).index_fill(0, image_of_row_F[rows_M], True)
        is_used_F = is_used[image_of_row_F]
        patches_PC, features_EFD = self.patches_PC, self.features_EFD
        stored_F, read_F = is_used_F.tensor_split([int(sizes[: self.num_stored].sum())])
        if features_EFD is not None:
            features_EFD = features_EFD[:, stored_F] if stored_F.any() else None
        if patches_PC is not None:
            used_P = read_F.repeat_interleave(len(patches_PC) // len(read_F))
            patches_PC = patches_PC[used_P] if read_F.any() else None
        return ImageInputs(
            positions_3BS=self.positions_3BS[:, sequences],
            indices_M=self.indices_M[is_own_M] - start * S,
            feature_rows_M=is_used_F.cumsum(0)[rows_M] - 1,
            grids=tuple(compress(self.grids, is_used.tolist())),
            digests=tuple(compress(self.digests, is_used.tolist())),
            patches_PC=patches_PC,
            features_EFD=features_EFD,
        )
