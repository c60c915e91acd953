"""Bodies of requests: OpenAI's fields, the keys of `GenerationConfig`, and what is refused.

A key is a field of the endpoint, a key of decoding, or unsupported; only what does not change an answer is ignored.
null stands for an absent field, as clients send it. pydantic checks the fields; limits of the server are the context of
its validators.
"""

from __future__ import annotations

import difflib
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from config.base import NonEmptyStr, PositiveInt, Section
from config.generation import STRATEGY_KEYS, GenerationConfig
from config.serving.server import ServeSection
from diffusionlm.serving.http.errors import ApiError, shorten

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


@dataclass(frozen=True)
class BodyContext:
    """What the validators of a body compare with."""

    limits: ServeSection
    vocab_size: int


def _check_prompts(value: Any, info: ValidationInfo) -> list[Any]:
    """A text, token ids, or a list of either, as a list."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(item) is int for item in value)):
        return [value]
    items = value if isinstance(value, list) else []
    _check_count(items, info, "max_prompts")
    are_ids = (isinstance(item, list) and item and all(type(token) is int for token in item) for item in items)
    if not items or not (all(isinstance(item, str) for item in items) or all(are_ids)):
        raise ValueError("must be a text, token ids, or a list of texts or of token ids")
    return items


def _check_stop(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("must be a text or a list of texts, none of them empty")
    _check_count(texts, info, "max_stop_strings")
    if any(len(text) > MAX_STOP_LENGTH for text in texts):
        raise ValueError(f"a text has more than {MAX_STOP_LENGTH} characters: shorten it")
    return tuple(texts)


def _check_segments(value: Any, info: ValidationInfo) -> list[str | int]:
    if not isinstance(value, list) or not all(type(item) in (str, int) for item in value):
        raise ValueError("must be a list of texts and of numbers, which are the lengths of masked spans in tokens")
    lengths = [item for item in value if isinstance(item, int)]
    if not lengths or min(lengths) < 1:
        raise ValueError("there must be a masked span, and each at least one token long")
    _check_count(lengths, info, "max_masked_spans")
    return value


def _check_bias(value: dict[str, float], info: ValidationInfo) -> dict[str, float]:
    if len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"there are more than {MAX_BIASED_TOKENS} tokens")
    size = info.context.vocab_size if info.context else 0
    for key in value:
        if not key.isascii() or not key.isdigit() or len(key) > 9 or int(key) >= size:
            raise ValueError(f"{shorten(key)!r} is not a token id below {size}")
    return value


def _check_choices(value: int, info: ValidationInfo) -> int:
    limit = info.context.limits.max_choices if info.context else 1
    if value > limit:
        raise ValueError(f"this server allows at most {limit}")
    return value


def _check_count(items: Any, info: ValidationInfo, limit: str) -> None:
    if info.context and len(items) > (largest := getattr(info.context.limits, limit)):
        raise ValueError(f"there are {len(items)}: this server allows at most {largest} (serve.{limit})")


def _join_parts(value: Any) -> Any:
    """The text of a message; parts of a text are joined."""
    if not isinstance(value, list):
        return value
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in value]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError('each part must be {"type": "text", "text": "..."}: only text is supported')
    return "".join(texts)  # type: ignore[arg-type]


class ChatMessage(Section):
    """A message of a chat. What is empty of other fields is ignored."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_join_parts)]
    name: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_fields(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: item for key, item in value.items() if item is not None and (item != [] or key == "content")}

    def to_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        role = "system" if self.role == "developer" else self.role
        return self.model_dump(exclude_none=True) | {"role": role}


class StreamOptions(Section):
    """Options of a request with ``stream``: what its chunks have besides the text."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    """Chunks are never padded."""


class GenerationBody(Section):
    """Fields of every endpoint that decodes; the extra ones are keys of `GenerationConfig`."""

    model_config = ConfigDict(extra="allow")
    text_key: ClassVar[str]
    """The field with the text."""
    model: NonEmptyStr | None = None
    n: Annotated[PositiveInt, AfterValidator(_check_choices)] = 1
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    diffusing: bool = False
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], AfterValidator(_check_bias)] = Field(
        default_factory=dict
    )
    token_healing: bool | None = None
    return_token_ids: bool = False
    response_format: Any = None
    structured_outputs: Any = None
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    safety_identifier: str | None = None

    @property
    def overrides(self) -> Mapping[str, Any]:
        """Keys of `GenerationConfig` that the request sets, and their values."""
        return self.model_extra or {}

    @property
    def has_constraint(self) -> bool:
        return self.response_format is not None or self.structured_outputs is not None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return ()

    @property
    def num_alternatives(self) -> int | None:
        """Alternatives of each log-probability; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def alternatives_key(self) -> str:
        """The field that sets their number."""
        return "logprobs"

    @property
    def token_limits(self) -> dict[str, int | None]:
        """Fields that set the number of new tokens."""
        return {}


class CompletionBody(GenerationBody):
    """Fields of a request that continues prompts (``/v1/completions``), or fills a masked span before a suffix."""

    text_key = "prompt"
    prompt: Annotated[list[Any], BeforeValidator(_check_prompts)]
    suffix: str | None = None
    max_tokens: PositiveInt | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_check_stop)] = ()
    echo: bool = False
    best_of: PositiveInt | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self.stop

    @property
    def num_alternatives(self) -> int | None:
        return self.logprobs

    @property
    def token_limits(self) -> dict[str, int | None]:
        return {"max_tokens": self.max_tokens}


class ChatBody(GenerationBody):
    """Fields of a request that answers a chat (``/v1/chat/completions``)."""

    text_key = "messages"
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_check_stop)] = ()
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self.stop

    @property
    def num_alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def alternatives_key(self) -> str:
        return "top_logprobs"

    @property
    def token_limits(self) -> dict[str, int | None]:
        return {"max_completion_tokens": self.max_completion_tokens, "max_tokens": self.max_tokens}


class InfillBody(GenerationBody):
    """Fields of a request that fills the masked spans of a text (``/v1/infill``, not of OpenAI)."""

    text_key = "segments"
    segments: Annotated[list[Any], BeforeValidator(_check_segments)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def num_alternatives(self) -> int | None:
        return self.logprobs


Body = TypeVar("Body", bound=GenerationBody)


def parse_body(values: Mapping[str, Any], kind: type[Body], context: BodyContext) -> Body:
    """Check the fields of a body.

    Raises:
        ApiError: a key is unknown or not supported, a field has a wrong type or value, or fields contradict each other.
    """
    values = {key: value for key, value in values.items() if value is not None}
    for key, value in values.items():
        if key not in kind.model_fields and key not in GenerationConfig.model_fields:
            _check_other_key(key, value, kind)
        elif key in SERVER_KEYS:
            raise ApiError(400, f"{key} cannot be set by a request: {SERVER_KEYS[key]}", param=key)
    known = {*kind.model_fields, *GenerationConfig.model_fields}
    try:
        body = kind.model_validate({key: value for key, value in values.items() if key in known}, context=context)
    except ValidationError as error:
        raise validation_error(error) from None
    _check_fields_agree(body)
    return body


def _check_fields_agree(body: GenerationBody) -> None:
    for key, is_set in (("stream_options", body.stream_options is not None), ("diffusing", body.diffusing)):
        if is_set and not body.stream:
            raise ApiError(400, f"{key} needs stream = true", param=key)
    match body:
        case CompletionBody():
            if body.best_of not in (None, body.n):
                raise ApiError(400, "best_of is not supported, except if it equals n", param="best_of")
            if body.echo and body.logprobs is not None:
                raise ApiError(
                    400, "logprobs of a prompt have no meaning in diffusion: remove echo or logprobs", param="logprobs"
                )
            if body.suffix is not None:
                _refuse_keys(body, ("total_length", "stop_token_ids"), "max_tokens is the length of the masked span")
        case ChatBody():
            if body.top_logprobs is not None and not body.logprobs:
                raise ApiError(400, "top_logprobs needs logprobs = true", param="top_logprobs")
            if body.token_healing:
                raise ApiError(400, "token_healing has no effect on a chat", param="token_healing")
        case InfillBody():
            _refuse_keys(body, ("max_new_tokens", "total_length", "stop_token_ids"), "its masked spans have a length")


def _refuse_keys(body: GenerationBody, keys: Iterable[str], reason: str) -> None:
    for key in keys:
        if key in body.overrides:
            raise ApiError(400, f"{key} has no effect on an infill: {reason}", param=key)


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
    if problem["type"] == "missing":
        return ApiError(400, f"{param} is missing", param=param, code="missing_required_parameter")
    if problem["type"] == "extra_forbidden":
        return ApiError(400, f"{param} is not supported", param=param, code="unsupported_parameter")
    value = problem["input"]
    field = f"{param} = {_describe(value)}" if isinstance(value, str | int | float | bool) else param
    return ApiError(400, f"{field}: {message}", param=param)


def _describe(value: Any) -> str:
    return shorten(repr(value)) if isinstance(value, str | int | float | bool) else type(value).__name__


def build_generation_config(base: GenerationConfig, body: GenerationBody, context: BodyContext) -> GenerationConfig:
    """Set what a request names in the server's config of decoding.

    Raises:
        ApiError: a value is wrong, contradicts another one, or is beyond a limit of the server.
    """
    overrides, limits = body.overrides, context.limits
    for key, value in overrides.items():
        if isinstance(value, list) and len(value) > context.vocab_size:
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
    replaced: set[str] = set()
    if {"steps", "denoising_steps"} & overrides.keys():
        replaced |= {"steps", "denoising_steps"}
    if overrides.get("remasking_strategy", base.remasking_strategy) != base.remasking_strategy:
        replaced |= {*STRATEGY_KEYS}
    values = {key: getattr(base, key) for key in base.model_fields_set - replaced} | dict(overrides)
    if isinstance(overrides.get("suppress_token_ids"), list):
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


def count_choices(body: GenerationBody, num_prompts: int, limits: ServeSection) -> int:
    """Return the number of choices of a request.

    Raises:
        ApiError: the server never accepts so many at a time.
    """
    count, limit = body.n * num_prompts, limits.max_requests + limits.max_waiting
    if count > limit:
        raise ApiError(
            400,
            f"{num_prompts} prompts x n = {body.n} are {count} choices, more than the server accepts at a time "
            f"(serve.max_requests + max_waiting = {limit}): send fewer",
            param="n" if body.n > 1 else body.text_key,
        )
    return count


def choose_seed(body: GenerationBody, num_choices: int) -> int:
    """Return the seed of the first choice, a random one if the request has none; each choice has the next one.

    Raises:
        ApiError: the last choice would have a seed that a request may not have.
    """
    seed = secrets.randbelow(_RANDOM_SEEDS) if body.seed is None else body.seed
    if seed + num_choices - 1 > MAX_SEED:
        raise ApiError(
            400,
            f"seed = {seed}: the last of {num_choices} choices would have one above {MAX_SEED}: lower it",
            param="seed",
        )
    return seed


def choose_max_tokens(body: GenerationBody, config: GenerationConfig, limits: ServeSection) -> int | None:
    """Return the number of new tokens that a request names; None: none.

    Raises:
        ApiError: two keys differ, it contradicts ``total_length``, or it is beyond the limit of the server.
    """
    fields = {**body.token_limits, "max_new_tokens": config.max_new_tokens}
    present = {key: value for key, value in fields.items() if value is not None}
    if not present:
        return None
    key, value = next(iter(present.items()))
    if len({*present.values()}) > 1:
        raise ApiError(400, f"{' and '.join(present)} are all the number of new tokens: set one", param=key)
    if config.total_length is not None:
        raise ApiError(400, f"{key} and total_length both set the length: remove one", param=key)
    if limits.max_tokens is not None and value > limits.max_tokens:
        raise ApiError(400, f"{key} = {value}: this server allows at most {limits.max_tokens}", param=key)
    return value
