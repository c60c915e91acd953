"""Inputs of a forward at fixed addresses and in fixed shapes, as a CUDA graph needs them.

The texts of a round are divided into parts of Q inputs each, and parts, keys and pages are padded to the shape. Inputs
that pad read and write a page of their own, or the first key of their text, and nothing reads their outputs.

Shapes: G parts, Q inputs of a part, S keys of a part, P pages of a part, N query heads, K key-value heads, H width of a
head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.training.runtime import AttentionBackend
from diffusionlm.models.attention import PreparedAttention, PreparedBatch
from diffusionlm.models.cache import PagedCache
from diffusionlm.models.dense_attention import AttentionScale, without_cudnn_attention
from diffusionlm.models.ragged import CachedAttention, SequenceSlice, find_key_limits, find_key_slots, pad_pages

ReadText = tuple[NDArray[np.int64], SequenceSlice]
"""Tokens of a text, and the part that a forward reads."""


@dataclass(frozen=True)
class StaticShape:
    """Numbers of parts, inputs and keys to which a forward is padded; each shape has a graph of its own."""

    num_parts: int
    """G, parts into which the texts of a round are divided."""
    num_queries: int
    """Q, inputs of a part."""
    num_keys: int
    """S, keys that each part attends to."""


class StaticBatch(PreparedBatch):
    """The inputs of a forward of this shape on the device, which `load` replaces."""

    def __init__(self, shape: StaticShape, cache: PagedCache, scratch_page: int) -> None:
        """
        Args:
            scratch_page: page of the cache that no text has.
        """
        self._shape, self._cache, self._scratch_page = shape, cache, scratch_page
        G, Q = shape.num_parts, shape.num_queries
        self._num_pages = -(-shape.num_keys // cache.page_size)
        self.num_inputs = G * Q
        sizes = [4 * G * Q, G, G * self._num_pages]
        self._inputs = torch.zeros(sum(sizes), dtype=torch.int64, device=cache.keys_KTH[0].device)
        """All that `load` replaces, in one tensor; the others are views of it."""
        inputs, visible, tables = torch.split(self._inputs, sizes)
        tokens_GQ, self._positions_GQ, slots_GQ, self._limits_GQ = inputs.view(4, G, Q).unbind()
        self.tokens_1Q, self._slots_Q = tokens_GQ.view(1, -1), slots_GQ.view(-1)
        self._num_visible_G1, self._tables_GP = visible.view(G, 1), tables.view(G, -1)

    def load(self, texts: Sequence[ReadText]) -> NDArray[np.int64]:
        """Replace all inputs, with one copy to the device and without waiting for it.

        Returns:
            The place of each output of the texts among the G * Q inputs.
        """
        G, Q, size = self._shape.num_parts, self._shape.num_queries, self._cache.page_size
        sequences = [sequence for _, sequence in texts]
        num_parts = [-(-sequence.num_inputs // Q) for sequence in sequences]
        firsts = np.cumsum([0, *num_parts[:-1]])
        starts_G, ends_G, num_visible_G = np.zeros(G, np.int64), np.zeros(G, np.int64), np.ones(G, np.int64)
        tables_GP = np.full((G, self._num_pages), self._scratch_page)
        for sequence, first, count in zip(sequences, firsts.tolist(), num_parts, strict=True):
            parts = slice(first, first + count)
            starts_G[parts] = np.arange(sequence.start, sequence.end, Q)
            ends_G[parts], num_visible_G[parts] = sequence.end, sequence.num_visible
            tables_GP[parts] = pad_pages(sequence, size, self._num_pages)
        tokens_GQ, positions_GQ, slots_GQ, limits_GQ = inputs_4GQ = np.zeros((4, G, Q), np.int64)
        all_positions_GQ = starts_G[:, None] + np.arange(Q)
        is_input_GQ = all_positions_GQ < ends_G[:, None]
        positions_GQ[is_input_GQ] = all_positions_GQ[is_input_GQ]
        tokens_GQ[is_input_GQ] = np.concatenate([tokens_L[part.start : part.end] for tokens_L, part in texts])
        slots_GQ[:] = np.take_along_axis(tables_GP, positions_GQ // size, axis=1) * size + positions_GQ % size
        slots_GQ[~is_input_GQ] = self._scratch_page * size
        limits_GQ[:] = 1
        limits_GQ[is_input_GQ] = _find_limits(sequences)
        places = [first * Q + part.output_offsets for first, part in zip(firsts.tolist(), sequences, strict=True)]
        values = torch.from_numpy(np.concatenate([inputs_4GQ.ravel(), num_visible_G, tables_GP.ravel()]))
        if self._inputs.is_cuda:
            values = values.pin_memory()  # a copy of pageable memory may wait for the device
        self._inputs.copy_(values, non_blocking=True)
        return np.concatenate(places)

    def prepare_attention(
        self, windows: Sequence[int | None], backend: AttentionBackend, scale_options: AttentionScale
    ) -> tuple[Sequence[PreparedAttention], Tensor]:
        """The attention of each layer, and the position of each input, [1, G * Q]."""
        assert backend in ("auto", "eager", "sdpa"), "checked before"
        cache, num_keys = self._cache, self._shape.num_keys
        slots_GS = find_key_slots(self._tables_GP, self._num_visible_G1, cache.page_size, num_keys)
        attention_of_window = {
            window: CachedAttention(
                cache, slots_GS, num_keys, self._positions_GQ, self._limits_GQ,
                window=window, requested=backend, scale_options=scale_options,
            )
            for window in dict.fromkeys(windows)
        }  # fmt: skip
        attentions = [_StaticAttention(layer, self._slots_Q, attention_of_window[w]) for layer, w in enumerate(windows)]
        return attentions, self._positions_GQ.view(1, -1)


def _find_limits(sequences: Sequence[SequenceSlice]) -> NDArray[np.int64]:
    """Last visible key of all inputs, plus one: with one computation for sequences that share their pattern."""
    counts = [sequence.num_inputs for sequence in sequences]
    positions = np.concatenate([np.arange(sequence.start, sequence.end) for sequence in sequences])
    limits = np.repeat([sequence.num_visible for sequence in sequences], counts)
    numbers = np.repeat([id(sequence.pattern) for sequence in sequences], counts)
    for pattern in {id(sequence.pattern): sequence.pattern for sequence in sequences}.values():
        own = numbers == id(pattern)
        ends = find_key_limits(pattern, torch.from_numpy(positions[own])).numpy()
        limits[own] = np.minimum(limits[own], ends)
    return limits


class _StaticAttention(PreparedAttention):
    """Attention of one layer: stores the keys and values of the inputs in the cache, and then reads it."""

    def __init__(self, layer: int, slots_Q: Tensor, attention: CachedAttention) -> None:
        self._layer, self._slots_Q, self._attention = layer, slots_Q, attention

    def __call__(self, q_1QNH: Tensor, k_1QKH: Tensor, v_1QKH: Tensor) -> Tensor:
        """Write keys and values of the inputs to their pages; attend, [1, G * Q, N, H]."""
        self._attention.cache.write(self._layer, self._slots_Q, k_1QKH[0], v_1QKH[0])
        q_GQNH = q_1QNH.view(*self._attention.positions_GQ.shape, *q_1QNH.shape[2:])
        with without_cudnn_attention():
            return self._attention.attend(self._layer, q_GQNH).flatten(0, 1)[None]
