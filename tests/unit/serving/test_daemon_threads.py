"""Threads beside the event loop, and the end of a process in which one of them works."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from diffusionlm.serving.daemon_threads import OVERTAKING_SIZE, DaemonThreads

PROGRAM = """
import asyncio, time
from diffusionlm.serving.daemon_threads import DaemonThreads

async def main():
    threads = DaemonThreads(1, "test")
    task = asyncio.create_task(threads.run(lambda: time.sleep(100)))
    await asyncio.sleep(0.05)
    task.cancel()
    threads.close()

asyncio.run(main())
"""


def test_results_errors_and_cancelled_functions() -> None:
    threads, gate, calls = DaemonThreads(1, "test"), threading.Event(), []

    async def run() -> None:
        assert await threads.run(lambda: 3) == 3
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 // 0)
        first = asyncio.create_task(threads.run(gate.wait))
        second = asyncio.create_task(threads.run(lambda: calls.append(2)))
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.sleep(0.01)
        gate.set()
        assert await first
        await threads.run(lambda: calls.append(3))

    asyncio.run(run())
    threads.close()
    assert calls == [3]


def run_in_order(calls: Sequence[tuple[str, int]]) -> list[str]:
    """Owner and size of functions that have come together -> the order in which one thread runs them."""
    threads, gate, order = DaemonThreads(1, "test"), threading.Event(), list[str]()

    async def run() -> None:
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(threads.run(gate.wait))]
        await asyncio.sleep(0)
        for owner, size in calls:
            function = partial(order.append, f"{owner}{size}")
            tasks.append(asyncio.create_task(threads.run(function, owner=owner, size=size)))
            await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    threads.close()
    return order


def test_owners_take_turns_and_small_functions_overtake() -> None:
    large, small = 9 * OVERTAKING_SIZE, 1
    order = run_in_order([*[("a", large)] * 2, ("a", small), ("b", large), ("c", 50), ("b", small)])
    assert order == [f"a{small}", f"b{small}", "c50", f"a{large}", f"b{large}", f"a{large}"]


def test_a_large_function_is_not_overtaken_for_ever() -> None:
    large = 3 * OVERTAKING_SIZE
    assert run_in_order([("", large), *[("", 1)] * 9]).index(str(large)) == 2


def test_the_process_ends_while_a_thread_works() -> None:
    assert subprocess.run([sys.executable, "-c", PROGRAM], timeout=60).returncode == 0
