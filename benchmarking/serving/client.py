"""One streamed request to an OpenAI-compatible server, and the times at which its answer arrived."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
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
