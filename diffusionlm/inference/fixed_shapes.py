"""Forwards of fixed shapes: the logits of a request are the same bits, whatever is decoded beside it.

Rounding of a matrix product depends on its shape, and may depend on the place of a row in it. So each forward is a
*tile* of `TILE_ROWS` inputs, in which each block of block-causal attention has one place, which depends on its position
in the text alone. Prompts in parts, cached pages, preemption and neighbors change which tiles are computed, not a row
of one. A text without such blocks has forwards of its own. Attention reads keys up to the end of the query's block.

Shapes: L positions of a text, N outputs of all texts (flat), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from diffusionlm.inference.model_runner import InputText, ModelRunner
from diffusionlm.models.moe import MoE
from diffusionlm.models.patterns import Bidirectional, BlockCausal
from diffusionlm.models.row_adapters import share_weights
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.varlen import SequenceSlice

TILE_ROWS = 16
"""Inputs of a tile; more if a block is longer, fewer if blocks of this length do not fill it."""


def prepare_for_tiles(model: Transformer) -> Transformer:
    """A model for `FixedShapeRunner`, which shares the weights of another one.

    Raises:
        ValueError: the model is not on a CPU in float32 or float64.
    """
    weight = model.lm_head.weight
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"deterministic = True needs a model on the CPU in float32 or float64, and it is on {weight.device} in "
            f"{str(weight.dtype).removeprefix('torch.')}: load it so, or leave it out"
        )
    shared = share_weights(model)
    for module in shared.modules():
        if isinstance(module, MoE):
            module.max_dense_tokens = TILE_ROWS
    return shared


class FixedShapeRunner(ModelRunner):
    """Runs the model on tiles."""

    def _compute_logits(self, texts: Sequence[InputText]) -> Tensor:
        outputs: list[list[Tensor]] = [[] for _ in texts]
        for tile in pack_tiles(texts):
            logits_QV = self._forward(list(tile.input_texts()), copies_keys=True).flatten(0, -2)
            for slot, block in tile.blocks.items():
                outputs[block.text].append(logits_QV[slot * tile.block_length + block.output_offsets])
        for text, logits in zip(texts, outputs, strict=True):
            if not _has_tiles(text):
                logits.append(self._forward([text], copies_keys=True))
        return torch.cat([rows for logits in outputs for rows in logits])


@dataclass(frozen=True)
class TextBlock:
    """A block of a text in a tile."""

    text: int
    """Index of the text."""
    tokens_L: np.ndarray[tuple[int], np.dtype[np.int64]]
    sequence: SequenceSlice
    """The whole block, without outputs."""
    output_offsets: np.ndarray[tuple[int], np.dtype[np.int64]]
    """Outputs, counted from its start."""


@dataclass
class InputTile:
    """Inputs of one forward: blocks of texts that have the same adapter and block length."""

    adapter: str | None
    block_length: int
    num_slots: int
    blocks: dict[int, TextBlock] = field(default_factory=dict)
    """By slot; a tile begins with slot 0, and each one has room for a block."""

    def input_texts(self) -> Iterator[InputText]:
        """All texts of the forward: blocks and what fills the gaps."""
        outputs = None if any(len(block.output_offsets) for block in self.blocks.values()) else np.zeros(0, np.int64)
        for slot in range(self.num_slots):
            num_filled = 0
            if slot in self.blocks:
                block = self.blocks[slot]
                num_filled = block.sequence.num_inputs
                yield InputText(block.tokens_L, replace(block.sequence, outputs=outputs), self.adapter)
            if gap := self.block_length - num_filled:
                sequence = SequenceSlice(0, gap, gap, Bidirectional(), outputs=outputs)
                yield InputText(np.zeros(gap, np.int64), sequence, self.adapter)


def _has_tiles(text: InputText) -> bool:
    return text.sequence.pages is not None and isinstance(text.sequence.pattern, BlockCausal)


def pack_tiles(texts: Sequence[InputText]) -> list[InputTile]:
    """Tiles of the blocks of all texts, in an order in which they can be computed: a block of a text is not before the
    block to its left."""
    tiles: dict[tuple[str | None, int], list[InputTile]] = {}
    for index, text in enumerate(texts):
        if not _has_tiles(text):
            continue
        assert isinstance(text.sequence.pattern, BlockCausal)
        block_length = text.sequence.pattern.block_length
        num_slots = max(1, TILE_ROWS // block_length)
        own = tiles.setdefault((text.adapter, block_length), [])
        number = 0
        for block in _split_into_blocks(index, text):
            slot = block.sequence.start // block_length % num_slots
            number = next((later for later in range(number, len(own)) if slot not in own[later].blocks), len(own))
            if number == len(own):
                own.append(InputTile(text.adapter, block_length, num_slots))
            own[number].blocks[slot] = block
    return [tile for group in tiles.values() for tile in group]


def _split_into_blocks(index: int, text: InputText) -> Iterator[TextBlock]:
    """The whole blocks that contain the inputs of a text, from the left."""
    sequence = text.sequence
    assert isinstance(sequence.pattern, BlockCausal) and sequence.outputs is not None
    limits = sequence.pattern.key_limit(torch.arange(sequence.num_visible)[None])[0].numpy()
    limits = np.minimum(limits, sequence.num_visible)
    start = int(np.searchsorted(limits, limits[sequence.start]))
    while start < sequence.end:
        end = int(limits[start])
        block = replace(sequence, start=start, end=end, num_visible=end, outputs=None)
        outputs = sequence.outputs[(sequence.outputs >= start) & (sequence.outputs < end)]
        yield TextBlock(index, text.tokens_L, block, outputs - start)
        start = end
