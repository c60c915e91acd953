"""JSON of requests and responses."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from diffusionlm.serving.http.errors import ApiError


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse the body of a request.

    Raises:
        ApiError: it is not a JSON object, or names a key twice.
    """
    try:
        encoding = json.detect_encoding(body)
        if not encoding.startswith("utf-8"):
            raise ValueError(f"it is {encoding.upper()}, encode it as UTF-8")
        value = json.loads(body.decode(encoding), object_pairs_hook=_to_object, parse_constant=_reject_constant)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return value


def to_json(value: Any) -> bytes:
    """Format a value; lone surrogates become escapes, since UTF-8 has no form of them."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def shorten(value: Any, limit: int = 60) -> str:
    """Format a value for an error."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _to_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        duplicate = next(key for key, count in counts.items() if count > 1)
        raise ApiError(400, f"{shorten(duplicate)} is given twice: remove one", param=shorten(duplicate))
    return value


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
