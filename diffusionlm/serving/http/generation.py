"""The endpoints that decode."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.serving.http.bodies import ChatBody, CompletionBody, InfillBody, ParsedBody, parse_body
from diffusionlm.serving.http.calls import Call, ChoiceUpdate
from diffusionlm.serving.http.errors import ApiError, to_api_error
from diffusionlm.serving.http.exchange import (
    ClientGoneError,
    Exchange,
    get_exchange,
    read_body,
    run_until_gone,
    send_response,
)
from diffusionlm.serving.http.formats import AnswerFormat, ChatFormat, CompletionFormat, InfillFormat
from diffusionlm.serving.http.json_text import parse_object, to_json
from diffusionlm.serving.http.preparation import PreparedCall, RequestPreparer, Submission
from diffusionlm.serving.http.service import Service

LOGGER = logging.getLogger(__name__)

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_LARGE_ANSWER = 1000
"""Tokens and alternatives beyond which an answer is formatted beside the event loop."""


@dataclass(frozen=True)
class GenerationKind:
    """What distinguishes the endpoints."""

    body_class: type[Any]
    prepare: Callable[[RequestPreparer, ParsedBody[Any], str], PreparedCall]
    format_class: type[AnswerFormat]


COMPLETION = GenerationKind(CompletionBody, RequestPreparer.prepare_completion, CompletionFormat)
CHAT = GenerationKind(ChatBody, RequestPreparer.prepare_chat, ChatFormat)
INFILL = GenerationKind(InfillBody, RequestPreparer.prepare_infill, InfillFormat)


class GenerationEndpoint:
    """An ASGI application that answers with what the engine decodes, at once or as a stream."""

    def __init__(self, service: Service, kind: GenerationKind) -> None:
        self._service, self._kind = service, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """
        Raises:
            ApiError: the request is refused, or fails before the response begins.
            ClientGoneError: the client has left.
        """
        service, limits = self._service, self._service.limits
        service.check_is_ready()
        content_type = Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise ApiError(415, "the Content-Type must be application/json", code="unsupported_media_type")
        async with service.upload():
            body = await read_body(scope, receive, limits.max_body)
        exchange = get_exchange(scope)
        exchange.owner = exchange.cache_salt or (scope.get("client") or [""])[0]
        exchange.body_size = len(body)
        await run_until_gone(receive, self._respond(exchange, body, send))

    async def _respond(self, exchange: Exchange, body: bytes, send: Send) -> None:
        service = self._service
        service.num_active += 1
        try:
            with service.preparation():
                parsed = await service.run_in_thread(partial(self._parse, body), exchange)
                prepare = partial(self._prepare, parsed, exchange.cache_salt)
                prepared = await service.run_in_thread(prepare, exchange, has_constraint=parsed.fields.has_constraint)
            exchange.details["model"] = prepared.model
            service.check_is_ready()
            await self._decode(Call(service.engine, prepared, service.preparer.tokenizer), exchange, send)
        finally:
            service.num_active -= 1

    def _parse(self, body: bytes) -> ParsedBody[Any]:
        return parse_body(parse_object(body), self._kind.body_class)

    def _prepare(self, parsed: ParsedBody[Any], cache_salt: str) -> PreparedCall:
        preparer = self._service.preparer
        call = self._kind.prepare(preparer, parsed, cache_salt)
        if parsed.fields.has_constraint and any(
            any(item.repeated_bytes) and not _has_answer(preparer, item)
            for item in call.submissions[:: parsed.fields.n]
        ):  # the constraint allows no text behind what healing takes back, but maybe behind the text as it is
            call = self._kind.prepare(preparer, parsed.without_healing(), cache_salt)
        return call

    async def _decode(self, call: Call, exchange: Exchange, send: Send) -> None:
        service, prepared = self._service, call.prepared
        answer_format = self._kind.format_class(prepared, service.preparer.tokenizer, exchange.request_id)
        try:
            await service.run_in_thread(call.submit, exchange, has_constraint=prepared.fields.has_constraint)
            if prepared.fields.stream:
                await self._stream(call, answer_format, exchange, send)
            else:
                await call.finish()
                num_tokens = sum(choice.num_tokens for choice in call.choices)
                body = await self._format(partial(answer_format.whole, call.choices), prepared, num_tokens)
                await send_response(send, 200, body, "application/json")
        except ApiError as error:
            if error.status == 429:
                service.metrics.record_rejection(prepared.model)
            raise
        finally:
            call.abort()
            self._record(call, exchange)

    async def _stream(self, call: Call, answer_format: AnswerFormat, exchange: Exchange, send: Send) -> None:
        """Send a stream; an error after its first byte is an event, after which nothing comes."""
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        options = call.prepared.fields.stream_options
        try:
            async for updates in call.updates():
                num_tokens = sum(len(piece.tokens) for update in updates for piece in update.pieces)
                events = await self._format(partial(_to_events, answer_format, updates), call.prepared, num_tokens)
                await send({"type": "http.response.body", "body": events, "more_body": True})
            last = b"data: [DONE]\n\n"
            if options is not None and options.include_usage:
                last = to_event(answer_format.usage_chunk(call.choices)) + last
        except ClientGoneError:
            raise
        except Exception as error:
            problem = to_api_error(error)
            exchange.details["error"] = problem.code
            last = to_event(problem.body)
            if problem.code == "internal_error":
                LOGGER.exception("request %s has failed", exchange.request_id)
        await send({"type": "http.response.body", "body": last})

    async def _format(self, function: Callable[[], bytes], prepared: PreparedCall, num_tokens: int) -> bytes:
        is_large = num_tokens * (1 + (prepared.num_alternatives or 0)) > _LARGE_ANSWER
        return await self._service.run_in_thread(function) if is_large else function()

    def _record(self, call: Call, exchange: Exchange) -> None:
        if not call.is_submitted:
            return
        for choice in call.choices:
            self._service.metrics.record(call.prepared.model, choice)
        exchange.details |= {
            "choices": len(call.choices),
            "prompt_tokens": sum(choice.submission.num_prompt_tokens for choice in call.choices),
            "new_tokens": sum(choice.num_tokens for choice in call.choices),
            "forwards": sum(choice.num_forwards for choice in call.choices),
        }


def _has_answer(preparer: RequestPreparer, item: Submission) -> bool:
    try:
        prepare_request(resolve_settings(item.config, preparer.model), item.token_ids, 0, item.options)
    except ValueError:
        return False
    return True


def _to_events(answer_format: AnswerFormat, updates: Sequence[ChoiceUpdate]) -> bytes:
    return b"".join(to_event(chunk) for update in updates for chunk in answer_format.chunks(update))


def to_event(value: Any) -> bytes:
    """Format an event of a stream."""
    return b"data: " + to_json(value) + b"\n\n"
