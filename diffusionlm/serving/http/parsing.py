"""From the JSON of a body to its fields, and from an error to the field that it is about.

A key is a field of the endpoint, or it is unknown or not supported; only what does not change an answer is ignored.
An error is a ValueError that names its field; `to_refusal` finds it.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from config.base import Section
from config.serving.server import ServeSection
from diffusionlm.serving.http.errors import ApiError, shorten

LOGGER = logging.getLogger(__name__)

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True, False),
    "priority": (0,),
    "echo": (False,),
}
"""Fields that are not supported -> the values that ask for nothing."""
REASONS = {
    "use_beam_search": "there are no beams: set n for several answers",
    "length_penalty": "there is no beam search",
    "early_stopping": "there is no beam search",
    "priority": "requests are served in the order of their arrival",
    "truncate_prompt_tokens": "no text is cut: shorten it",
    "echo": "only /v1/completions repeats its prompt",
    "guided_grammar": "use guided_regex or guided_json",
    "chat_template": "the server's is used: set it with diffusionlm-serve --chat-template",
}
"""Why fields are not supported, and what to do instead."""
MAX_LOGGED_FIELDS = 1000


@dataclass(frozen=True)
class BodyContext:
    """What the validators of a body compare with."""

    limits: ServeSection
    vocab_size: int
    max_length: int
    """Tokens of the model's context."""
    max_characters: int
    """No text that fits the context has more."""
    ignored_fields: set[str] = field(default_factory=set)
    """Names of fields that the log has, at most `MAX_LOGGED_FIELDS`."""


Body = TypeVar("Body", bound=Section)


def parse_body(values: dict[str, Any], kind: type[Body], context: BodyContext) -> Body:
    """Check the fields of a body, from which unknown ones are removed if the server ignores them.

    Raises:
        ApiError: a key is unknown or not supported, a field has a wrong type or value, or fields contradict each other.
    """
    try:
        return kind.model_validate(values, context=context)
    except ValidationError as error:
        places = [item["loc"] for item in error.errors(include_url=False) if item["type"] == "extra_forbidden"]
        refusal = to_refusal(error, kind, values)
        if not places or context.limits.unknown_fields == "refuse":
            raise refusal from None
    try:
        for place in places:
            _drop_field(values, place, context.ignored_fields)
    except (LookupError, TypeError):  # it is a part of a choice among forms
        raise refusal from None
    return parse_body(values, kind, context)


def _drop_field(values: dict[str, Any], place: tuple[int | str, ...], logged_names: set[str]) -> None:
    parent: Any = values
    for part in place[:-1]:
        parent = parent[part]
    del parent[place[-1]]
    name = shorten(".".join(str(part) for part in place if isinstance(part, str)))
    if name not in logged_names and len(logged_names) < MAX_LOGGED_FIELDS:
        logged_names.add(name)
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
            is_unknown = len(parts) == 1 and param not in NEUTRAL_VALUES.keys() | REASONS.keys()
            reason = f": {REASONS[param]}" if param in REASONS else ""
            message = f"unknown field {param!r}{_hint(param, kind)}" if is_unknown else f"{param} is not supported"
            message += reason
            code = "unknown_parameter" if is_unknown else "unsupported_parameter"
        elif param:
            field = f"{param} = {shorten(repr(value))}" if isinstance(value, str | int | float | bool) else param
            message = f"{field}: {message}"
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
    neutral_values = NEUTRAL_VALUES.get(key, ())
    return any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in neutral_values)
