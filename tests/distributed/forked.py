"""Real ranks in a fraction of a second: children of this process, which has imported torch already, joined by gloo."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NoReturn, TypeVar, cast

# Imported here, once, and not by each child: they take seconds. Optimizers import the compiler.
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
from torch._C._distributed_c10d import FileStore

from ddp.process_group import World

# The first backward of a process, before any test compiles: torch.compile before it would make it start autograd's
# threads, after which no forked child could run a backward.
torch.ones((), requires_grad=True).backward()

T = TypeVar("T")


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    exit_code: int
    """As of `subprocess`: -6 for SIGABRT."""
    result: Any
    """What ``act`` returned."""
    error: str
    """The traceback, where it raised."""


def run_ranks(act: Callable[[World], T], tmp_path: Path, world_size: int = 2, timeout: float = 60) -> list[T]:
    """What ``act`` returned on each rank; AssertionError with the tracebacks where it raised on one.

    ``act`` may be a closure: the children are copies of this process. What it returns comes back by pickle. ``timeout``
    is that of collectives, in seconds; children that take longer than that and ten seconds are killed.
    """
    ended = end_ranks(act, tmp_path, world_size, timeout)
    failed = [
        f"rank {rank} (exit code {ending.exit_code}):\n{ending.error}"
        for rank, ending in enumerate(ended)
        if ending.exit_code
    ]
    if failed:
        raise AssertionError("\n".join(failed))
    return [ending.result for ending in ended]


def end_ranks(act: Callable[[World], Any], tmp_path: Path, world_size: int = 2, timeout: float = 60) -> list[Ended]:
    """How each rank ended, which may die in ``act``."""
    context, meeting = get_context("fork"), Path(mkdtemp(dir=tmp_path)) / "store"
    children: list[tuple[ForkProcess, Connection]] = []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_live, args=(act, World(rank, world_size, rank), meeting, timeout, sender))
        process.start()
        sender.close()
        children.append((process, receiver))
    deadline, results = time.monotonic() + timeout + 10, []
    for _, receiver in children:
        message = pickle.dumps((None, "it said nothing"))
        with suppress(EOFError):
            if receiver.poll(max(0.0, deadline - time.monotonic())):
                message = receiver.recv_bytes()
        results.append(pickle.loads(message))
    ended = []
    for (process, receiver), (result, error) in zip(children, results, strict=True):
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
        receiver.close()
        ended.append(Ended(cast("int", process.exitcode), result, error))
    return ended


def _live(act: Callable[[World], Any], world: World, meeting: Path, timeout: float, sender: Connection) -> NoReturn:
    """The life of a child, which must not come back into the tests."""
    code = 1
    faulthandler.disable()  # a child that aborts is expected to
    gc.freeze()  # else it would collect process groups of earlier tests, and wait for their threads, which it has not
    torch.set_num_threads(1)
    try:
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = FileStore(str(meeting), world.size)
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=limit)
        message = pickle.dumps((act(world), ""))  # not `send`: torch would send tensors by shared memory
        code = 0
    except BaseException:
        message = pickle.dumps((None, traceback.format_exc()))
    try:
        sender.send_bytes(message)
        if code == 0 and dist.is_initialized():
            dist.barrier()  # nobody leaves while another still talks
    finally:
        os._exit(code)
