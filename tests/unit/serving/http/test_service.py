"""Threads beside the event loop, and the end of a process in which one of them works."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from functools import partial
from typing import Any

import pytest

from diffusionlm.serving.http.service import DaemonThreads

PROGRAM = """
import asyncio, time
from diffusionlm.serving.http.service import DaemonThreads

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


def test_owners_take_turns() -> None:
    threads, gate, order = DaemonThreads(1, "test"), threading.Event(), list[str]()

    async def run() -> None:
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(threads.run(gate.wait))]
        await asyncio.sleep(0)
        for name in ("a1", "a2", "a3", "b1", "c1", "b2"):
            tasks.append(asyncio.create_task(threads.run(partial(order.append, name), name[0])))
            await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    threads.close()
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


@pytest.mark.slow
def test_the_process_ends_while_a_thread_works() -> None:
    assert subprocess.run([sys.executable, "-c", PROGRAM], timeout=60).returncode == 0
