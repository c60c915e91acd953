"""One HTTP request and its response, below the routes: bodies and disconnects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from diffusionlm.serving.http.errors import ApiError

DISCARD_SECONDS, _DISCARD_PAUSE_SECONDS = 2.0, 0.1
"""Time to read the rest of a refused body, and of it between two parts."""
STATE_KEY = "request"


@dataclass
class RequestContext:
    """What is known of a request besides its body."""

    request_id: str
    cache_salt: str = ""
    started: float = field(default_factory=time.monotonic)
    status: int | None = None
    """Of the response; None: not sent."""
    is_body_read: bool = False
    details: dict[str, Any] = field(default_factory=dict)
    """For the log: counts, names, never a text of a client."""


def get_context(scope: Scope) -> RequestContext:
    context = scope["state"][STATE_KEY]
    assert isinstance(context, RequestContext)
    return context


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read the body of a request.

    Raises:
        ApiError: it is larger than ``max_bytes``.
        ClientDisconnect: the client has left.
    """
    too_large = ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length[:18]) > max_bytes:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise too_large
    get_context(request.scope).is_body_read = True
    return bytes(body)


async def discard_body(request: Request, max_bytes: int) -> bool:
    """Read the rest of a body, so that a client that is still sending sees the response.

    Returns:
        Whether all was read; otherwise the connection has to be closed.
    """
    context = get_context(request.scope)
    if context.is_body_read or "expect" in request.headers:
        return context.is_body_read
    num_bytes = 0
    try:
        async with asyncio.timeout(DISCARD_SECONDS):
            while num_bytes <= max_bytes:
                message = await asyncio.wait_for(request.receive(), _DISCARD_PAUSE_SECONDS)
                num_bytes += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return True
    except TimeoutError:
        pass
    return False


async def run_until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run something as long as the client is there; when it leaves, cancel it.

    Raises:
        ClientDisconnect: the client has left.
    """
    tasks = asyncio.create_task(work), asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        await tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def identify_send(send: Send, context: RequestContext) -> Send:
    """Return a `send` that adds the request's id and notes the status."""

    async def send_identified(message: Message) -> None:
        if message["type"] == "http.response.start":
            context.status = message["status"]
            headers = [*message.get("headers", []), (b"x-request-id", context.request_id.encode())]
            message = {**message, "headers": headers}
        await send(message)

    return send_identified
