"""Divided matrices: which rows a rank has, and an all-to-all that makes each matrix whole on one rank.

Shapes: R rows of a whole matrix, C columns, W ranks. Rank r has the rows from r * ceil(R / W) on, ceil(R / W) of them
or as many as are left; or the `Shard` of tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ddp.mesh import Axis, Shard


def row_range_of_rank(num_rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return a rank's first row and the one after its last, as `torch.chunk` and DTensor's ``Shard(0)`` cut them."""
    rows_per_rank = -(-num_rows // world_size)
    return min(rank * rows_per_rank, num_rows), min((rank + 1) * rows_per_rank, num_rows)


class AllToAllRows:
    """Applies a function to whole matrices whose rows are spread over the ranks. For optimizers such as Muon."""

    def __init__(self, shapes: Mapping[Tensor, torch.Size], axis: Axis) -> None:
        """
        Args:
            shapes: the shape of the whole matrix, by the parameter that holds this rank's rows of it.
            axis: the ranks that have the rows.
        """
        self.shapes = shapes
        self.axis = axis

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
        own = [parameters[index] for index in indices_by_owner[self.axis.rank]]
        # A rank sends its rows of each matrix to the owner, in rank order, and gets every rank's rows of its matrices.
        send_order = [index for indices in indices_by_owner for index in indices]
        sent = [rows[index] for index in send_order]
        send_counts = [sum(rows[index].numel() for index in indices) for indices in indices_by_owner]
        piece_shapes = [[self._piece_shape(parameter, rank) for parameter in own] for rank in range(self.axis.size)]
        receive_counts = [sum(height * width for height, width in pieces) for pieces in piece_shapes]
        received = self._all_to_all(sent, send_counts, receive_counts, rows[0])
        pieces = _split_flat(received, [shape for shapes_of_rank in piece_shapes for shape in shapes_of_rank])
        matrices = [self._join(parameter, pieces[offset :: len(own)]) for offset, parameter in enumerate(own)]
        results = function(matrices) if matrices else []
        cut = [self._cut(parameter, result) for parameter, result in zip(own, results, strict=True)]
        returned = [pieces_of_matrix[rank] for rank in range(self.axis.size) for pieces_of_matrix in cut]
        flat_updates = self._all_to_all(returned, receive_counts, send_counts, rows[0])
        updates = dict(zip(send_order, _split_flat(flat_updates, [piece.shape for piece in sent]), strict=True))
        return [updates[index] for index in range(len(parameters))]

    def _assign_owners(self, shapes: list[torch.Size]) -> list[list[int]]:
        """Return each rank's matrices, as indices: the most expensive first, each to the rank with the least work."""
        work = [0] * self.axis.size
        indices_by_owner: list[list[int]] = [[] for _ in work]
        costs = [rows * columns * min(rows, columns) for rows, columns in shapes]
        for index in sorted(range(len(shapes)), key=lambda index: -costs[index]):
            owner = work.index(min(work))
            work[owner] += costs[index]
            indices_by_owner[owner].append(index)
        return indices_by_owner

    def _piece_shape(self, parameter: Tensor, rank: int) -> tuple[int, int]:
        """Rows and columns that a rank has of a matrix."""
        num_rows, num_columns = self.shapes[parameter]
        start, end = row_range_of_rank(num_rows, self.axis.size, rank)
        return end - start, num_columns

    def _join(self, parameter: Tensor, pieces: list[Tensor]) -> Tensor:
        """Make a matrix whole from the pieces of all ranks."""
        return torch.cat(pieces)

    def _cut(self, parameter: Tensor, matrix: Tensor) -> list[Tensor]:
        """Cut a whole matrix into the pieces of all ranks."""
        return list(torch.split(matrix, [self._piece_shape(parameter, rank)[0] for rank in range(self.axis.size)]))

    def _all_to_all(
        self, tensors: list[Tensor], send_counts: list[int], receive_counts: list[int], like: Tensor
    ) -> Tensor:
        """Exchange the elements of all tensors; counts are by rank. Returns a flat tensor of the dtype of ``like``."""
        sent = torch.cat([tensor.flatten() for tensor in tensors]) if tensors else like.new_empty(0)
        received = like.new_empty(sum(receive_counts))
        dist.all_to_all_single(received, sent, receive_counts, send_counts, group=self.axis.group)
        return received


class TensorMatrixExchange(AllToAllRows):
    """Applies a function to whole matrices that tensor parallelism has divided by rows or columns.

    Every rank computes those that it has whole, and sends nothing.
    """

    def __init__(self, shards: Mapping[Tensor, Shard], axis: Axis) -> None:
        """``shards``: the part of each matrix that a parameter holds. Rows behind it are padding."""
        super().__init__({parameter: shard.whole_shape for parameter, shard in shards.items()}, axis)
        self._shards = shards

    def __call__(
        self, parameters: list[Tensor], rows: list[Tensor], function: Callable[[list[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        """The same for ``rows`` of the shapes of the parameters. Padding of the results is zero."""
        is_whole = [self._shards[parameter].shape == self.shapes[parameter] for parameter in parameters]
        whole = [index for index, value in enumerate(is_whole) if value]
        divided = [index for index, value in enumerate(is_whole) if not value]
        results = function([rows[index] for index in whole]) if whole else []
        results += super().__call__(
            [parameters[index] for index in divided], [rows[index] for index in divided], function
        )
        by_index = dict(zip(whole + divided, results, strict=True))
        return [by_index[index] for index in range(len(parameters))]

    def _piece_shape(self, parameter: Tensor, rank: int) -> tuple[int, int]:
        """The same on all ranks."""
        num_rows, num_columns = parameter.shape
        return num_rows, num_columns

    def _divided_dim(self, parameter: Tensor) -> int:
        shard = self._shards[parameter]
        return int(shard.shape[0] == shard.whole_shape[0])

    def _join(self, parameter: Tensor, pieces: list[Tensor]) -> Tensor:
        shard, dim = self._shards[parameter], self._divided_dim(parameter)
        return torch.cat(pieces[:: shard.num_holders], dim).narrow(dim, 0, shard.whole_shape[dim])

    def _cut(self, parameter: Tensor, matrix: Tensor) -> list[Tensor]:
        dim, num_holders = self._divided_dim(parameter), self._shards[parameter].num_holders
        size = parameter.shape[dim]
        padding = size * self.axis.size // num_holders - matrix.shape[dim]
        padded = F.pad(matrix, (0, padding) if dim else (0, 0, 0, padding))
        return [piece for piece in torch.split(padded, size, dim) for _ in range(num_holders)]


def _split_flat(flat: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Cut a flat tensor into consecutive tensors of these shapes."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [piece.view(shape) for piece, shape in zip(torch.split(flat, sizes), shapes, strict=True)]
