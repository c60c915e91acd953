"""Coordinate the ranks that write one checkpoint: results and errors are gathered on all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from ddp.process_group import SINGLE_PROCESS, World

T = TypeVar("T")


@dataclass(frozen=True)
class SaveCoordinator:
    """The ranks of a run with a gloo group of their own, so that a thread can communicate while training continues."""

    world: World = SINGLE_PROCESS
    group: dist.ProcessGroup | None = None

    @staticmethod
    def join(world: World, timeout_seconds: float) -> SaveCoordinator:
        """Create the group. All ranks call this at the same point.

        Args:
            timeout_seconds: how long a rank waits for another one, which may have a large shard to write. A rank that
                dies is noticed at once.
        """
        if world.is_single_process:
            return SaveCoordinator()
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        assert isinstance(group, dist.ProcessGroup), "all ranks of the run are in it"
        return SaveCoordinator(world, group)

    def close(self) -> None:
        """Destroy the process group."""
        if self.group is not None:
            dist.destroy_process_group(self.group)

    def gather_results(self, function: Callable[[], T], describe: Callable[[Exception], str] | None = None) -> list[T]:
        """Call ``function`` on every rank and gather the results, as `World.run_on_all` does.

        Raises:
            ValueError: it raised on one rank or several, or a rank died or hangs; on every rank, with the same text.
            Exception: it raised that, and the world has a single process.
        """
        if self.group is None:
            return [function()]
        try:
            return self.world.run_on_all(function, describe, self.group)
        except RuntimeError as error:  # not fatal: the run continues and fails at its next collective
            raise ValueError(str(error)) from error.__cause__


SINGLE_PROCESS_COORDINATOR = SaveCoordinator()
