"""Threads that do not keep a process from its end, unlike those of `concurrent.futures.ThreadPoolExecutor`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThreads:
    """Runs functions in a fixed number of threads, which the end of the process does not wait for."""

    def __init__(self, count: int, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._count = count
        for number in range(count):
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True).start()

    async def run(self, function: Callable[[], T]) -> T:
        """Wait for a function without holding up the event loop; a cancelled one does not start."""
        future: Future[T] = Future()
        self._tasks.put((future, function))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End each thread after what it is doing, and after what was asked for before."""
        for _ in range(self._count):
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
