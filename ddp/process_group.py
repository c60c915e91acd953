"""The process group of a run, and collectives of host values."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from config.training.parallel import DDP, FSDP, MultiProcessOptions, Parallel, SingleProcess
from ddp.mesh import Axis, Mesh, build_mesh

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

HEARTBEAT_SECONDS = 1.0
"""Time between two heartbeats of a rank that the others wait for."""


class LostRankError(RuntimeError):
    """A rank died or did not answer in time."""


@dataclass(frozen=True)
class World:
    """This process's rank and the size of the process group.

    The collectives here, but for `all_reduce_on_device`, exchange host values over gloo, also where tensors on GPUs use
    NCCL, so they never wait for a GPU. Every rank makes the same calls in the same order.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Rank among the processes on this machine."""
    timeout_seconds: float = 600.0
    """Limit of a collective, and of the silence of the rank that the others wait for."""
    group: dist.ProcessGroup | None = None
    """The group of all collectives but those of `run_on_first`. None: the run's."""
    mesh: Mesh = field(default_factory=Mesh)
    """What else is divided over the ranks, beside the data."""

    @property
    def data_rank(self) -> int:
        """Rank among those that load different sequences."""
        return self.rank // self.mesh.num_data_copies

    @property
    def data_size(self) -> int:
        """Number of ranks that load different sequences."""
        return self.size // self.mesh.num_data_copies

    def with_mesh(self, parallel: Parallel) -> World:
        """The same ranks with the groups of their mesh. All ranks call this.

        Raises:
            ValueError: the mesh does not divide the ranks; names the keys.
        """
        if not isinstance(parallel, MultiProcessOptions) or not parallel.is_divided:
            return self
        parallel.check_ranks(self.size)
        sizes = (self.size // parallel.ranks_of_model, parallel.expert, parallel.context, parallel.tensor)
        return replace(self, mesh=build_mesh(sizes, self.rank, self.timeout_seconds))

    def along(self, axis: Axis) -> World:
        """The ranks of an axis as a world of their own, with collectives on the device."""
        return replace(self, rank=axis.rank, size=axis.size, group=axis.group, mesh=Mesh())

    @property
    def is_first(self) -> bool:
        """True on rank 0, which logs and writes shared files."""
        return self.rank == 0

    @property
    def is_single_process(self) -> bool:
        return self.size == 1

    def sum(self, *values: float) -> list[float]:
        """Sum each value over the ranks, in float64 and in rank order, so all ranks get bit-equal results."""
        if self.is_single_process:
            return list(values)
        own = torch.tensor(values, dtype=torch.float64)
        of_ranks = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(of_ranks, own, group=self.group)
        total = of_ranks[0]
        for rank_values in of_ranks[1:]:
            total += rank_values
        return total.tolist()

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.sum(0.0)

    def all_gather_objects(self, value: T) -> list[T]:
        """Gather a picklable value from each rank, in rank order."""
        if self.is_single_process:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]

    def all_reduce_on_device(self, values: Tensor) -> Tensor:
        """Sum a small tensor over all ranks, in place and on its device, and return it. The host does not wait."""
        if not self.is_single_process:
            dist.all_reduce(values, group=self.group)
        return values

    def broadcast_on_device(self, values: Tensor) -> Tensor:
        """Replace a tensor by that of the first rank, in place and on its device, and return it."""
        dist.broadcast(values, group_src=0, group=self.group)
        return values

    def run_on_first(self, function: Callable[[], T]) -> T:
        """Call ``function`` on rank 0 and broadcast its result, pickled, to all ranks.

        The function may take any time: the broadcast, which has a limit, begins when it has returned. Until then the
        other ranks wait on the store of the process group, as long as rank 0 lives.

        Raises:
            Exception: ``function`` raised it, on rank 0.
            ValueError: it raised on rank 0; on the other ranks, with the same text.
            RuntimeError: rank 0 died, or it has been silent for `timeout_seconds`.
        """
        if self.is_single_process:
            return function()
        message: list[tuple[T | None, str | None]] = [(None, None)]
        store = dist.distributed_c10d._get_default_store()
        key = f"run_on_first/call-{store.add(f'run_on_first/calls-{self.rank}', 1)}"
        if self.is_first:
            try:
                with _heartbeat(store, key):
                    message = [(function(), None)]
            except Exception as error:
                dist.broadcast_object_list([(None, _error_text(error))], src=0)
                raise
        else:
            _wait_for_heartbeat_to_end(store, key, self.timeout_seconds)
        dist.broadcast_object_list(message, src=0)
        result, problem = message[0]
        if problem is not None:
            raise ValueError(problem)
        return result  # type: ignore[return-value]

    def run_on_all(
        self,
        function: Callable[[], T],
        describe: Callable[[Exception], str] | None = None,
    ) -> list[T]:
        """Call ``function`` on every rank and gather the results, pickled, in rank order.

        Args:
            describe: turns an exception into the text that all ranks see; by default its message, with its type unless
                it is a ValueError.

        Raises:
            ValueError: ``function`` raised on one rank or several; on every rank, naming them. A rank's own exception
                is the cause.
            LostRankError: another rank died or did not answer within the group's timeout.
            Exception: the world has a single process, whose exception is passed on.
        """
        if self.is_single_process:
            return [function()]
        outcome: tuple[T | None, str | None]
        own_error: Exception | None = None
        try:
            outcome = (function(), None)
        except Exception as error:
            own_error, outcome = error, (None, (describe or _error_text)(error))
        outcomes: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(outcomes, outcome, group=self.group)
        except RuntimeError as error:
            raise LostRankError(f"a rank died or hangs ({error})") from own_error or error
        problems = [problem for _, problem in outcomes]
        if any(problem is not None for problem in problems):
            raise ValueError(_combine_errors(problems)) from own_error
        return [result for result, _ in outcomes]

    def all_agree(self, function: Callable[[], T]) -> T:
        """Call ``function`` on every rank and return this rank's result, which may be anything, also a tensor.

        Raises:
            ValueError, LostRankError, Exception: as `run_on_all`.
        """
        results: list[T] = []
        self.run_on_all(lambda: results.append(function()))
        return results[0]

    def with_own_group(self) -> World:
        """The same ranks with a gloo group of their own, in which a thread talks while training continues. All ranks
        call this at the same point, and `close_group` at the end."""
        if self.is_single_process:
            return self
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_seconds))
        assert isinstance(group, dist.ProcessGroup), "all ranks of the run are in it"
        return replace(self, group=group)

    def close_group(self) -> None:
        """Destroy the group of `with_own_group`."""
        if self.group is not None:
            dist.destroy_process_group(self.group)


SINGLE_PROCESS = World()


@contextmanager
def _heartbeat(store: Store, key: str) -> Iterator[None]:
    """Count up ``key``/beats in the store from a thread during the block, and set ``key`` at its end."""
    is_done = threading.Event()

    def beat() -> None:
        while not is_done.wait(HEARTBEAT_SECONDS):
            store.add(f"{key}/beats", 1)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
        store.set(key, "done")


def _wait_for_heartbeat_to_end(store: Store, key: str, timeout_seconds: float) -> None:
    """Wait until `_heartbeat` has set ``key``.

    Raises:
        RuntimeError: there was no heartbeat for ``timeout_seconds``, or the store is gone.
    """
    beats, last_beat, pause = 0, time.monotonic(), 0.001
    while not store.check([key]):  # `wait` would log a warning at each timeout
        previous, beats = beats, store.add(f"{key}/beats", 0)
        if beats != previous:
            last_beat = time.monotonic()
        elif time.monotonic() > last_beat + timeout_seconds:
            raise RuntimeError(
                f"rank 0 has been silent for {timeout_seconds:g} s: it has died or hangs; its output says more, and "
                "parallel.timeout_seconds is the limit"
            )
        time.sleep(pause)
        pause = min(2 * pause, HEARTBEAT_SECONDS)


def _error_text(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def _combine_errors(problems: list[str | None]) -> str:
    """Join the ranks' errors; one that all ranks share appears once."""
    if len(set(problems)) == 1:
        return f"all ranks: {problems[0]}"
    return "; ".join(f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem is not None)


def read_torchrun_environment() -> tuple[int, int, int] | None:
    """Return rank, world size and local rank from torchrun's variables; None: torchrun did not start this process.

    Raises:
        ValueError: a variable is not a number; names it.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank, world_size, local_rank = (_read_integer(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return rank, world_size, local_rank


def _read_integer(name: str) -> int:
    value = os.environ.get(name, "0")
    if not value.isdecimal():
        raise ValueError(f"environment variable {name} = {value!r} is not a number: unset it, or start with torchrun")
    return int(value)


@contextmanager
def process_group(parallel: Parallel, device_type: str) -> Iterator[World]:
    """Create the process group of the run for the duration of the block.

    On CUDA the rank's GPU becomes the current device. A rank that fails does not wait for pending collectives; the
    other ranks see the closed connection.

    Args:
        device_type: ``cuda`` or ``cpu``.

    Raises:
        ValueError: the strategy does not fit the way this process was started, NCCL without CUDA, or more ranks on this
            machine than GPUs; names the key.
    """
    environment = read_torchrun_environment()
    if isinstance(parallel, SingleProcess):
        if environment is not None and environment[1] > 1:
            raise ValueError(
                f'parallel.strategy = "single" under torchrun with {environment[1]} ranks, which would train '
                'separately: set parallel.strategy = "ddp" or "fsdp", or start one process with diffusionlm-train'
            )
        yield SINGLE_PROCESS
        return
    if environment is None:
        raise ValueError(
            f'parallel.strategy = "{parallel.strategy}" in a single process: start with diffusionlm-train-ddp or '
            'torchrun, or set parallel.strategy = "single"'
        )
    world = World(*environment, parallel.timeout_seconds)
    backend = _backend(parallel, device_type)
    if device_type == "cuda":
        gpus = torch.cuda.device_count()
        if world.local_rank >= gpus:
            raise ValueError(
                f"rank {world.rank} has local rank {world.local_rank}, but this machine has {gpus} GPUs: set "
                f"parallel.local_ranks (torchrun: --nproc-per-node) to {gpus} at most"
            )
        torch.cuda.set_device(world.local_rank)
    timeout = timedelta(seconds=parallel.timeout_seconds)
    # With a device NCCL connects the ranks here, not in the first step, and its errors appear here.
    device = torch.device("cuda", world.local_rank) if backend.endswith("nccl") else None
    dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=timeout, device_id=device)
    # Not in a `finally`: destroying the group waits for pending collectives, which never end after a failure.
    yield world
    world.barrier()
    dist.destroy_process_group()


def _backend(parallel: DDP | FSDP, device_type: str) -> str:
    """Return torch's backend string; host values always use gloo."""
    if device_type != "cuda":
        if parallel.backend == "nccl":
            raise ValueError(
                f'parallel.backend = "nccl" needs GPUs, but the run is on {device_type}: set it to "auto" or "gloo"'
            )
        return "gloo"
    return f"cpu:gloo,cuda:{'nccl' if parallel.backend == 'auto' else parallel.backend}"
