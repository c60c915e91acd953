"""The mesh of a run: which ranks share a tensor, the experts, a sequence or a parameter, and their process groups.

A rank is (data, expert, context, tensor), the last one the fastest, so that the ranks that talk most are neighbors:
rank = ((data * E + expert) * C + context) * T + tensor. Ranks of one (data, expert) load the same sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Axis:
    """Ranks that differ in some coordinates of the mesh only, as one of them sees them."""

    size: int = 1
    rank: int = 0
    """Of this process among them."""
    group: Any = None
    """Their process group. None: there is one rank."""


@dataclass(frozen=True)
class Shard:
    """The part of a tensor that a rank has: a contiguous range of each dimension."""

    offsets: tuple[int, ...]
    """Position of its first element in the whole tensor."""
    shape: torch.Size
    whole_shape: torch.Size
    num_holders: int = 1
    """Ranks of the tensor axis that have this part."""
    has_partial_gradient: bool = False
    """True if the gradient is the sum over the ranks of the tensor axis that have this part."""

    @staticmethod
    def whole(shape: torch.Size, num_holders: int = 1, *, has_partial_gradient: bool = False) -> Shard:
        """All of a tensor."""
        return Shard((0,) * len(shape), shape, shape, num_holders, has_partial_gradient)

    @staticmethod
    def rows(whole_shape: torch.Size, start: int, end: int) -> Shard:
        """Rows ``start`` to ``end``, exclusive, of a tensor."""
        return Shard((start, *(0 for _ in whole_shape[1:])), torch.Size((end - start, *whole_shape[1:])), whole_shape)

    @property
    def is_whole(self) -> bool:
        return self.shape == self.whole_shape

    def select(self, whole: Tensor) -> Tensor:
        """View this part of a whole tensor."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.shape, strict=True)):
            whole = whole.narrow(dim, offset, size)
        return whole


@dataclass(frozen=True)
class Mesh:
    """The axes of a run, as one rank sees them."""

    tensor: Axis = Axis()
    """Ranks that divide matrices."""
    context: Axis = Axis()
    """Ranks that divide sequences."""
    expert: Axis = Axis()
    """Ranks that divide experts; they load different sequences."""
    replicas: Axis = Axis()
    """Ranks of all data, experts and contexts: they have equal parameters, but for experts, and sum gradients."""
    expert_replicas: Axis = Axis()
    """Ranks of all data and contexts: they have the same experts."""

    @property
    def is_divided(self) -> bool:
        """True if anything but the data is divided, so that a forward needs several ranks."""
        return max(self.tensor.size, self.context.size, self.expert.size) > 1

    @property
    def num_data_copies(self) -> int:
        """Neighboring ranks that load the same sequences."""
        return self.tensor.size * self.context.size


def build_mesh(sizes: tuple[int, int, int, int], rank: int, timeout_seconds: float) -> Mesh:
    """Create the process groups of a mesh. All ranks call this.

    Args:
        sizes: data, expert, context, tensor; their product is the number of ranks.
    """

    def coordinates(rank: int) -> tuple[int, ...]:
        place = []
        for size in reversed(sizes):
            rank, index = divmod(rank, size)
            place.append(index)
        return tuple(reversed(place))

    def build_axis(*varied: int) -> Axis:
        """The axis of the ranks that differ in these coordinates; each rank creates the groups of all."""

        def fixed(rank: int) -> tuple[int, ...]:
            return tuple(index for axis, index in enumerate(coordinates(rank)) if axis not in varied)

        return _join_group(math.prod(sizes), rank, fixed, timeout_seconds)

    return Mesh(
        tensor=build_axis(3),
        context=build_axis(2),
        expert=build_axis(1),
        replicas=build_axis(0, 1, 2),
        expert_replicas=build_axis(0, 2),
    )


def _join_group(num_ranks: int, own_rank: int, key: Callable[[int], object], timeout_seconds: float) -> Axis:
    """Create a group for each value of ``key``, and return this rank's."""
    members: dict[object, list[int]] = {}
    for rank in range(num_ranks):
        members.setdefault(key(rank), []).append(rank)
    own = members[key(own_rank)]
    if len(own) == 1:
        return Axis()
    timeout = timedelta(seconds=timeout_seconds)
    groups = {value: dist.new_group(ranks, timeout=timeout) for value, ranks in members.items()}
    return Axis(len(own), own.index(own_rank), groups[key(own_rank)])
