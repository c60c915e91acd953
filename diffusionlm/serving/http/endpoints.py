"""What precedes and surrounds an endpoint (its context, bodies, clients that leave), and the endpoints that decode."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from diffusionlm.serving.http.answers import Body, Choice, PreparedCall, ServedAnswer, decode
from diffusionlm.serving.http.service import Service
from diffusionlm.serving.http.wire import ApiError, parse_body, parse_object, to_api_error, to_json

LOGGER = logging.getLogger(__name__)
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

DISCARD_SECONDS, _DISCARD_PAUSE_SECONDS = 2.0, 0.1
"""Time to read the rest of a refused body, and of it between two parts."""
STATE_KEY, IS_PROBE_KEY = "request", "is_probe"
"""Keys of the state of a scope: the `RequestContext`; whether its connection is beyond ``max_connections``."""
PROBE_PATHS = frozenset({"/health", "/metrics"})
"""Paths that are answered beyond ``max_connections``, so that a full server does not look like a dead one."""


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


async def discard_body(request: Request, max_bytes: int) -> bool:
    """Read the rest of a body, so that a client that is still sending sees the response; False: not all was read."""
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


async def read_content(service: Service, request: Request) -> bytes:
    """Read the body of a request.

    Raises:
        ApiError: the request is refused.
        ClientDisconnect: the client has left.
    """
    service.check_is_ready()
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, "the Content-Type must be application/json", code="unsupported_media_type")
    max_bytes, length, body = service.limits.max_body, request.headers.get("content-length", ""), bytearray()
    too_large = ApiError(413, f"the body is larger than {max_bytes} bytes (serve.max_body)", code="body_too_large")
    if length.isdigit() and int(length[:18]) > max_bytes:
        raise too_large
    async with service.upload():
        async for part in request.stream():
            body += part
            if len(body) > max_bytes:
                raise too_large
    get_context(request.scope).is_body_read = True
    return bytes(body)


class GenerationEndpoint(Generic[Body]):
    """An ASGI application that answers with what the engine decodes, at once or as a stream."""

    def __init__(self, service: Service, body_class: type[Body], answer_class: type[ServedAnswer[Body]]) -> None:
        self._service, self._body_class, self._answer_class = service, body_class, answer_class

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """
        Raises:
            ApiError: the request is refused, or fails before the response begins.
            ClientDisconnect: the client has left.
        """
        request = Request(scope, receive)
        content = await read_content(self._service, request)
        await run_until_gone(receive, self._respond(request, content, send))

    async def _respond(self, request: Request, content: bytes, send: Send) -> None:
        service, context = self._service, get_context(request.scope)
        owner = context.cache_salt or (request.client.host if request.client else "")
        with service.activity():
            with service.preparation():
                body = await service.threads.run(partial(self._parse, content), owner)
                context.request_id = body.request_id or context.request_id
                threads = service.threads if body.constraint is None else service.constraint_threads
                prepared = await threads.run(partial(service.preparer.prepare, body, context.cache_salt), owner)
            context.details["model"] = prepared.model
            service.check_is_ready()
            await self._decode(prepared, request, send)

    def _parse(self, content: bytes) -> Body:
        return parse_body(parse_object(content), self._body_class, self._service.preparer.context)

    async def _decode(self, call: PreparedCall[Body], request: Request, send: Send) -> None:
        context = get_context(request.scope)
        answer = self._answer_class(call, self._service.preparer.tokenizer, context.request_id)
        async with aclosing(decode(self._service.engine, call, answer.all_choices)) as updates:
            await anext(updates)
            try:
                if call.body.stream:
                    await self._stream(updates, answer, context, send)
                else:
                    async for _ in updates:
                        pass
                    content = await asyncio.to_thread(answer.whole)  # it may be megabytes
                    await Response(content, media_type="application/json")(request.scope, request.receive, send)
            finally:
                self._record(answer, context)

    async def _stream(
        self, updates: AsyncIterator[list[Choice]], answer: ServedAnswer[Body], context: RequestContext, send: Send
    ) -> None:
        """Send a stream; an error after its first byte is an event, after which nothing comes."""
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        try:
            async for changed in updates:
                if answer.body.num_alternatives:  # those of a long block are megabytes
                    events = await asyncio.to_thread(_to_events, answer, changed)
                else:
                    events = _to_events(answer, changed)
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
            last = b"data: [DONE]\n\n"
            if answer.includes_usage:
                last = to_event(answer.usage_chunk()) + last
        except ClientDisconnect:
            raise
        except Exception as error:
            problem = to_api_error(error)
            context.details["error"] = problem.code
            last = to_event(problem.body)
            if problem.code == "internal_error":
                LOGGER.exception("request %s has failed", context.request_id)
        await send({"type": "http.response.body", "body": last})

    def _record(self, answer: ServedAnswer[Body], context: RequestContext) -> None:
        for choice in answer.choices:
            self._service.metrics.record(answer.call.model, choice)
        context.details |= {
            "choices": len(answer.choices),
            "prompt_tokens": sum(choice.num_prompt_tokens for choice in answer.choices),
            "new_tokens": sum(choice.num_tokens for choice in answer.choices),
            "forwards": sum(choice.num_forwards for choice in answer.choices),
        }


def _to_events(answer: ServedAnswer[Body], changed: Sequence[Choice]) -> bytes:
    return b"".join(to_event(chunk) for choice in changed for chunk in answer.chunks(choice))


def to_event(value: Any) -> bytes:
    """Format an event of a stream."""
    return b"data: " + to_json(value) + b"\n\n"
