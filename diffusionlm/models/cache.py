"""Keys and values of texts that are being decoded, so that a forward computes only what is new or has changed.

Shapes: B texts, Q inputs of a forward, K key-value heads, T places that a text may have, H width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from config.model import ModelConfig


class KeyValueCache:
    """Keys and values of B texts, by layer and place, for forwards without gradient.

    Writing is by place, so appending, replacing and skipping are one thing; a text is truncated by making fewer of its
    places visible (`Slots.visible_B`), and storage is given up by `select` or with the cache.
    """

    def __init__(
        self, config: ModelConfig, batch: int, length: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        """All storage at once, filled with zeros.

        Args:
            config: of the model; gives layers, key-value heads and their width.
            batch: texts.
            length: T, tokens that the longest of them may get.
            device: where the model is.
            dtype: of the model's keys: that of its weights, or of autocast.

        Raises:
            ValueError: no text, no place, or more places than the model's context has.
        """
        if batch < 1 or length < 1:
            raise ValueError(f"a cache of {batch} texts of {length} tokens holds nothing: both must be at least 1")
        if length > config.max_position_embeddings:
            raise ValueError(
                f"a cache for {length} tokens is longer than the model's context, "
                f"max_position_embeddings = {config.max_position_embeddings}; shorten the text"
            )
        self.batch, self.length, self.dtype = batch, length, dtype
        # A head's keys lie side by side, as the products of attention read them. What padding writes goes to one more
        # place, the last. Zeros: a hidden key has weight 0, and 0 times what was in the memory may be nan.
        shape = (batch, config.num_key_value_heads, length + 1, config.head_dim)
        layers = range(config.num_hidden_layers)
        self.keys_BKTH = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]
        """Of each layer, turned by their positions."""
        self.values_BKTH = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]
        """Of each layer."""

    def select(self, rows: list[int]) -> None:
        """Keep these texts, in this order; the storage of the others is given up.

        Raises:
            ValueError: no rows, or one that the cache does not have.
        """
        if not rows or not all(0 <= row < self.batch for row in rows):
            raise ValueError(f"rows {rows} must name at least one of the {self.batch} texts of the cache, from 0")
        if rows == list(range(self.batch)):
            return
        index = torch.tensor(rows, device=self.keys_BKTH[0].device)
        for storage in (self.keys_BKTH, self.values_BKTH):
            for layer, held in enumerate(storage):
                storage[layer] = held.index_select(0, index)
        self.batch = len(rows)


@dataclass(frozen=True)
class CacheSlots:
    """One forward's part of a cache: which places its inputs have, and what they see.

    Raises:
        ValueError: places or visible places that the cache does not have, another number of texts than the cache has,
            or an input that its own text does not see.
    """

    cache: KeyValueCache
    positions_BQ: Tensor
    """Place of each input in its text; -1: padding, which nothing ever sees. On the CPU, int64."""
    num_visible_B: Tensor
    """Keys at places below this are seen, if the pattern lets them. On the CPU, int64."""

    def __post_init__(self) -> None:
        for tensor in (self.positions_BQ, self.num_visible_B):
            assert tensor.device.type == "cpu" and tensor.dtype == torch.int64, "Slots are int64, on the CPU"
        batch, length = self.cache.batch, self.cache.length
        if self.positions_BQ.dim() != 2 or self.num_visible_B.shape != (batch,) or len(self.positions_BQ) != batch:
            raise ValueError(
                f"positions_BQ {list(self.positions_BQ.shape)} and num_visible_B {list(self.num_visible_B.shape)} must be for "
                f"the {batch} texts of the cache; select() says which it keeps"
            )
        positions, visible = self.positions_BQ.tolist(), self.num_visible_B.tolist()
        if not positions[0]:
            raise ValueError("positions_BQ has no inputs: a forward needs at least one for each text, padding counts")
        if min(map(min, positions)) < -1 or max(map(max, positions)) >= length:
            raise ValueError(f"positions_BQ must be from 0 to {length - 1}, the last of the cache, or -1 for padding")
        if min(visible) < 0 or max(visible) > length:
            raise ValueError(f"num_visible_B = {visible} must be from 0 to {length}, the length of the cache")
        if any(max(row) >= seen for row, seen in zip(positions, visible, strict=True)):
            raise ValueError(
                f"num_visible_B = {visible} hides inputs, the furthest at places {[max(row) for row in positions]}: "
                "a text must see its inputs"
            )
