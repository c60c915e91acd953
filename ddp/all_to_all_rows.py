"""Matrices sharded by rows: which rows a rank has, and an all-to-all that makes each matrix whole on one rank.

Shapes: R rows of a whole matrix, C columns, W ranks. Rank r has the rows from r * ceil(R / W) on, ceil(R / W) of them
or as many as are left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.process_group import World


def row_range_of_rank(num_rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return a rank's first row and the one after its last, as `torch.chunk` and DTensor's ``Shard(0)`` cut them."""
    rows_per_rank = -(-num_rows // world_size)
    return min(rank * rows_per_rank, num_rows), min((rank + 1) * rows_per_rank, num_rows)


class AllToAllRows:
    """Applies a function to whole matrices whose rows are spread over the ranks. For optimizers such as Muon."""

    def __init__(self, shapes: Mapping[Tensor, torch.Size], world: World) -> None:
        """``shapes``: the shape of the whole matrix, by the parameter that holds this rank's rows of it."""
        self.shapes = shapes
        self.world = world

    def __call__(
        self, parameters: list[Tensor], rows: list[Tensor], function: Callable[[list[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        """Gather each matrix on one rank, apply ``function`` there and scatter the rows of the results.

        Every rank calls this for the same matrices, in the same order, also a rank that has no row of some. A rank
        sends and receives about 1 / W of all elements, twice.

        Args:
            parameters: name the matrices, by their keys in ``shapes``.
            rows: this rank's rows of each matrix, [its rows, C], all of one dtype.
            function: maps the whole matrices of this rank to results of the same shapes and dtype.
        """
        if not parameters:
            return []
        shapes = [self.shapes[parameter] for parameter in parameters]
        indices_by_owner = self._assign_owners(shapes)
        own_indices = indices_by_owner[self.world.rank]
        # A rank sends its rows of each matrix to the owner, in rank order, and gets every rank's rows of its matrices.
        send_order = [index for indices in indices_by_owner for index in indices]
        sent = [rows[index] for index in send_order]
        send_counts = [sum(rows[index].numel() for index in indices) for indices in indices_by_owner]
        row_ranges = [
            [row_range_of_rank(shapes[index][0], self.world.size, rank) for index in own_indices]
            for rank in range(self.world.size)
        ]
        piece_shapes = [
            [(end - start, shapes[index][1]) for index, (start, end) in zip(own_indices, ranges, strict=True)]
            for ranges in row_ranges
        ]
        receive_counts = [sum(height * width for height, width in pieces) for pieces in piece_shapes]
        received = self._all_to_all(sent, send_counts, receive_counts, rows[0])
        pieces = _split_flat(received, [shape for shapes_of_rank in piece_shapes for shape in shapes_of_rank])
        matrices = [torch.cat(pieces[offset :: len(own_indices)]) for offset in range(len(own_indices))]
        results = function(matrices) if matrices else []
        returned = [
            result[start:end] for ranges in row_ranges for result, (start, end) in zip(results, ranges, strict=True)
        ]
        flat_updates = self._all_to_all(returned, receive_counts, send_counts, rows[0])
        updates = dict(zip(send_order, _split_flat(flat_updates, [piece.shape for piece in sent]), strict=True))
        return [updates[index] for index in range(len(parameters))]

    def _all_to_all(
        self, tensors: list[Tensor], send_counts: list[int], receive_counts: list[int], like: Tensor
    ) -> Tensor:
        """Exchange the elements of all tensors; counts are by rank. Returns a flat tensor of the dtype of ``like``."""
        sent = torch.cat([tensor.flatten() for tensor in tensors]) if tensors else like.new_empty(0)
        received = like.new_empty(sum(receive_counts))
        dist.all_to_all_single(received, sent, receive_counts, send_counts, group=self.world.group)
        return received

    def _assign_owners(self, shapes: list[torch.Size]) -> list[list[int]]:
        """Return each rank's matrices, as indices: the most expensive first, each to the rank with the least work."""
        work = [0] * self.world.size
        indices_by_owner: list[list[int]] = [[] for _ in work]
        costs = [rows * columns * min(rows, columns) for rows, columns in shapes]
        for index in sorted(range(len(shapes)), key=lambda index: -costs[index]):
            owner = work.index(min(work))
            work[owner] += costs[index]
            indices_by_owner[owner].append(index)
        return indices_by_owner


def _split_flat(flat: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Cut a flat tensor into consecutive tensors of these shapes."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [piece.view(shape) for piece, shape in zip(torch.split(flat, sizes), shapes, strict=True)]
