"""The routes of the server, and what precedes them: keys, hosts, ids of requests, errors as JSON, the log."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable
from functools import cache, partial
from http import HTTPStatus
from importlib import resources
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from diffusionlm.serving.http.access import is_loopback
from diffusionlm.serving.http.bodies import LoadAdapterBody, UnloadAdapterBody
from diffusionlm.serving.http.chat import ChatAnswer, ChatBody
from diffusionlm.serving.http.completions import CompletionAnswer, CompletionBody, InfillAnswer, InfillBody
from diffusionlm.serving.http.endpoints import (
    IS_PROBE_KEY,
    PROBE_PATHS,
    STATE_KEY,
    GenerationEndpoint,
    RequestContext,
    discard_body,
    get_context,
    identify_send,
    read_content,
)
from diffusionlm.serving.http.metrics import CONTENT_TYPE
from diffusionlm.serving.http.preparation import RequestPreparer, detokenize, tokenize
from diffusionlm.serving.http.service import Service
from diffusionlm.serving.http.wire import (
    ApiError,
    parse_body,
    parse_object,
    to_api_error,
    too_many_connections,
)
from files.installed_version import read_version
from files.terminal_text import escape_control_characters

LOGGER = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/health"})
"""Paths that need no key."""

AdapterBody = TypeVar("AdapterBody", bound=UnloadAdapterBody)

CLIENT_GONE = 499
"""Status in the log of a request whose client has left."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MAX_LOGGED_PATH = 100


class ServerApp:
    """The ASGI application of the server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())
        self._needs_local_host = service.keys is None and is_loopback(service.limits.host)
        completions = GenerationEndpoint(service, CompletionBody, CompletionAnswer)
        chats = GenerationEndpoint(service, ChatBody, ChatAnswer)
        infills = GenerationEndpoint(service, InfillBody, InfillAnswer)
        self._router = Router(
            [
                Route("/", self._answer_page, methods=["GET"]),
                Route("/health", self._answer_health, methods=["GET"]),
                Route("/version", self._answer_version, methods=["GET"]),
                Route("/tokenize", partial(self._compute, tokenize), methods=["POST"]),
                Route("/detokenize", partial(self._compute, detokenize), methods=["POST"]),
                Route("/metrics", self._answer_metrics, methods=["GET"]),
                Route("/v1/models", self._list_models, methods=["GET"]),
                Route("/v1/models/{name:path}", self._answer_model, methods=["GET"]),
                Route("/v1/completions", completions, methods=["POST"]),
                Route("/v1/chat/completions", chats, methods=["POST"]),
                Route("/v1/infill", infills, methods=["POST"]),
                Route("/v1/load_lora_adapter", self._load_adapter, methods=["POST"]),
                Route("/v1/unload_lora_adapter", self._unload_adapter, methods=["POST"]),
            ],
            redirect_slashes=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; no error leaves it."""
        given_id = Headers(scope=scope).get("x-request-id", "")
        context = RequestContext(given_id if _REQUEST_ID.fullmatch(given_id) else secrets.token_hex(12))
        scope["app"] = self  # the router then raises its errors
        scope.setdefault("state", {})[STATE_KEY] = context
        send = identify_send(send, context)
        try:
            try:
                if scope["state"][IS_PROBE_KEY] and scope["path"] not in PROBE_PATHS:
                    raise too_many_connections()
                self._check_headers(scope)
                self._check_host(scope)
                self._check_key(scope, context)
                await self._router(scope, receive, send)
            except ClientDisconnect:
                raise
            except Exception as error:
                await self._refuse(error, context, Request(scope, receive), send)
        except ClientDisconnect:
            context.status = CLIENT_GONE
        finally:
            self._log(scope, context)

    async def _refuse(self, error: Exception, context: RequestContext, request: Request, send: Send) -> None:
        """Answer with an error."""
        if isinstance(error, HTTPException):
            phrase = HTTPStatus(error.status_code).phrase.lower()
            text = f"{_to_line(request.scope['path'])}: {phrase}"
            error = ApiError(error.status_code, text, headers=dict(error.headers or {}))
        problem = to_api_error(error)
        if problem.code == "internal_error":
            LOGGER.error("request %s has failed", context.request_id, exc_info=error)
        if problem.status == 429:
            self._service.metrics.record_rejection(context.details.get("model", self._service.preparer.names[0]))
        context.details["error"] = problem.code or problem.status
        if context.status is not None:
            raise ClientDisconnect  # too late for a response: the connection is closed
        is_read = await discard_body(request, self._service.limits.max_body)
        headers = problem.headers if is_read else {**problem.headers, "Connection": "close"}
        await JSONResponse(problem.body, problem.status, headers)(request.scope, request.receive, send)

    def _check_headers(self, scope: Scope) -> None:
        """Refuse what h11 lets through: headers that are too long but arrive at once, and two lengths of a body, which
        a proxy may read otherwise."""
        headers, limit = scope["headers"], self._service.limits.max_header
        size = len(scope["raw_path"]) + len(scope["query_string"])
        if size + sum(len(name) + len(value) + len(": \r\n") for name, value in headers) > limit:
            raise ApiError(400, f"the request line and the headers are longer than {limit} bytes (serve.max_header)")
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
            text = "Content-Length and Transfer-Encoding exclude each other: send one"
            raise ApiError(400, text, headers={"Connection": "close"})

    def _check_host(self, scope: Scope) -> None:
        """Refuse names of other hosts, so that no page of the web reaches this machine through a name of its own."""
        if not self._needs_local_host:
            return
        host = Headers(scope=scope).get("host", "localhost")
        name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
        if not is_loopback(name.lower()):
            raise ApiError(
                403,
                f"the host {_to_line(name)} is not this machine: without keys only "
                "localhost is served; set serve.api_keys_file to serve other names",
                code="host_not_allowed",
            )

    def _check_key(self, scope: Scope, context: RequestContext) -> None:
        keys = self._service.keys
        if keys is None or scope["path"] in OPEN_PATHS:
            return
        owner = keys.find_owner(Headers(scope=scope).get("authorization", ""))
        if owner is None:
            raise ApiError(
                401,
                "a valid key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        context.cache_salt = owner

    async def _answer_page(self, request: Request) -> Response:
        return load_page()

    async def _answer_health(self, request: Request) -> Response:
        self._service.check_is_healthy()
        return JSONResponse({"status": "ok"})

    async def _answer_version(self, request: Request) -> Response:
        return JSONResponse({"version": read_version()})

    async def _compute(
        self, function: Callable[[RequestPreparer, dict[str, Any]], dict[str, Any]], request: Request
    ) -> Response:
        """Answer with a function of the body, in a thread."""
        content, owner = await read_content(self._service, request), get_context(request.scope).cache_salt
        with self._service.activity():
            preparer = self._service.preparer
            answer = await self._service.threads.run(lambda: function(preparer, parse_object(content)), owner)
        return JSONResponse(answer)

    async def _answer_metrics(self, request: Request) -> Response:
        text = self._service.metrics.render(self._service.engine)
        return Response(text.encode(), headers={"content-type": CONTENT_TYPE})

    async def _list_models(self, request: Request) -> Response:
        models = [self._describe_model(name) for name in self._service.preparer.names]
        return JSONResponse({"object": "list", "data": models})

    async def _answer_model(self, request: Request) -> Response:
        return JSONResponse(self._describe_model(self._service.preparer.find_model(request.path_params["name"])))

    async def _load_adapter(self, request: Request) -> Response:
        body = await self._read_adapter_body(request, LoadAdapterBody)
        await self._service.load_adapter(body.lora_name, body.lora_path, replaces=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def _unload_adapter(self, request: Request) -> Response:
        body = await self._read_adapter_body(request, UnloadAdapterBody)
        self._service.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _read_adapter_body(self, request: Request, kind: type[AdapterBody]) -> AdapterBody:
        if self._service.limits.adapter_directory is None:
            text = "this server loads and unloads no adapters: start it with --set serve.adapter_directory=DIR"
            raise ApiError(403, text, code="adapters_not_allowed")
        content = await read_content(self._service, request)
        body = parse_body(parse_object(content), kind, self._service.preparer.context)
        get_context(request.scope).details["adapter"] = body.lora_name
        return body

    def _describe_model(self, name: str) -> dict[str, object]:
        preparer = self._service.preparer
        base = preparer.names[0]
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "diffusionlm",
            "root": base,
            "parent": None if name == base else base,
            "max_model_len": preparer.model.max_position_embeddings,
            "block_length": preparer.model.block_length,
            "has_chat": preparer.has_chat,
            "has_vision": preparer.context.has_vision,
        }

    def _log(self, scope: Scope, context: RequestContext) -> None:
        if not self._service.limits.log_requests:
            return
        path = _to_line(scope["path"])
        details = "".join(f" {key}={value}" for key, value in context.details.items())
        seconds = time.monotonic() - context.started
        LOGGER.info(
            "%s %s %s id=%s%s %.3fs", scope["method"], path, context.status, context.request_id, details, seconds
        )


def _to_line(text: str) -> str:
    """A text of a client, short and without control characters."""
    return escape_control_characters(text[:_MAX_LOGGED_PATH]).replace("\r", "\\r").replace("\n", "\\n")


@cache
def load_page() -> Response:
    """Read the page. Its policy allows its own script and style, by their hashes, and connections to the server."""
    text = resources.files("diffusionlm.serving").joinpath("page.html").read_text(encoding="utf-8")
    policy = [
        "default-src 'none'",
        f"script-src {_hash_element(text, 'script')}",
        f"style-src {_hash_element(text, 'style')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    headers = {
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)


def _hash_element(text: str, name: str) -> str:
    """The source expression of the only element of this name, in Content Security Policy 3."""
    [content] = re.findall(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
