"""A load test: requests that are read from a file or drawn, streamed in a closed loop or at random times, and then each
of them alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx2
import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError, model_validator

from config.bench.serve import LengthRange, RequestsSection
from files.usage_error import UsageError

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


DEFAULT_COUNT = 100
TEXT = (
    "the of and to in is that for it was on are as with they at be this from have or by one had not but what all were "
    "when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know get through back "
    "much before go good new write our used me man too any day same right look think also around another came come "
    "work three word must because does part even place well such here take why things help put years different away "
    "again off went old number great tell men say small every found still between name should home big give air line"
)
"""Words of drawn prompts."""


class RequestLine(BaseModel):
    """A line of a file of requests."""

    model_config = ConfigDict(extra="forbid", strict=True)
    prompt: str | list[int] = ""
    messages: list[dict[str, Any]] = []
    prompt_length: PositiveInt = 1
    max_tokens: PositiveInt = 1
    seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if len(self.model_fields_set & {"prompt", "messages", "prompt_length"}) != 1:
            raise ValueError('expected one of the keys "prompt", "messages" and "prompt_length"')
        return self


def build_requests(section: RequestsSection, *, is_chat: bool, num_warmup: int = 0) -> list[dict[str, Any]]:
    """Read or draw the bodies of a load test's requests, without the model, and then those of its warm-up. Request i is
    the same for any count.

    Raises:
        UsageError: the file cannot be read, or a line is wrong; names file and line.
    """
    lines = [{}] if section.file is None else _read_lines(section.file, is_chat=is_chat)
    count = section.count or (DEFAULT_COUNT if section.file is None else len(lines))
    return [
        _build_request(section, lines[index % len(lines)], index, is_chat=is_chat)
        for index in range(count + num_warmup)
    ]


def arrival_times(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the start at which requests of a Poisson process are sent; the first one is sent at once."""
    gaps = np.random.default_rng([seed, 1]).exponential(1.0 / rate, count)
    return [float(time) for time in np.cumsum(gaps) - gaps[0]]


def _build_request(section: RequestsSection, line: Mapping[str, Any], index: int, *, is_chat: bool) -> dict[str, Any]:
    rng = np.random.default_rng([section.seed, 0, index])
    lengths = [_draw_length(rng, section.prompt_length), _draw_length(rng, section.answer_length)]
    content = {key: line[key] for key in ("prompt", "messages") if key in line}
    if not content:
        content = {"prompt": " ".join(rng.choice(TEXT.split(), line.get("prompt_length", lengths[0])).tolist())}
    if is_chat and "prompt" in content:
        content = {"messages": [{"role": "user", "content": content["prompt"]}]}
    return {
        **content,
        "max_tokens": line.get("max_tokens", lengths[1]),
        "seed": line.get("seed", section.seed + index),
        "stream": True,
        "stream_options": {"include_usage": True},
        **section.body,
    }


def _draw_length(rng: np.random.Generator, limits: LengthRange) -> int:
    return int(rng.integers(limits[0], limits[1] + 1))


def _read_lines(path: Path, *, is_chat: bool) -> list[dict[str, Any]]:
    lines = []
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"requests.file = {path} cannot be read: {error}") from None
    for number, text in enumerate(content.split("\n"), 1):
        if not text.strip():
            continue
        try:
            line = RequestLine.model_validate_json(text)
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
            raise UsageError(f"{path}:{number}: {'; '.join(problems)}") from None
        if line.messages and not is_chat:
            raise UsageError(f'{path}:{number}: "messages" need server.endpoint = "chat"')
        if isinstance(line.prompt, list) and is_chat:
            raise UsageError(f'{path}:{number}: "prompt" must be text where server.endpoint = "chat"')
        lines.append(line.model_dump(exclude_unset=True))
    if not lines:
        raise UsageError(f'{path} is empty: write a JSON object in each line, such as {{"prompt": "Once upon a time"}}')
    return lines
