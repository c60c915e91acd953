"""The endpoints that decode."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diffusionlm.serving.http.bodies import GenerationBody
from diffusionlm.serving.http.context import RequestContext, get_context, read_body, run_until_gone
from diffusionlm.serving.http.errors import ApiError, parse_object, to_api_error, to_json
from diffusionlm.serving.http.formats import AnswerFormat
from diffusionlm.serving.http.parsing import parse_body
from diffusionlm.serving.http.preparation import PreparedCall
from diffusionlm.serving.http.service import Service
from diffusionlm.serving.http.sessions import Choice, decode

LOGGER = logging.getLogger(__name__)

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


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
    async with service.upload():
        return await read_body(request, service.limits.max_body)


class GenerationEndpoint:
    """An ASGI application that answers with what the engine decodes, at once or as a stream."""

    def __init__(self, service: Service, body_class: type[GenerationBody], format_class: type[AnswerFormat]) -> None:
        self._service, self._body_class, self._format_class = service, body_class, format_class

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

    def _parse(self, content: bytes) -> GenerationBody:
        return parse_body(parse_object(content), self._body_class, self._service.preparer.context)

    async def _decode(self, call: PreparedCall, request: Request, send: Send) -> None:
        tokenizer, context = self._service.preparer.tokenizer, get_context(request.scope)
        every = [Choice(index, call, tokenizer) for index in range(len(call.requests))]
        choices, prompts = every[: call.num_choices], every[call.num_choices :]
        for choice in choices if prompts else ():
            choice.prompt = prompts[choice.index // call.body.n]
        answer_format = self._format_class(call, tokenizer, context.request_id)
        async with aclosing(decode(self._service.engine, call, every)) as updates:
            await anext(updates)
            try:
                if call.body.stream:
                    await self._stream(updates, answer_format, choices, context, send)
                else:
                    async for _ in updates:
                        pass
                    content = await asyncio.to_thread(answer_format.whole, choices)  # it may be megabytes
                    await Response(content, media_type="application/json")(request.scope, request.receive, send)
            finally:
                self._record(call, choices, context)

    async def _stream(
        self,
        updates: AsyncIterator[list[Choice]],
        answer_format: AnswerFormat,
        choices: list[Choice],
        context: RequestContext,
        send: Send,
    ) -> None:
        """Send a stream; an error after its first byte is an event, after which nothing comes."""
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        try:
            async for changed in updates:
                if answer_format.prepared.body.num_alternatives:  # those of a long block are megabytes
                    events = await asyncio.to_thread(_to_events, answer_format, changed)
                else:
                    events = _to_events(answer_format, changed)
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
            last = b"data: [DONE]\n\n"
            if answer_format.includes_usage:
                last = to_event(answer_format.usage_chunk(choices)) + last
        except ClientDisconnect:
            raise
        except Exception as error:
            problem = to_api_error(error)
            context.details["error"] = problem.code
            last = to_event(problem.body)
            if problem.code == "internal_error":
                LOGGER.exception("request %s has failed", context.request_id)
        await send({"type": "http.response.body", "body": last})

    def _record(self, call: PreparedCall, choices: list[Choice], context: RequestContext) -> None:
        for choice in choices:
            self._service.metrics.record(call.model, choice)
        context.details |= {
            "choices": len(choices),
            "prompt_tokens": sum(choice.num_prompt_tokens for choice in choices),
            "new_tokens": sum(choice.num_tokens for choice in choices),
            "forwards": sum(choice.num_forwards for choice in choices),
        }


def _to_events(answer_format: AnswerFormat, changed: Sequence[Choice]) -> bytes:
    return b"".join(to_event(chunk) for choice in changed for chunk in answer_format.chunks(choice))


def to_event(value: Any) -> bytes:
    """Format an event of a stream."""
    return b"data: " + to_json(value) + b"\n\n"
