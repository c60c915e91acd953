"""Errors as clients of OpenAI's API expect them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusionlm.serving.requests import EngineStoppedError, QueueFullError

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


def to_api_error(error: Exception) -> ApiError:
    """Describe why a request could not be decoded."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        retry = {"Retry-After": str(RETRY_AFTER_SECONDS)}
        return ApiError(429, str(error), code="queue_full", headers=retry)
    if isinstance(error, EngineStoppedError):
        return ApiError(503, str(error), code="engine_stopped")
    if isinstance(error, ValueError):
        again = {"x-should-retry": "false"}  # the OpenAI client repeats a 500 otherwise
        return ApiError(500, f"decoding has failed: {error}", code="decoding_failed", headers=again)
    return ApiError(500, "an error in the server has ended this request; its log says more", code="internal_error")
