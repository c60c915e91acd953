"""JSON of requests, responses and errors, in the form that clients of OpenAI's API expect.

A key is a field of the endpoint, or it is unknown or not supported; only what does not change an answer is ignored. An
error in a request is a ValueError that names its field; `to_refusal` finds it.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from config.base import Section
from config.serving.server import ServeSection
from diffusionlm.serving.requests import EngineStoppedError, QueueFullError, UnknownAdapterError

LOGGER = logging.getLogger(__name__)
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "response_format": ("", {"type": "text"}),
    "functions": ("send tools", []),
    "function_call": ("send tool_choice", "none", "auto"),
    "service_tier": ("there is one tier", "auto", "default"),
    "modalities": ("answers are texts", ["text"]),
    "use_beam_search": ("there are no beams: set n for several answers", False),
    "length_penalty": ("there is no beam search", 1),
    "early_stopping": ("there is no beam search", False),
    "spaces_between_special_tokens": ("tokens are joined as they are", True, False),
    "priority": ("requests are served in the order of their arrival", 0),
    "echo": ("only /v1/completions repeats its prompt", False),
    "truncate_prompt_tokens": ("no text is cut: shorten it",),
    "guided_grammar": ("use guided_regex or guided_json",),
    "reasoning_effort": ("use chat_template_kwargs, such as enable_thinking of Qwen3's template",),
    "verbosity": ("say in a message how long the answer is to be",),
    "prediction": ("/v1/infill edits a canvas",),
    "chat_template": ("the server's is used: set it with diffusionlm-serve --chat-template",),
}
"""Field -> why it is not supported, or what to do instead ("": it is), and the values that ask for nothing."""
MAX_LOGGED_FIELDS = 1000
RETRY_AFTER_SECONDS = 1
"""When a client may try again that was refused because too many others wait."""
MAX_MESSAGE_LENGTH = 1000

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""Type of an error by its status; all others are "invalid_request_error"."""


class ApiError(Exception):
    """An error that a client is told.

    Args:
        status: of HTTP.
        param: the field of the request that is wrong.
        code: a word that programs can compare.
        headers: more headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        message = self.message
        if len(message) > MAX_MESSAGE_LENGTH:
            message = f"{message[: MAX_MESSAGE_LENGTH - 3]}..."
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


def retry_later(status: int, message: str, code: str) -> ApiError:
    """An error of a request that may be sent again."""
    return ApiError(status, message, code=code, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def too_many_connections() -> ApiError:
    error = retry_later(503, "too many connections", "too_many_connections")
    error.headers["Connection"] = "close"
    return error


def to_api_error(error: Exception) -> ApiError:
    """Describe why a request could not be decoded."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return retry_later(429, str(error), "queue_full")
    if isinstance(error, EngineStoppedError):
        return ApiError(503, str(error), code="engine_stopped")
    if isinstance(error, UnknownAdapterError):  # perhaps unloaded since the request was prepared
        return ApiError(404, str(error), code="model_not_found")
    if isinstance(error, ValueError):
        again = {"x-should-retry": "false"}  # the OpenAI client repeats a 500 otherwise
        return ApiError(500, f"decoding has failed: {error}", code="decoding_failed", headers=again)
    return ApiError(500, "an error in the server has ended this request; its log says more", code="internal_error")


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse the body of a request.

    Raises:
        ApiError: it is not a JSON object.
    """
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return value


def to_json(value: Any) -> bytes:
    """Format a value in ASCII, so that no client of a stream takes a character for the end of a line."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def shorten(text: str, limit: int = 60) -> str:
    """Cut a text of a client for an error."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


@dataclass(frozen=True)
class BodyContext:
    """What the validators of a body compare with."""

    limits: ServeSection
    vocab_size: int
    max_length: int
    """Tokens of the model's context."""
    max_characters: int
    """No text that fits the context has more."""
    has_vision: bool
    """Chats may have images."""


Body = TypeVar("Body", bound=Section)


def parse_body(values: dict[str, Any], kind: type[Body], context: BodyContext) -> Body:
    """Check the fields of a body, from which unknown ones are removed if the server ignores them; null is no field.

    Raises:
        ApiError: a key is unknown or not supported, a field has a wrong type or value, or fields contradict each other.
    """
    values = {key: value for key, value in values.items() if value is not None}
    try:
        return kind.model_validate(values, context=context)
    except ValidationError as error:
        places = [item["loc"] for item in error.errors(include_url=False) if item["type"] == "extra_forbidden"]
        if not places or context.limits.unknown_fields == "refuse":
            raise to_refusal(error, kind, values) from None
    for place in places:
        _log_ignored(shorten(".".join(part for part in place if isinstance(part, str))))
    try:
        return kind.model_validate(values, context=context, extra="ignore")
    except ValidationError as error:
        raise to_refusal(error, kind, values) from None


@lru_cache(MAX_LOGGED_FIELDS)
def _log_ignored(name: str) -> None:
    """Write a field to the log, once."""
    LOGGER.warning("the field %r of a request is ignored (serve.unknown_fields)", name)


def to_refusal(error: ValueError, kind: type[Section], keys: Collection[str]) -> ApiError:
    """Describe the first problem of a request.

    Args:
        keys: fields of the request, one of which is wrong.
    """
    message, param, code, text_key = str(error), None, None, getattr(kind, "text_key", None)
    if isinstance(error, ValidationError):
        problem = error.errors(include_url=False, include_context=False)[0]
        parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]]
        param, value = shorten("".join(parts).removeprefix(".")), problem["input"]
        message = str(problem["msg"]).removeprefix("Value error, ")
        if problem["type"] == "missing":
            message, code = f"{param} is missing", "missing_required_parameter"
        elif problem["type"] == "extra_forbidden":
            reason, *_ = UNSUPPORTED_FIELDS.get(param, ("",))
            is_unknown = len(parts) == 1 and not reason
            message = f"unknown field {param!r}{_hint(param, kind)}" if is_unknown else f"{param} is not supported"
            message += reason and f": {reason}"
            code = "unknown_parameter" if is_unknown else "unsupported_parameter"
        elif param:
            field = f"{param} = {shorten(repr(value))}" if isinstance(value, str | int | float | bool) else param
            message = f"{field}: {message}"
    elif place := re.match(r"messages(\[\d+\]\.content)?\[\d+\](?=: )", message):
        param = place[0]
    if "max_position_embeddings" in message:
        param, code = param or text_key, "context_length_exceeded"
    return ApiError(400, message, param=param or find_key(message, keys) or text_key, code=code)


def find_key(message: str, keys: Iterable[str]) -> str | None:
    """Find the key that a message is about: the first one that it names."""
    words = re.findall(r"\w+", message)
    return min((key for key in keys if key in words), key=words.index, default=None)


def _hint(key: str, kind: type[Section]) -> str:
    similar = difflib.get_close_matches(key[:64], kind.model_fields, n=1, cutoff=0.7)
    return f": did you mean {similar[0]}?" if similar else ""


def is_neutral(key: str, value: Any) -> bool:
    """Whether a field that is not supported asks for nothing."""
    _, *neutral_values = UNSUPPORTED_FIELDS.get(key, ("",))
    return any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in neutral_values)
