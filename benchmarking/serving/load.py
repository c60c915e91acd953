"""A load test: requests in a closed loop or at random times, then each of them alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarking.serving.client import Clock, RequestRecord

Send = Callable[[Mapping[str, Any]], Awaitable[RequestRecord]]
OnProgress = Callable[[int], None]
"""Gets the number of requests that are done."""


@dataclass(frozen=True)
class LoadResult:
    """The requests of a load test."""

    records: Sequence[RequestRecord]
    """In the order of the bodies."""
    start: float
    end: float
    max_in_flight: int
    """Most requests under way at one time."""


async def run_load(
    send: Send,
    bodies: Sequence[Mapping[str, Any]],
    *,
    clock: Clock,
    concurrency: int | None,
    arrivals: Sequence[float] | None = None,
    on_progress: OnProgress = lambda _: None,
) -> LoadResult:
    """Send requests in their order.

    Args:
        concurrency: requests under way at most; None: any number.
        arrivals: seconds from the start at which each request is sent, if there is room for it; None: at once.
    """
    room = asyncio.Semaphore(len(bodies) if concurrency is None else concurrency)
    start, num_done, num_in_flight, max_in_flight = clock.now(), 0, 0, 0

    async def send_one(body: Mapping[str, Any]) -> RequestRecord:
        nonlocal num_done, num_in_flight, max_in_flight
        num_in_flight += 1
        max_in_flight = max(max_in_flight, num_in_flight)
        try:
            return await send(body)
        finally:
            num_in_flight -= 1
            num_done += 1
            room.release()
            on_progress(num_done)

    async with asyncio.TaskGroup() as group:
        tasks = []
        for index, body in enumerate(bodies):
            if arrivals is not None and (delay := start + arrivals[index] - clock.now()) > 0:
                await clock.sleep(delay)
            await room.acquire()
            tasks.append(group.create_task(send_one(body)))
    return LoadResult([task.result() for task in tasks], start, clock.now(), max_in_flight)


@dataclass(frozen=True)
class AnswerCheck:
    """Requests that were sent again, each alone."""

    num_equal: int
    mismatches: Sequence[int]
    """Indices of the requests whose answer differs."""
    failures: Sequence[int]
    """Indices of the requests that had no answer when they were alone."""

    @property
    def num_checked(self) -> int:
        return self.num_equal + len(self.mismatches) + len(self.failures)


async def check_answers(
    send: Send,
    bodies: Sequence[Mapping[str, Any]],
    records: Sequence[RequestRecord],
    *,
    max_requests: int | None,
    on_progress: OnProgress = lambda _: None,
) -> AnswerCheck:
    """Send each different request again, one after another, and compare the answers with all that it got.

    Requests that failed under load are not compared.
    """
    groups: dict[str, list[int]] = {}
    for index, (body, record) in enumerate(zip(bodies, records, strict=True)):
        if record.is_complete:
            groups.setdefault(json.dumps(body), []).append(index)
    num_equal, mismatches, failures = 0, [], []
    for done, indices in enumerate(list(groups.values())[:max_requests], 1):
        alone = await send(bodies[indices[0]])
        for index in indices:
            if not alone.is_complete:
                failures.append(index)
            elif records[index].answer == alone.answer:
                num_equal += 1
            else:
                mismatches.append(index)
        on_progress(done)
    return AnswerCheck(num_equal, mismatches, failures)
