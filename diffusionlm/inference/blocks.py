"""What decoding shares with its likelihood: the blocks of a text, who sees whom, and what stands for the undecided.

Shapes: L positions of a text, M open positions of its current block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from config.generation import STRATEGIES, GenerationConfig
from config.model import ModelConfig
from diffusionlm.inference.strategies import build_strategy
from diffusionlm.inference.unmasking_schedules import even_tokens_per_step

TIE_DECIMALS = 5
"""Confidences of positions that are alike differ by rounding in the model, less than this."""


@dataclass(frozen=True)
class DecodingBlock:
    """Positions that are decoded together, and the policy's plan for them: one entry a step."""

    positions: NDArray[np.int64]
    unmasking_schedule: tuple[float, ...]


def split_into_blocks(
    masked_positions: NDArray[np.int64], config: GenerationConfig, model: ModelConfig
) -> list[DecodingBlock]:
    """The holes in groups, left to right, each with the policy's plan: every ``block_length`` holes, or those of each
    block of the text. The config is one of `fill_defaults`.

    Raises:
        ValueError: fewer ``steps`` than blocks.
    """
    causal_length = block_causal_length(config, model)
    size = causal_length or config.block_length or max(len(masked_positions), 1)
    if causal_length is None:
        groups = [masked_positions[start : start + size] for start in range(0, len(masked_positions), size)]
    else:
        groups = [masked_positions[masked_positions // size == block] for block in np.unique(masked_positions // size)]
    if config.steps is not None and config.steps < len(groups):
        raise ValueError(
            f"steps = {config.steps} are fewer than the {len(groups)} blocks of block_length = {size} that hold "
            f"{len(masked_positions)} tokens: give at least one step a block"
        )
    strategy = build_strategy(config)
    assert config.remasking_strategy is not None
    # SDAR counts with whole blocks, also where some of one was given.
    counts_whole = STRATEGIES[config.remasking_strategy].family == "SDAR"
    steps = [config.denoising_steps or (size if counts_whole else len(group)) for group in groups]
    if config.steps is not None and groups:
        steps = list(even_tokens_per_step(config.steps, len(groups)))
    return [
        DecodingBlock(group, strategy.unmasking_schedule(len(group), count, size))
        for group, count in zip(groups, steps, strict=True)
    ]


def block_causal_length(config: GenerationConfig, model: ModelConfig) -> int | None:
    """Tokens of a block that sees itself and those before it; None: bidirectional attention.

    Raises:
        ValueError: blocks are asked for, and neither the config nor the model says how long they are.
    """
    if config.attention == "bidirectional" or (config.attention is None and model.block_length is None):
        return None
    length = config.block_length or model.block_length
    if length is None:
        raise ValueError('attention = "block_causal" needs block_length: the model\'s config.json names none')
    return length


def placeholder_token_id(config: GenerationConfig, model: ModelConfig) -> int:
    """What stands where nothing is decided yet: the mask token, or, where a model without one looks only at what is
    before, any.

    Raises:
        ValueError: the model has no mask token, and attention or blocks are set to something else.
    """
    if model.mask_token_id is None and model.is_autoregressive:
        if block_causal_length(config, model) == 1:
            return 0
        raise ValueError(
            "the model has no mask token, so that it can only generate left to right, token by token: leave "
            "generation.attention and generation.block_length out"
        )
    return model.required_mask_token_id


def round_if_uniform_canvas(confidence_M: NDArray[np.float64], tokens_L: NDArray[np.int64]) -> NDArray[np.float64]:
    """Confidences of a canvas's open positions, to be compared with each other.

    On a canvas of one token repeated all positions are alike, since rotary embeddings are relative. Rounding in the
    model, which depends on the batch, must not decide which of them comes first.
    """
    return confidence_M.round(TIE_DECIMALS) if (tokens_L == tokens_L[0]).all() else confidence_M
