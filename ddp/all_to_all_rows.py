"""Matrices whose rows are spread over ranks, brought together: each whole on one rank, and back.

Shapes: R rows of a whole matrix, C columns; rank r of W has the rows from r * ceil(R / W) on, ceil(R / W) of them or as
many as are left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.process_group import World


def row_range_of_rank(total: int, world_size: int, rank: int) -> tuple[int, int]:
    """First row of a rank and the one after its last, of ``total`` rows; as `torch.chunk` and DTensor cut them."""
    each = -(-total // world_size)
    return min(rank * each, total), min((rank + 1) * each, total)


class AllToAllRows:
    """What an optimizer needs that updates whole matrices and has parts of them; see `__call__`."""

    def __init__(self, shapes: Mapping[Tensor, torch.Size], world: World) -> None:
        """``shapes``: of the whole matrices, by the parameter that has this rank's rows."""
        self.shapes = shapes
        self.world = world

    def whole_shape(self, part: Tensor) -> torch.Size:
        """Of the matrix that a parameter has rows of."""
        return self.shapes[part]

    def __call__(
        self, parts: list[Tensor], rows: list[Tensor], function: Callable[[list[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        """Put the rows of all ranks together, function on whole matrices, each on one rank, and give rows of the results.

        All ranks call it for the same matrices, also those that have no row of some. A rank sends and gets about 1 / W
        of all numbers, twice.

        Args:
            parts: parameters, by which the shapes of the matrices are known.
            rows: what this rank has of each matrix, [some of R, C], of one dtype.
            function: is given the whole matrices of this rank, and gives back as many, of the same shapes and dtype.
        """
        if not parts:
            return []
        shapes = [self.shapes[part] for part in parts]
        by_owner = self._assign_owners(shapes)
        mine = by_owner[self.world.rank]
        # What each rank owns goes there, in the order of ranks; what comes is, by rank, its rows of what is owned here.
        sent = [rows[index] for owned in by_owner for index in owned]
        counts = [sum(rows[index].numel() for index in owned) for owned in by_owner]
        ranges = [
            [row_range_of_rank(shapes[i][0], self.world.size, rank) for i in mine] for rank in range(len(by_owner))
        ]
        pieces = [[(end - start, shapes[i][1]) for i, (start, end) in zip(mine, each, strict=True)] for each in ranges]
        own_counts = [sum(height * width for height, width in each) for each in pieces]
        came = _all_to_all(sent, counts, own_counts, rows[0])
        found = _split_flat(came, [shape for each in pieces for shape in each])
        matrices = [torch.cat(found[place :: len(mine)]) for place in range(len(mine))]
        results = function(matrices) if matrices else []
        back = [result[start:end] for each in ranges for result, (start, end) in zip(results, each, strict=True)]
        updates = _split_flat(_all_to_all(back, own_counts, counts, rows[0]), [each.shape for each in sent])
        places = [index for owned in by_owner for index in owned]
        given = dict(zip(places, updates, strict=True))
        return [given[index] for index in range(len(parts))]

    def _assign_owners(self, shapes: list[torch.Size]) -> list[list[int]]:
        """Places of the matrices that each rank owns: the dearest first, each to the rank with the least work."""
        work = [0] * self.world.size
        owned: list[list[int]] = [[] for _ in work]
        costs = [rows * columns * min(rows, columns) for rows, columns in shapes]
        for index in sorted(range(len(shapes)), key=lambda index: -costs[index]):
            owner = work.index(min(work))
            work[owner] += costs[index]
            owned[owner].append(index)
        return owned


def _all_to_all(tensors: list[Tensor], sent: list[int], received: list[int], like: Tensor) -> Tensor:
    """The numbers of all tensors, ``sent`` of them to each rank, for ``received`` from it; of the dtype of ``like``."""
    buffer = torch.cat([each.flatten() for each in tensors]) if tensors else like.new_empty(0)
    came = like.new_empty(sum(received))
    dist.all_to_all_single(came, buffer, received, sent)
    return came


def _split_flat(flat: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """A row of numbers as tensors, one after the other."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [piece.view(shape) for piece, shape in zip(torch.split(flat, sizes), shapes, strict=True)]
