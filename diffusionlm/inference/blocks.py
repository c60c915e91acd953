"""What decoding shares with its likelihood: the blocks of a text, who sees whom, and one forward over open positions.

Shapes: B texts, L positions, R open positions of the texts' current blocks (flat B * L, ascending), V vocabulary, M
those of one text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.generation import GenerationConfig
from config.model import ModelConfig
from diffusionlm.inference.policies import build_policy, even_quotas
from diffusionlm.models.patterns import Bidirectional, BlockCausal
from diffusionlm.models.transformer import Transformer

CHUNK_BYTES = 64 << 20
"""Budget for one [rows, V] array of fp64 probabilities."""

DECIMALS_OF_EQUALS = 5
"""Confidences of positions that are alike differ by rounding in the model, less than this."""


@dataclass(frozen=True)
class Block:
    """Positions that are decoded together, and how many of them each forward settles at least."""

    positions: NDArray[np.int64]
    quotas: list[int]


def blocks_of(holes: NDArray[np.int64], config: GenerationConfig, model: ModelConfig) -> list[Block]:
    """The holes in groups, left to right, each with the quotas of its forwards: every ``block_length`` holes, or those
    of each block of the text.

    Raises:
        ValueError: fewer ``steps`` than blocks.
    """
    causal_length = block_causal_length(config, model)
    size = causal_length or config.block_length or max(len(holes), 1)
    if causal_length is None:
        groups = [holes[start : start + size] for start in range(0, len(holes), size)]
    else:
        groups = [holes[holes // size == block] for block in np.unique(holes // size)]
    if config.steps is not None and config.steps < len(groups):
        raise ValueError(
            f"steps = {config.steps} are fewer than the {len(groups)} blocks of block_length = {size} that hold "
            f"{len(holes)} tokens: give at least one step a block"
        )
    steps = [config.denoising_steps or len(group) for group in groups]
    if config.steps is not None and groups:
        steps = list(even_quotas(config.steps, len(groups)))
    policy = build_policy(config)
    return [Block(group, list(policy.quotas(len(group), count))) for group, count in zip(groups, steps, strict=True)]


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


def placeholder_token(config: GenerationConfig, model: ModelConfig) -> int:
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
    return model.mask_token


def open_logits(
    model: Transformer,
    canvases: Sequence[NDArray[np.int64]],
    open_positions: Sequence[NDArray[np.int64]],
    block_length: int | None,
) -> Tensor:
    """One forward of texts of any lengths: the logits that predict their open positions, [R, V].

    Args:
        canvases: tokens of each text, placeholders where nothing is decided yet.
        open_positions: of each text, ascending; at least one in all.
        block_length: of block-causal attention, blocks counted from the start of the text; None: bidirectional.
    """
    lengths = [len(canvas) for canvas in canvases]
    L, device = max(lengths), model.lm_head.weight.device
    tokens_BL = torch.zeros((len(canvases), L), dtype=torch.int64)
    documents_BL = torch.full((len(canvases), L), -1)  # hides the padding
    for index, canvas in enumerate(canvases):
        tokens_BL[index, : lengths[index]] = torch.from_numpy(canvas)
        documents_BL[index, : lengths[index]] = 0
    documents = None if min(lengths) == L else documents_BL.to(device)
    pattern = Bidirectional(documents) if block_length is None else BlockCausal(block_length, documents)
    rows = np.concatenate([index * L + positions for index, positions in enumerate(open_positions)])
    # Shifted: output i - 1 predicts token i; before a block's first token stands a final one, so it is the clean
    # stream's output of training.
    rows_R = torch.from_numpy(rows) - int(model.config.logit_alignment == "shifted")
    return model(tokens_BL.to(device), pattern=pattern, rows=rows_R.to(device))


def comparable(confidence_M: NDArray[np.float64], tokens_L: NDArray[np.int64]) -> NDArray[np.float64]:
    """Confidences of a canvas's open positions, to be compared with each other.

    On a canvas of one token repeated all positions are alike, since rotary embeddings are relative. Rounding in the
    model, which depends on the batch, must not decide which of them comes first.
    """
    return confidence_M.round(DECIMALS_OF_EQUALS) if (tokens_L == tokens_L[0]).all() else confidence_M
