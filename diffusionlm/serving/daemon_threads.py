"""Threads that do not keep a process from its end, unlike those of `concurrent.futures.ThreadPoolExecutor`."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from heapq import heappop, heappush
from typing import Any, TypeVar

T = TypeVar("T")

OVERTAKING_SIZE = 16


class DaemonThreads:
    """Runs functions in a fixed number of threads, which the end of the process does not wait for.

    Owners take turns, and of one owner's functions small ones overtake larger ones, so that many large ones hold up
    nobody else's and no small one. A function is overtaken by at most one for each `OVERTAKING_SIZE` of its own size.
    """

    def __init__(self, count: int, name: str) -> None:
        self._condition = threading.Condition()
        self._tasks: dict[str, list[tuple[int, int, Future[Any], Callable[[], Any]]]] = {}
        """Owner -> heap of place, number, result and function. The owner whose turn it is comes first."""
        self._numbers = itertools.count()
        self._is_closed = False
        for number in range(count):
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True).start()

    async def run(self, function: Callable[[], T], *, owner: str = "", size: int = 0) -> T:
        """Wait for a function without holding up the event loop; a cancelled one does not start.

        Args:
            owner: whose turn it takes.
            size: any measure of how long it may take.
        """
        future: Future[T] = Future()
        with self._condition:
            number = next(self._numbers)
            place = number + size // OVERTAKING_SIZE
            heappush(self._tasks.setdefault(owner, []), (place, number, future, function))
            self._condition.notify()
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End each thread after what it is doing, and after what was asked for before."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def _take(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        """Wait for the next function; None: the threads end."""
        with self._condition:
            self._condition.wait_for(lambda: self._tasks or self._is_closed)
            if not self._tasks:
                return None
            owner = next(iter(self._tasks))
            tasks = self._tasks.pop(owner)
            _, _, future, function = heappop(tasks)
            if tasks:
                self._tasks[owner] = tasks  # now behind all other owners
            return future, function

    def _work(self) -> None:
        while (task := self._take()) is not None:
            future, function = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
