"""Ranks: what they tell each other, how they start, and that nobody waits for the dead."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from config.training.parallel import DDP, FSDP, SingleProcess
from ddp import process_group as module
from ddp.process_group import SINGLE_PROCESS, World, process_group, read_torchrun_environment
from tests.distributed.forked import end_ranks, run_ranks


def test_ranks_sum_values_and_agree(tmp_path: Path) -> None:
    def act(world: World) -> object:
        tiny = [1e16, 1.0, -1e16][world.rank]
        result_of_first = world.run_on_first(lambda: {"by": world.rank})
        return world.sum(float(world.rank), tiny), result_of_first

    # In the order of ranks (1e16 + 1) - 1e16 is 0; float32 would not get the first right either.
    expected = ([3.0, 0.0], {"by": 0})
    assert run_ranks(act, tmp_path, world_size=3) == [expected] * 3


def test_error_of_one_rank_is_raised_on_all_ranks(tmp_path: Path) -> None:
    def act(world: World) -> list[str]:
        def fail() -> int:
            if world.rank == 1:
                raise OSError("disk full")
            return 7

        def refuse() -> int:
            raise ValueError("no such key")

        errors = []
        for attempt in (
            lambda: world.all_agree(fail),
            lambda: world.run_on_first(refuse),
            lambda: world.all_agree(refuse),
        ):
            with pytest.raises(ValueError) as caught:
                attempt()
            errors.append(str(caught.value))
        assert world.all_agree(lambda: world.rank + 5) == world.rank + 5

        def fill_disk() -> None:
            raise OSError("disk full")

        with pytest.raises(OSError if world.is_first else ValueError, match="disk full"):
            world.run_on_first(fill_disk)  # else the others would wait for its broadcast
        return errors

    errors = ["rank 1: OSError: disk full", "no such key", "all ranks: no such key"]
    assert run_ranks(act, tmp_path) == [errors, errors]


def test_no_collective_waits_while_the_first_rank_works(tmp_path: Path) -> None:
    """A collective has a limit, and the work of the first rank, such as counting the rows of an epoch, has none."""

    def act(world: World) -> bool:
        store = dist.distributed_c10d._get_default_store()
        broadcast, wait = dist.broadcast_object_list, module._wait_for_heartbeat_to_end

        def enter(*args: Any, **options: Any) -> None:
            store.set(f"rank {world.rank} is in a collective", "")
            broadcast(*args, **options)

        def announce(*args: Any) -> None:
            store.set("rank 1 waits", "")
            wait(*args)

        dist.broadcast_object_list, module._wait_for_heartbeat_to_end = enter, announce  # type: ignore[assignment]

        def work() -> bool:
            store.wait(["rank 1 waits"])
            return store.check(["rank 1 is in a collective"])

        was_in_collective = world.run_on_first(work)
        assert world.run_on_first(lambda: 7) == 7, "each call has its own key"
        return was_in_collective

    assert run_ranks(act, tmp_path) == [False, False]


@pytest.mark.parametrize("is_alive", [True, False])
def test_the_first_rank_may_take_any_time_but_not_be_silent(is_alive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    class Store:
        beats = 0

        def check(self, keys: list[str]) -> bool:
            return clock[0] > 1000.0

        def add(self, key: str, amount: int) -> int:
            self.beats += is_alive
            return self.beats

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", sleep)
    store: Any = Store()
    with nullcontext() if is_alive else pytest.raises(RuntimeError, match="rank 0 has been silent for 30 s"):
        module._wait_for_heartbeat_to_end(store, "key", 30.0)
    assert (clock[0] > 1000.0) == is_alive and clock[0] > 30.0


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_torchrun_environment_is_read(torchrun: pytest.MonkeyPatch) -> None:
    assert read_torchrun_environment() == (1, 2, 1)
    torchrun.delenv("LOCAL_RANK")  # a launcher that starts one process on each machine
    assert read_torchrun_environment() == (1, 2, 0)
    torchrun.setenv("RANK", "first")
    with pytest.raises(ValueError, match="RANK"):
        read_torchrun_environment()
    torchrun.delenv("RANK")
    assert read_torchrun_environment() is None


def test_a_start_that_does_not_fit_is_refused(torchrun: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r'parallel\.strategy = "single" under torchrun with 2 ranks'):
        process_group(SingleProcess(), "cpu").__enter__()
    with pytest.raises(ValueError, match=r'parallel\.backend = "nccl".*"gloo"'):
        process_group(DDP(backend="nccl"), "cpu").__enter__()
    torchrun.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"parallel\.local_ranks"):
        process_group(DDP(), "cuda").__enter__()
    torchrun.setenv("WORLD_SIZE", "1")
    with process_group(SingleProcess(), "cpu") as world:
        assert world is SINGLE_PROCESS
    torchrun.delenv("WORLD_SIZE")
    with pytest.raises(ValueError, match=r'parallel\.strategy = "fsdp".*diffusionlm-train-ddp'):
        process_group(FSDP(), "cpu").__enter__()
    with process_group(SingleProcess(), "cpu") as world:
        assert world is SINGLE_PROCESS


@pytest.mark.parametrize(
    ("device_type", "backend", "expected"),
    [
        ("cuda", "auto", ("cpu:gloo,cuda:nccl", torch.device("cuda", 1))),
        ("cuda", "gloo", ("cpu:gloo,cuda:gloo", None)),
        ("cpu", "auto", ("gloo", None)),
    ],
)
def test_nccl_connects_at_the_start(
    device_type: str, backend: Any, expected: tuple[str, torch.device | None], torchrun: pytest.MonkeyPatch
) -> None:
    torchrun.setenv("LOCAL_RANK", "1")
    torchrun.setattr(torch.cuda, "device_count", lambda: 2)
    torchrun.setattr(torch.cuda, "set_device", lambda device: None)
    calls: list[tuple[str, torch.device | None]] = []
    torchrun.setattr(dist, "init_process_group", lambda name, **options: calls.append((name, options["device_id"])))
    process_group(DDP(backend=backend), device_type).__enter__()
    assert calls == [expected]


def test_torchrun_group_is_created_and_destroyed(tmp_path: Path) -> None:
    def act(world: World) -> tuple[World, float, bool]:
        dist.destroy_process_group()
        environment = {"RANK": str(world.rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        os.environ.update(environment)
        original = dist.init_process_group

        def meet_by_file(backend: str, **kwargs: Any) -> None:
            original(backend, init_method=f"file://{tmp_path}/again", **kwargs)

        dist.init_process_group = meet_by_file  # type: ignore[assignment]
        with process_group(DDP(timeout_seconds=20), "cpu") as joined:
            total = joined.sum(joined.rank + 1)[0]
        return joined, total, dist.is_initialized()

    assert run_ranks(act, tmp_path) == [(World(rank, 2, 0, 20), 3.0, False) for rank in range(2)]


def test_the_death_of_a_rank_is_noticed_at_once(tmp_path: Path) -> None:
    def act(world: World) -> float:
        world.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), 9)
        started = time.monotonic()
        with pytest.raises(RuntimeError):
            world.barrier()
        return time.monotonic() - started

    survivor, dead = end_ranks(act, tmp_path, timeout=30)
    assert (survivor.exit_code, dead.exit_code) == (0, -9)
    assert survivor.result < 10  # the limit is 30


@pytest.mark.slow
def test_a_rank_that_hangs_is_an_error_after_the_timeout(tmp_path: Path) -> None:
    has_failed = tmp_path / "has_failed"

    def act(world: World) -> None:
        world.barrier()
        if world.rank == 1:  # hangs until the other rank has given up
            while not has_failed.exists():
                time.sleep(0.02)
            os._exit(3)
        with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
            world.barrier()
        has_failed.touch()
        os._exit(4)

    assert [ended.exit_code for ended in end_ranks(act, tmp_path, timeout=2)] == [4, 3]
