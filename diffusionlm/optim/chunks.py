"""Divide the tensors of an update into lists that a GPU computes with the same launches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

MAX_TOGETHER = 1 << 26
"""Elements that are computed together, unless one tensor has more: it bounds the memory of intermediate results."""


def split_by_elements(tensors: Sequence[Tensor], max_elements: int = MAX_TOGETHER) -> Iterator[slice]:
    """Divide tensors, in their order, into slices of at most ``max_elements`` elements; a larger tensor is alone."""
    first = num_elements = 0
    for index, tensor in enumerate(tensors):
        if index > first and num_elements + tensor.numel() > max_elements:
            yield slice(first, index)
            first, num_elements = index, 0
        num_elements += tensor.numel()
    if len(tensors) > first:
        yield slice(first, len(tensors))
