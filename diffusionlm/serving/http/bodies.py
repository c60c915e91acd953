"""Bodies of requests: OpenAI's fields, the keys of `GenerationConfig`, and what is refused.

A key is a field of the endpoint, a key of decoding, or unsupported; only what does not change an answer is ignored.
null stands for an absent field, as clients send it.
"""

from __future__ import annotations

import difflib
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import Field, ValidationError

from config.base import NonEmptyStr, PositiveInt, Section
from config.generation import STRATEGY_KEYS, GenerationConfig
from config.serving.server import ServeSection
from diffusionlm.serving.http.errors import ApiError
from diffusionlm.serving.http.json_text import shorten

MAX_SEED = 2**63 - 1
_RANDOM_SEEDS = 2**48
"""Seeds of requests without one: every JSON parser can hold them."""
MAX_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
MAX_BIASED_TOKENS = 1024
MAX_STOP_LENGTH = 1024
"""Characters of a stop string."""

SERVER_KEYS = {"attention_bias": "it names a file of the server"}
"""Keys of `GenerationConfig` that a request may not set, and why."""

MODERATE_KEYS = ("temperature", "alg_temp", "cfg_scale")
SMALLEST_VALUE, LARGEST_VALUE = 1e-4, 100.0
"""Bounds of these keys, except zero: beyond them probabilities overflow."""

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "prediction": (),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "metadata": ({},),
    "prompt_logprobs": (),
    "chat_template_kwargs": ({},),
}
"""Fields of other servers that are not supported -> the values that ask for nothing."""

Body = TypeVar("Body", bound="GenerationBody")


class StreamOptions(Section):
    """Options of a request with ``stream``: what its chunks have besides the text."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    """Chunks are never padded."""


class GenerationBody(Section):
    """Fields of every endpoint that decodes."""

    text_key: ClassVar[str]
    """The field with the text."""
    model: NonEmptyStr | None = None
    n: PositiveInt = 1
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    diffusing: bool = False
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    token_healing: bool | None = None
    return_token_ids: bool = False
    response_format: Any = None
    structured_outputs: Any = None
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    safety_identifier: str | None = None

    @property
    def has_constraint(self) -> bool:
        return self.response_format is not None or self.structured_outputs is not None


class CompletionBody(GenerationBody):
    """Fields of a request that continues prompts (``/v1/completions``), or fills a hole before a suffix."""

    text_key = "prompt"
    prompt: Any = None
    suffix: str | None = None
    max_tokens: PositiveInt | None = None
    stop: Any = None
    echo: bool = False
    best_of: PositiveInt | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None


class ChatBody(GenerationBody):
    """Fields of a request that answers a chat (``/v1/chat/completions``)."""

    text_key = "messages"
    messages: Any = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    stop: Any = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class InfillBody(GenerationBody):
    """Fields of a request that fills the holes of a text (``/v1/infill``, not of OpenAI)."""

    text_key = "segments"
    segments: Any = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


@dataclass(frozen=True)
class ParsedBody(Generic[Body]):
    """A body whose fields have the right types."""

    fields: Body
    overrides: Mapping[str, Any]
    """Keys of `GenerationConfig` that the request sets, and their values."""

    def without_healing(self) -> ParsedBody[Body]:
        return replace(self, fields=self.fields.model_copy(update={"token_healing": False}))


def parse_body(values: Mapping[str, Any], kind: type[Body]) -> ParsedBody[Body]:
    """Divide a body into fields and keys of decoding, and check the fields.

    Raises:
        ApiError: a key is unknown or not supported, or a field has a wrong type or value.
    """
    values = {key: value for key, value in values.items() if value is not None}
    fields = {key: value for key, value in values.items() if key in kind.model_fields}
    overrides = {key: value for key, value in values.items() if key in GenerationConfig.model_fields}
    for key, value in values.items():
        if key not in fields and key not in overrides:
            _check_other_key(key, value, kind)
    for key in SERVER_KEYS.keys() & overrides.keys():
        raise ApiError(400, f"{key} cannot be set by a request: {SERVER_KEYS[key]}", param=key)
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error) from None
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream = true", param="stream_options")
    if body.diffusing and not body.stream:
        raise ApiError(400, "diffusing needs stream = true", param="diffusing")
    return ParsedBody(body, overrides)


def _check_other_key(key: str, value: Any, kind: type[GenerationBody]) -> None:
    """Raise unless a key asks for nothing."""
    if key in NEUTRAL_VALUES:
        if not any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in NEUTRAL_VALUES[key]
        ):
            raise ApiError(400, f"{key} is not supported", param=key, code="unsupported_parameter")
        return
    known = [*kind.model_fields, *GenerationConfig.model_fields]
    similar = difflib.get_close_matches(key[:64], known, n=1)
    hint = f": did you mean {similar[0]}?" if similar else ""
    raise ApiError(400, f"unknown field {shorten(key)!r}{hint}", param=shorten(key), code="unknown_parameter")


def validation_error(error: ValidationError) -> ApiError:
    """Describe the first problem of a validation."""
    problem = error.errors(include_url=False, include_context=False)[0]
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]]
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not parts:
        return ApiError(400, message)
    param = shorten("".join(parts).removeprefix("."))
    return ApiError(400, f"{param} = {_describe(problem['input'])}: {message}", param=param)


def _describe(value: Any) -> str:
    return shorten(repr(value)) if isinstance(value, str | int | float | bool) else type(value).__name__


def build_generation_config(
    base: GenerationConfig, overrides: Mapping[str, Any], limits: ServeSection, vocab_size: int
) -> GenerationConfig:
    """Set what a request names in the server's config of decoding.

    Raises:
        ApiError: a value is wrong, contradicts another one, or is beyond a limit of the server.
    """
    for key, value in overrides.items():
        if isinstance(value, list) and len(value) > vocab_size:
            raise ApiError(400, f"{key} has {len(value)} entries, more than the vocabulary", param=key)
    for key in ("steps", "denoising_steps"):
        value = overrides.get(key)
        if isinstance(value, int) and value > limits.max_steps:
            raise ApiError(400, f"{key} = {value}: this server allows at most {limits.max_steps}", param=key)
    for key in MODERATE_KEYS:
        value = overrides.get(key)
        if isinstance(value, int | float) and value > 0 and not SMALLEST_VALUE <= value <= LARGEST_VALUE:
            raise ApiError(
                400,
                f"{key} = {_describe(value)} must be 0, or {SMALLEST_VALUE:g} to {LARGEST_VALUE:g} on this server",
                param=key,
            )
    values = {key: getattr(base, key) for key in base.model_fields_set}
    replaced: set[str] = set()
    if {"steps", "denoising_steps"} & overrides.keys():
        replaced |= {"steps", "denoising_steps"}
    if overrides.get("remasking_strategy", base.remasking_strategy) != base.remasking_strategy:
        replaced |= {*STRATEGY_KEYS}
    values = {key: value for key, value in values.items() if key not in replaced} | dict(overrides)
    if "suppress_token_ids" in overrides and isinstance(overrides["suppress_token_ids"], list):
        values["suppress_token_ids"] = [*base.suppress_token_ids, *overrides["suppress_token_ids"]]
    try:
        return GenerationConfig.model_validate(values)
    except ValidationError as error:
        problem = validation_error(error)
        raise (
            problem if problem.param else ApiError(400, problem.message, param=find_key(problem.message, overrides))
        ) from None


def find_key(message: str, keys: Iterable[str]) -> str | None:
    """Find the key that a message is about: the first one that it names."""
    words = re.findall(r"\w+", message)
    return min((key for key in keys if key in words), key=words.index, default=None)


def parse_prompts(value: Any, limits: ServeSection) -> list[str | list[int]]:
    """Return the prompts of ``prompt``: a text, token ids, or a list of either.

    Raises:
        ApiError: it is something else, or they are too many.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [value]
        if len(value) > limits.max_prompts:
            raise ApiError(
                400, f"prompt has {len(value)} prompts: this server allows at most {limits.max_prompts}", param="prompt"
            )
        if all(isinstance(item, str) for item in value):
            return list(value)
        if all(isinstance(item, list) and item and all(type(token) is int for token in item) for item in value):
            return list(value)
    if value is None:
        raise ApiError(400, "prompt is missing", param="prompt", code="missing_required_parameter")
    raise ApiError(400, "prompt must be a text, token ids, or a list of texts or of token ids", param="prompt")


def parse_stop(value: Any, limits: ServeSection) -> tuple[str, ...]:
    """Return the stop strings.

    Raises:
        ApiError: they are not texts, empty, or too many.
    """
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ApiError(400, "stop must be a text or a list of texts, none of them empty", param="stop")
    if len(texts) > limits.max_stop_strings:
        raise ApiError(
            400, f"stop has {len(texts)} texts: this server allows at most {limits.max_stop_strings}", param="stop"
        )
    if any(len(text) > MAX_STOP_LENGTH for text in texts):
        raise ApiError(400, f"stop has a text of more than {MAX_STOP_LENGTH} characters: shorten it", param="stop")
    return tuple(texts)


def parse_segments(value: Any, limits: ServeSection) -> list[str | int]:
    """Return the segments of ``/v1/infill``: texts, and holes as their numbers of tokens.

    Raises:
        ApiError: they are something else, or have no hole or too many.
    """
    if value is None:
        raise ApiError(400, "segments is missing", param="segments", code="missing_required_parameter")
    if not isinstance(value, list) or not all(type(item) in (str, int) for item in value):
        raise ApiError(
            400,
            "segments must be a list of texts and of numbers, which are the lengths of holes in tokens",
            param="segments",
        )
    holes = [item for item in value if isinstance(item, int)]
    if not holes or min(holes) < 1:
        raise ApiError(400, "segments needs a hole, and each hole at least one token", param="segments")
    if len(holes) > limits.max_holes:
        raise ApiError(
            400, f"segments has {len(holes)} holes: this server allows at most {limits.max_holes}", param="segments"
        )
    return value


def to_pieces(segments: Sequence[str | int]) -> list[tuple[str, int]]:
    """Pieces of text, each with the number of masked tokens after it; 0 after the last one alone."""
    pieces, text = [], ""
    for segment in segments:
        if isinstance(segment, str):
            text += segment
        else:
            pieces.append((text, segment))
            text = ""
    return [*pieces, (text, 0)]


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat; parts of a text are joined.

    Raises:
        ApiError: a message is not one, or has something else than text.
    """
    if value is None:
        raise ApiError(400, "messages is missing", param="messages", code="missing_required_parameter")
    if not isinstance(value, list) or not value:
        raise ApiError(400, "messages must be a list of messages, at least one", param="messages")
    return [_parse_message(item, f"messages[{index}]") for index, item in enumerate(value)]


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_MESSAGE_KEYS = ("role", "content", "name", "reasoning_content")


def _parse_message(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ApiError(400, f"{name} must be an object with role and content", param=name)
    message = {key: item for key, item in value.items() if item is not None and item != []}
    for key in message:
        if key not in _MESSAGE_KEYS:
            raise ApiError(400, f"{name}.{shorten(key)} is not supported", param=f"{name}.{shorten(key)}")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ApiError(400, f"{name}.role must be one of {', '.join(_ROLES)}", param=f"{name}.role")
    if "content" not in message and value.get("content") != []:
        raise ApiError(400, f"{name}.content is missing", param=f"{name}.content")
    for key in ("name", "reasoning_content"):
        if not isinstance(message.get(key, ""), str):
            raise ApiError(400, f"{name}.{key} must be a text", param=f"{name}.{key}")
    return {**message, "role": _ROLES[role], "content": _parse_content(message.get("content", []), f"{name}.content")}


def _parse_content(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ApiError(400, f"{name} must be a text or a list of text parts", param=name)
    for index, part in enumerate(value):
        is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not is_text:
            raise ApiError(
                400,
                f'{name}[{index}] must be {{"type": "text", "text": "..."}}: only text is supported',
                param=f"{name}[{index}]",
            )
    return "".join(part["text"] for part in value)


def check_choice_limits(fields: GenerationBody, limits: ServeSection) -> None:
    """
    Raises:
        ApiError: ``n`` is beyond the limit.
    """
    if fields.n > limits.max_choices:
        raise ApiError(400, f"n = {fields.n}: this server allows at most {limits.max_choices}", param="n")


def count_choices(fields: GenerationBody, num_prompts: int, limits: ServeSection) -> int:
    """Return the number of choices of a request.

    Raises:
        ApiError: the server never accepts so many at a time.
    """
    count, limit = fields.n * num_prompts, limits.max_requests + limits.max_waiting
    if count > limit:
        raise ApiError(
            400,
            f"{num_prompts} prompts x n = {fields.n} are {count} choices, more than the server accepts at a time "
            f"(serve.max_requests + max_waiting = {limit}): send fewer",
            param="n" if fields.n > 1 else fields.text_key,
        )
    return count


def choose_seed(fields: GenerationBody, num_choices: int) -> int:
    """Return the seed of the first choice, a random one if the request has none; each choice has the next one.

    Raises:
        ApiError: the last choice would have a seed that a request may not have.
    """
    seed = secrets.randbelow(_RANDOM_SEEDS) if fields.seed is None else fields.seed
    if seed + num_choices - 1 > MAX_SEED:
        raise ApiError(
            400,
            f"seed = {seed}: the last of {num_choices} choices would have one above {MAX_SEED}: lower it",
            param="seed",
        )
    return seed


def check_alternatives(fields: GenerationBody, count: int, limits: ServeSection) -> None:
    """
    Raises:
        ApiError: the response may have more log-probabilities of alternatives than the limit.
    """
    if count > limits.max_alternatives:
        raise ApiError(
            400,
            f"choices x new tokens x alternatives = {count}: this server allows at most {limits.max_alternatives} "
            "(serve.max_alternatives)",
            param="top_logprobs" if isinstance(fields, ChatBody) else "logprobs",
        )


def parse_logit_bias(fields: GenerationBody, vocab_size: int) -> dict[int, float]:
    """Return the bias of each token.

    Raises:
        ApiError: a key is not a token of the vocabulary, or they are too many.
    """
    if len(fields.logit_bias or {}) > MAX_BIASED_TOKENS:
        raise ApiError(400, f"logit_bias has more than {MAX_BIASED_TOKENS} tokens", param="logit_bias")
    bias = {}
    for key, value in (fields.logit_bias or {}).items():
        if not key.isascii() or not key.isdigit() or len(key) > 9 or int(key) >= vocab_size:
            raise ApiError(
                400, f"logit_bias: {shorten(key)!r} is not a token id below {vocab_size}", param="logit_bias"
            )
        bias[int(key)] = value
    return bias


def combine_max_tokens(values: Sequence[tuple[str, int | None]]) -> tuple[str, int] | None:
    """Return the one key of these that is set, and its value.

    Raises:
        ApiError: several are set to different values.
    """
    present = [(key, value) for key, value in values if value is not None]
    if len({value for _, value in present}) > 1:
        names = " and ".join(key for key, _ in present)
        raise ApiError(400, f"{names} are all the number of new tokens: set one", param=present[0][0])
    return present[0] if present else None
