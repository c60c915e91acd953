"""The blocks of a text and their unmasking schedules.

Shapes: L positions of a text, M masked positions of one block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diffusionlm.inference.settings import DecodingSettings
from diffusionlm.inference.unmasking_schedules import even_tokens_per_step

TIE_DECIMALS = 5
"""Rounding in the model moves equal confidences apart by less than this."""


@dataclass(frozen=True)
class DecodingBlock:
    """Positions that are decoded together."""

    positions: NDArray[np.int64]
    unmasking_schedule: tuple[float, ...]
    """One entry per step (`Strategy.unmasking_schedule`)."""


def split_into_blocks(masked_positions: NDArray[np.int64], settings: DecodingSettings) -> list[DecodingBlock]:
    """Split masked positions into blocks, left to right: every ``block_length`` of them or, with block-causal
    attention, those of each block of the text. Independent blocks are counted from the first masked position.

    Raises:
        ValueError: fewer ``steps`` than blocks.
    """
    config, num_masked = settings.config, len(masked_positions)
    block_length = config.block_length or max(num_masked, 1)
    if settings.block_causal_length is None and not settings.has_independent_blocks:
        groups = [masked_positions[start : start + block_length] for start in range(0, num_masked, block_length)]
    else:
        origin = masked_positions[0] if settings.has_independent_blocks and num_masked else 0
        starts = np.flatnonzero(np.diff((masked_positions - origin) // block_length, prepend=-1))
        groups = np.split(masked_positions, starts)[1:]  # the first one ends at position 0
    if config.steps is not None and config.steps < len(groups):
        raise ValueError(
            f"steps = {config.steps} is less than the number of blocks, {len(groups)} (block_length = {block_length}, "
            f"{num_masked} tokens): set at least one step per block"
        )
    if config.steps is not None and groups:
        num_steps = list(even_tokens_per_step(config.steps, len(groups)))
    else:
        uses_whole_blocks = settings.strategy.family.uses_whole_blocks
        num_steps = [config.denoising_steps or (block_length if uses_whole_blocks else len(group)) for group in groups]
    return [
        DecodingBlock(group, settings.strategy.unmasking_schedule(len(group), count, block_length))
        for group, count in zip(groups, num_steps, strict=True)
    ]


def round_if_uniform_canvas(confidence_M: NDArray[np.float64], tokens_L: NDArray[np.int64]) -> NDArray[np.float64]:
    """Round confidences if the whole canvas is one token.

    All positions are equal then, because rotary embeddings are relative, and rounding in the model, which depends on
    the batch, must not break the tie.
    """
    return confidence_M.round(TIE_DECIMALS) if (tokens_L == tokens_L[0]).all() else confidence_M
