"""Key-value cache of sequences that are being decoded: a forward computes only new or changed inputs.

Shapes: B sequences, Q inputs of a forward, K key-value heads, T positions of the cache, H width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from config.model import ModelConfig


class KeyValueCache:
    """Keys and values of B sequences, by layer and position, for forwards without gradient.

    Keys and values are written by position, so appending, overwriting and skipping are the same operation. To truncate
    a sequence, lower its `CacheSlots.num_visible_B`. `select` frees the storage of the other sequences.
    """

    def __init__(
        self, config: ModelConfig, batch: int, max_length: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        """Allocate all storage, filled with zeros.

        Args:
            batch: number of sequences, B.
            max_length: number of positions, T.
            dtype: dtype of the model's keys: that of its weights, or of autocast.

        Raises:
            ValueError: no sequence, no position, or more positions than the model's context.
        """
        if batch < 1 or max_length < 1:
            raise ValueError(f"a cache needs at least one sequence and one token, not {batch} and {max_length}")
        if max_length > config.max_position_embeddings:
            raise ValueError(
                f"a cache for {max_length} tokens is longer than the model's context, "
                f"max_position_embeddings = {config.max_position_embeddings}; shorten the text"
            )
        self.batch, self.max_length, self.dtype = batch, max_length, dtype
        # The keys of a head are contiguous, as the products of attention read them. One extra slot, the last, takes the
        # writes of padding. Zeros: a hidden key has weight 0, and 0 times uninitialized memory may be NaN.
        shape = (batch, config.num_key_value_heads, max_length + 1, config.head_dim)
        layers = range(config.num_hidden_layers)
        self.keys_BKTH = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]
        """Keys of each layer, after the rotary embedding."""
        self.values_BKTH = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]
        """Values of each layer."""

    def select(self, sequences: list[int]) -> None:
        """Keep these sequences, in this order, and free the storage of the others.

        Raises:
            ValueError: no sequences, or one that the cache does not have.
        """
        if not sequences or not all(0 <= index < self.batch for index in sequences):
            raise ValueError(f"sequences = {sequences} must contain at least one of 0 to {self.batch - 1}")
        if sequences == list(range(self.batch)):
            return
        index = torch.tensor(sequences, device=self.keys_BKTH[0].device)
        for storage in (self.keys_BKTH, self.values_BKTH):
            for layer, tensor in enumerate(storage):
                storage[layer] = tensor.index_select(0, index)
        self.batch = len(sequences)


@dataclass(frozen=True)
class CacheSlots:
    """Positions of the inputs of one forward in the cache, and the number of keys they may attend to.

    Raises:
        ValueError: a position or a number of keys outside the cache, another number of sequences than the cache has, or
            an input that its own sequence does not attend to.
    """

    cache: KeyValueCache
    positions_BQ: Tensor
    """Position of each input in its sequence; -1: padding, which no query attends to. On the CPU, int64."""
    num_visible_B: Tensor
    """Queries attend to keys below this position, if the pattern allows it. On the CPU, int64."""

    def __post_init__(self) -> None:
        for tensor in (self.positions_BQ, self.num_visible_B):
            assert tensor.device.type == "cpu" and tensor.dtype == torch.int64, "Slots are int64, on the CPU"
        batch, max_length = self.cache.batch, self.cache.max_length
        if self.positions_BQ.dim() != 2 or self.num_visible_B.shape != (batch,) or len(self.positions_BQ) != batch:
            raise ValueError(
                f"positions_BQ {list(self.positions_BQ.shape)} and num_visible_B {list(self.num_visible_B.shape)} must "
                f"be for the {batch} sequences of the cache; select() removes the others"
            )
        positions, num_visible = self.positions_BQ.tolist(), self.num_visible_B.tolist()
        if not positions[0]:
            raise ValueError("positions_BQ has no inputs: a forward needs at least one per sequence; padding counts")
        if min(map(min, positions)) < -1 or max(map(max, positions)) >= max_length:
            raise ValueError(f"positions_BQ must be from 0 to {max_length - 1}, the last of the cache, or -1 (padding)")
        if min(num_visible) < 0 or max(num_visible) > max_length:
            raise ValueError(f"num_visible_B = {num_visible} must be from 0 to {max_length}, the length of the cache")
        last_positions = [max(row) for row in positions]
        if any(last >= limit for last, limit in zip(last_positions, num_visible, strict=True)):
            raise ValueError(
                f"num_visible_B = {num_visible} hides inputs: the last ones are at positions {last_positions}, and a "
                "sequence must attend to its own inputs"
            )
