"""Images in a text: encoded files, their places among the tokens, and the positions that follow. No torch.

Shapes: L positions of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Grid = tuple[int, int]
"""Rows and columns of an image in positions of the text."""


@dataclass(frozen=True)
class EncodedImage:
    """An image file that was checked and can be decoded (`ImageProcessor.read_image`)."""

    content: bytes | Path
    """The file, or its path."""
    grid: Grid
    digest: bytes
    """SHA-256 of the file and of the processor's options: equal ones mean equal features."""
    location: str = field(default="", compare=False)
    """Place of the record or request, for errors."""

    @property
    def num_tokens(self) -> int:
        """Positions of the text that the image takes."""
        return self.grid[0] * self.grid[1]


@dataclass(frozen=True)
class PlacedImage:
    """An image in a text."""

    start: int
    """Position of its first placeholder."""
    image: EncodedImage

    @property
    def end(self) -> int:
        """Position after its last placeholder."""
        return self.start + self.image.num_tokens

    def move(self, offset: int) -> PlacedImage:
        """The image so many positions later."""
        return PlacedImage(self.start + offset, self.image)


def expand_placeholders(
    token_ids: Sequence[int], images: Sequence[EncodedImage], image_token_id: int
) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """Repeat the placeholder of each image as often as it takes positions.

    Returns:
        The token ids, and where the images stand in them.

    Raises:
        ValueError: the text has not one placeholder for each image.
    """
    num_placeholders = sum(token == image_token_id for token in token_ids)
    if num_placeholders != len(images):
        raise ValueError(
            f"the text has {num_placeholders} image placeholders (token {image_token_id}) for {len(images)} images: "
            "pass images as content parts, without writing placeholders, in a chat whose template keeps them"
        )
    expanded: list[int] = []
    placed: list[PlacedImage] = []
    remaining = iter(images)
    for token in token_ids:
        if token != image_token_id:
            expanded.append(token)
            continue
        placed.append(PlacedImage(len(expanded), next(remaining)))
        expanded += [token] * placed[-1].image.num_tokens
    return expanded, tuple(placed)


def compute_mrope_positions(length: int, images: Sequence[PlacedImage]) -> NDArray[np.int64]:
    """Position ids of a text in time, rows and columns, [3, L] (Qwen3-VL's rule).

    Text counts on in all three. An image that begins at p has p, p + row and p + column; the text after it goes on from
    p + the larger side.
    """
    steps_L = np.ones(length, dtype=np.int64)
    for placed in images:
        steps_L[placed.start : placed.end] = 0
        steps_L[placed.end - 1] = max(placed.image.grid)
    positions_3L = np.tile(np.cumsum(steps_L) - steps_L, (3, 1))
    for placed in images:
        own, start = slice(placed.start, placed.end), positions_3L[0, placed.start]
        positions_3L[:, own] = start
        positions_3L[1:, own] += np.indices(placed.image.grid).reshape(2, -1)
    return positions_3L
