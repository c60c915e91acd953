"""A load test: streamed requests in a closed loop or at random times, and then each of them alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

DONE = "[DONE]"


@dataclass(frozen=True)
class Clock:
    """The time of a load test, in seconds."""

    now: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclass
class RequestRecord:
    """What became of a request. Times are those of `Clock.now`."""

    start: float
    chunk_times: list[float] = field(default_factory=list)
    """When each piece of text arrived."""
    end: float | None = None
    """When the last piece of the answer arrived, or its end without text; None: the request has failed."""
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    """As the server counts them; None: it does not say."""
    error: str | None = None
    """A short kind of error, such as "HTTP 429"."""
    error_text: str = ""

    @property
    def is_complete(self) -> bool:
        return self.error is None

    @property
    def answer(self) -> tuple[str, str | None, int | None]:
        """What must be equal when the request is sent again."""
        return self.text, self.finish_reason, self.new_tokens

    @property
    def num_tokens(self) -> int:
        """New tokens; where the server does not count them, each piece of text counts as one."""
        return len(self.chunk_times) if self.new_tokens is None else self.new_tokens


class LoadClient:
    """Sends requests to one endpoint."""

    def __init__(self, client: httpx2.AsyncClient, url: str, *, is_chat: bool, clock: Clock) -> None:
        self._client, self._is_chat, self._clock = client, is_chat, clock
        self._path = f"{url}/chat/completions" if is_chat else f"{url}/completions"

    async def send(self, body: Mapping[str, Any]) -> RequestRecord:
        """Send a request and read its answer to the end. An error is part of the record."""
        record = RequestRecord(self._clock.now())
        try:
            async with self._client.stream("POST", self._path, json=dict(body)) as response:
                if response.status_code != 200:
                    await response.aread()
                    return _fail(record, f"HTTP {response.status_code}", response.text)
                async for event in _read_events(response):
                    if not self._take_event(record, event):
                        return record
        except httpx2.TimeoutException as error:
            return _fail(record, "timeout", str(error))
        except httpx2.TransportError as error:
            return _fail(record, "connection", str(error))
        if record.end is None or record.finish_reason is None:
            return _fail(record, "incomplete", "the stream ended before the answer did")
        return record

    def _take_event(self, record: RequestRecord, event: str) -> bool:
        """Take an event of the stream; False if it is an error."""
        try:
            data = json.loads(event)
        except (ValueError, RecursionError):
            _fail(record, "invalid", event)
            return False
        if not isinstance(data, dict) or data.get("error"):
            _fail(record, "stream", event)
            return False
        for choice in data.get("choices") or ():
            record.end = self._clock.now()
            text = (choice.get("delta") or {}).get("content") if self._is_chat else choice.get("text")
            if text:
                record.text += text
                record.chunk_times.append(record.end)
            record.finish_reason = choice.get("finish_reason") or record.finish_reason
        usage = data.get("usage") or {}
        record.prompt_tokens = usage.get("prompt_tokens", record.prompt_tokens)
        record.new_tokens = usage.get("completion_tokens", record.new_tokens)
        return True


async def _read_events(response: httpx2.Response) -> AsyncIterator[str]:
    """Data of the server-sent events of a response, up to the mark of the end."""
    pending = b""
    async for data in response.aiter_bytes():
        # Not by `aiter_lines`, which also ends lines at characters that JSON may contain, such as U+2028.
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            event = line.removeprefix(b"data:").strip().decode(errors="replace")
            if event == DONE:
                return
            yield event


def _fail(record: RequestRecord, error: str, text: str) -> RequestRecord:
    record.end, record.error, record.error_text = None, error, text
    return record


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
