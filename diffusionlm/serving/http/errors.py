"""JSON of requests, responses and errors, in the form that clients of OpenAI's API expect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json
from starlette.responses import Response

from diffusionlm.serving.requests import EngineStoppedError, QueueFullError, UnknownAdapterError

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
    """Format a value; lone surrogates become escapes, since UTF-8 has no form of them."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


class JsonResponse(Response):
    """A response with a value."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


def shorten(value: Any, limit: int = 60) -> str:
    """Format a value for an error."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
