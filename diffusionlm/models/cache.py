"""Paged key-value cache of sequences that are being decoded: a forward computes only new or changed inputs.

Shapes: Q inputs of a forward, K key-value heads, T slots of all pages, S keys of a sequence, H width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.model import ModelConfig


class PagedCache:
    """Keys and values by layer and slot, for forwards without gradient. A page is a run of slots of one sequence.

    Who owns which page is the caller's business. Keys and values are written by position, so appending, overwriting and
    skipping are the same operation. To truncate a sequence, lower its `SequenceSlice.num_visible`.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        device: torch.device | str,
        dtype: torch.dtype,
        num_key_value_heads: int | None = None,
    ) -> None:
        """Allocate all storage, filled with zeros.

        Args:
            page_size: positions of a page.
            dtype: dtype of the model's keys: that of its weights, or of autocast.
            num_key_value_heads: of this rank. None: those of the config.

        Raises:
            ValueError: no page, or a page without a position.
        """
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a cache needs at least one page of one position, not {num_pages} of {page_size}")
        self.num_pages, self.page_size, self.dtype = num_pages, page_size, dtype
        # The keys of a head are contiguous, as the products of attention read them. Zeros: a hidden key has weight 0,
        # and 0 times uninitialized memory may be NaN.
        shape = (num_key_value_heads or config.num_key_value_heads, num_pages * page_size, config.head_dim)
        layers = range(config.num_hidden_layers)
        self.keys_KTH = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]
        """Keys of each layer, after the rotary embedding."""
        self.values_KTH = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]
        """Values of each layer."""

    def write(self, layer: int, slots_Q: Tensor, k_QKH: Tensor, v_QKH: Tensor) -> None:
        """Write keys and values of a layer.

        Raises:
            ValueError: they have another dtype than the cache.
        """
        for storage, new_QKH in ((self.keys_KTH, k_QKH), (self.values_KTH, v_QKH)):
            if new_QKH.dtype != self.dtype:
                raise ValueError(
                    f"the cache is {self.dtype} and the model's keys are {new_QKH.dtype}: create the cache with the "
                    "dtype of the keys"
                )
            storage[layer].index_copy_(1, slots_Q, new_QKH.transpose(0, 1))

    def slots(self, pages: Sequence[int], start: int, end: int) -> NDArray[np.int64]:
        """Slots of the positions from ``start`` to ``end`` of a sequence with these pages."""
        positions = np.arange(start, end)
        page_of_position = np.asarray(pages, dtype=np.int64)[positions // self.page_size]
        return page_of_position * self.page_size + positions % self.page_size
