"""Share independent computations among the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ddp.process_group import SINGLE_PROCESS, World

T = TypeVar("T")


@dataclass(frozen=True)
class MapOverRanks:
    """Computes a function of 0 ... count - 1: each rank takes every ``world.data_size``-th, and all ranks get
    all results."""

    world: World = SINGLE_PROCESS
    is_collective: bool = False
    """True if the function needs all ranks at once, as a forward under FSDP does. Then all ranks call it equally often,
    also after an error; results beyond ``count`` are dropped."""

    def __call__(self, count: int, function: Callable[[int], T]) -> list[T]:
        """Results in order.

        Raises:
            ValueError: ``function`` raised one, on any rank.
        """
        results = self.world.run_on_all(lambda: self._compute_own(count, function))
        results_of_ranks, size = results[:: self.world.mesh.num_data_copies], self.world.data_size
        return [results_of_ranks[index % size][index // size] for index in range(count)]

    def _compute_own(self, count: int, function: Callable[[int], T]) -> list[T]:
        results: list[T] = []
        first_error: ValueError | None = None
        size = self.world.data_size
        end = -(-count // size) * size if self.is_collective else count
        for index in range(self.world.data_rank, end, size):
            try:
                results.append(function(min(index, count - 1)))
            except ValueError as error:
                if not self.is_collective:
                    raise
                first_error = first_error or error
        if first_error is not None:
            raise first_error
        return results


SINGLE_PROCESS_MAP = MapOverRanks()
"""Computes everything in this process."""
