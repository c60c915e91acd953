"""Real ranks in a fraction of a second: children of this process, which has imported torch already, joined by gloo."""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NoReturn, TypeVar

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


def spawn_ranks(act: Callable[[World], Any], tmp_path: Path, world_size: int = 2, timeout: float = 60) -> list[int]:
    """Exit codes of ranks that may die in ``act``: 0, 1 after an exception, or minus the signal."""
    return [ending.exit_code for ending in end_ranks(act, tmp_path, world_size, timeout)]


def end_ranks(act: Callable[[World], Any], tmp_path: Path, world_size: int = 2, timeout: float = 60) -> list[Ended]:
    """How each rank ended."""
    meeting = Path(mkdtemp(dir=tmp_path)) / "store"
    sys.stdout.flush()
    sys.stderr.flush()
    children: dict[int, int] = {}  # read end of the pipe -> process
    for rank in range(world_size):
        reader, writer = os.pipe()
        process = os.fork()
        if not process:
            os.close(reader)
            _live(act, World(rank, world_size, rank), meeting, timeout, writer)
        os.close(writer)
        children[reader] = process
    sent: dict[int, bytes] = {}
    try:
        sent = _read_all(list(children), time.monotonic() + timeout + 10)
    finally:
        for reader, process in children.items():
            os.close(reader)
            if reader not in sent:
                os.kill(process, signal.SIGKILL)
    ended = []
    for reader, process in children.items():
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        result, error = pickle.loads(sent[reader]) if sent.get(reader) else (None, "it said nothing")
        ended.append(Ended(code, result, error))
    return ended


def _live(act: Callable[[World], Any], world: World, meeting: Path, timeout: float, writer: int) -> NoReturn:
    """The life of a child, which must not come back into the tests."""
    code = 1
    faulthandler.disable()  # a child that aborts is expected to
    torch.set_num_threads(1)
    try:
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = FileStore(str(meeting), world.size)
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=limit)
        sent = pickle.dumps((act(world), ""))
        code = 0
    except BaseException:
        sent = pickle.dumps((None, traceback.format_exc()))
    try:
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(sent)
        if code == 0 and dist.is_initialized():
            dist.barrier()  # nobody leaves while another still talks
    finally:
        os._exit(code)


def _read_all(readers: list[int], deadline: float) -> dict[int, bytes]:
    """What came from each, of those that ended in time."""
    parts: dict[int, bytes] = dict.fromkeys(readers, b"")
    is_open = set(readers)
    while is_open and time.monotonic() < deadline:
        for reader in select.select(list(is_open), [], [], max(0.0, deadline - time.monotonic()))[0]:
            chunk = os.read(reader, 1 << 20)
            parts[reader] += chunk
            if not chunk:
                is_open.discard(reader)
    return {reader: sent for reader, sent in parts.items() if reader not in is_open}
