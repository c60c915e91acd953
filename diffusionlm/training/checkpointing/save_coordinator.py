"""The ranks that write one checkpoint together, and how each knows what became of it on the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from ddp.process_group import SINGLE_PROCESS, World

T = TypeVar("T")


@dataclass(frozen=True)
class SaveCoordinator:
    """Ranks with a process group that nobody else uses, so that a thread may talk there while training goes on."""

    world: World = SINGLE_PROCESS
    group: dist.ProcessGroup | None = None

    @staticmethod
    def join(world: World, timeout_seconds: float) -> SaveCoordinator:
        """Every rank calls this, at the same place; one alone joins nobody.

        Args:
            ranks: those of the run.
            timeout_seconds: how long one waits for another, who may have a large model to write. A rank that dies is
                noticed at once.
        """
        if world.is_single_process:
            return SaveCoordinator()
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        assert isinstance(group, dist.ProcessGroup), "all ranks of the run are in it"
        return SaveCoordinator(world, group)

    def close(self) -> None:
        """Give the group back."""
        if self.group is not None:
            dist.destroy_process_group(self.group)

    def gather_results(self, function: Callable[[], T], describe: Callable[[Exception], str] = str) -> list[T]:
        """What ``act`` returns on each rank, sent by pickle to all.

        Raises:
            ValueError: it raised on one rank or several, or one is gone; on every rank, with the same text, which
                ``describe`` makes where it happened. There, what was raised is its cause.
            Exception: it raised that, and this rank is alone.
        """
        if self.group is None:
            return [function()]
        mine: Exception | None = None
        told: tuple[T | None, str | None] = (None, None)
        try:
            told = (function(), None)
        except Exception as error:
            mine, told = error, (None, describe(error))
        gathered: list[Any] = [None] * self.world.world_size
        try:
            dist.all_gather_object(gathered, told, group=self.group)
        except RuntimeError as error:
            raise ValueError(f"a rank is gone or hangs ({error})") from mine or error
        problems = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(gathered) if problem is not None]
        if problems:
            raise ValueError("; ".join(problems)) from mine
        return [result for result, _ in gathered]


SINGLE_PROCESS_COORDINATOR = SaveCoordinator()
