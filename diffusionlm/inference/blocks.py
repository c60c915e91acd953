"""Blocks of a text: where they begin, which masked positions are decoded together, and their unmasking schedules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diffusionlm.inference.settings import DecodingSettings


@dataclass(frozen=True)
class TextSegments:
    """Parts of a text in which the blocks of block-causal attention are counted anew: the turns of a chat."""

    starts: tuple[int, ...]
    """First position of each segment, ascending, the first one 0."""

    def block_starts(self, positions_N: NDArray[np.int64], block_length: int) -> NDArray[np.int64]:
        """First position of each position's block."""
        origins = np.array(self.starts, dtype=np.int64)
        offsets_N: NDArray[np.int64] = positions_N - origins[np.searchsorted(origins, positions_N, side="right") - 1]
        return positions_N - offsets_N % block_length

    def block_end(self, block_start: int, block_length: int) -> int:
        """Position after the block that begins at a position; the text may end before it."""
        following = next((start for start in self.starts if start > block_start), None)
        return block_start + block_length if following is None else min(block_start + block_length, following)

    def numbers(self, length: int) -> NDArray[np.int64]:
        """Number of each position's segment, for a text of any length, [L]."""
        return np.searchsorted(np.array(self.starts), np.arange(length), side="right")


@dataclass(frozen=True)
class DecodingBlock:
    """Positions that are decoded together."""

    positions: NDArray[np.int64]
    unmasking_schedule: tuple[float, ...]
    """One entry per step (`Strategy.unmasking_schedule`)."""
    is_next_token: bool = False
    """One position, which committed text predicts (`GenerationConfig.next_token_first`)."""


def split_into_blocks(
    masked_positions: NDArray[np.int64], settings: DecodingSettings, segments: TextSegments, *, is_infill: bool = False
) -> list[DecodingBlock]:
    """Split masked positions into blocks, left to right: every ``block_length`` of them or, with block-causal
    attention, those of each block of the text. Independent blocks are counted from the first masked position. With
    ``next_token_first`` the first position of each is a block of its own, unless it begins the text.

    Args:
        is_infill: of a canvas, which has no next tokens.

    Raises:
        ValueError: fewer ``steps`` than blocks.
    """
    config, num_masked = settings.config, len(masked_positions)
    block_length = config.block_length or max(num_masked, 1)
    if settings.block_causal_length is None and not settings.has_independent_blocks:
        groups = [masked_positions[start : start + block_length] for start in range(0, num_masked, block_length)]
    else:
        origin = masked_positions[0] if settings.has_independent_blocks and num_masked else 0
        block_starts = segments.block_starts(masked_positions - origin, block_length)
        groups = np.split(masked_positions, np.flatnonzero(np.diff(block_starts, prepend=-1)))
        groups = groups[1:]  # the first one ends at position 0
    if config.steps is not None and config.steps < len(groups):
        raise ValueError(
            f"steps = {config.steps} is less than the number of blocks, {len(groups)} (block_length = {block_length}, "
            f"{num_masked} tokens): set at least one step per block"
        )
    has_next_tokens = bool(config.next_token_first) and not is_infill
    firsts = [group[: int(has_next_tokens and group[0] > 0)] for group in groups]
    groups = [group[len(first) :] for first, group in zip(firsts, groups, strict=True)]
    if config.steps is not None and groups:
        share, surplus = divmod(config.steps, len(groups))
        num_steps = [share + (index < surplus) for index in range(len(groups))]
    else:
        uses_whole_blocks = settings.strategy.family.uses_whole_blocks
        num_steps = [config.denoising_steps or (block_length if uses_whole_blocks else len(group)) for group in groups]
    blocks = []
    for first, group, count in zip(firsts, groups, num_steps, strict=True):
        if len(first):
            blocks.append(DecodingBlock(first, (1,), is_next_token=True))
        if len(group):
            blocks.append(DecodingBlock(group, settings.strategy.unmasking_schedule(len(group), count, block_length)))
    return blocks
