"""Bodies of requests: OpenAI's fields and the keys of `GenerationConfig`, which pydantic checks.

A key is a field of the endpoint, a key of decoding, or unsupported; only what does not change an answer is ignored.
null stands for an absent field, as clients send it. Limits of the server are the context of the validators. An error
is a ValueError that names its field; `to_refusal` finds it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from config.base import NonEmptyStr, PositiveInt, Section
from config.generation import STRATEGY_KEYS, GenerationConfig
from config.serving.server import ServeSection
from diffusionlm.serving.http.errors import ApiError, shorten

NUM_SEEDS = 2**63
MAX_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
MAX_BIASED_TOKENS = 1024
MAX_STOP_LENGTH = 1024
"""Characters of a stop string."""

SMALLEST_VALUE, LARGEST_VALUE = 1e-4, 100.0
"""Bounds of temperatures and of cfg_scale, except zero: beyond them probabilities overflow."""

LENGTH_KEYS = ("max_completion_tokens", "max_tokens", "max_new_tokens")
"""Fields that set the number of new tokens."""
INFILL_EXCLUDED_KEYS = ("total_length", "stop_token_ids")

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
    "metadata": ({},),
    "chat_template_kwargs": ({},),
}
"""Fields that are not supported -> the values that ask for nothing."""
SERVER_KEYS = {"attention_bias"}
"""Keys of decoding that name files of the server, so a request may not set them."""


@dataclass(frozen=True)
class BodyContext:
    """What the validators of a body compare with."""

    limits: ServeSection
    vocab_size: int
    max_length: int
    """Tokens of the model's context."""
    max_characters: int
    """No text that fits the context has more."""


def _context(info: ValidationInfo) -> BodyContext:
    assert isinstance(info.context, BodyContext)
    return info.context


def _check_text(value: str, info: ValidationInfo) -> str:
    """Refuse a text before it is encoded that no tokenization could fit into the context."""
    value.encode()  # a lone surrogate is a ValueError
    if len(value) > _context(info).max_characters:
        raise ValueError(
            f"{len(value)} characters are more than the model's context can hold, max_position_embeddings = "
            f"{_context(info).max_length}: shorten it"
        )
    return value


def _check_length(value: int, info: ValidationInfo) -> int:
    if value > _context(info).max_length:
        raise ValueError(
            f"{value} tokens are more than the model's context, max_position_embeddings = {_context(info).max_length}"
        )
    return value


def _check_limit(count: int, info: ValidationInfo, key: str) -> None:
    if count > (limit := getattr(_context(info).limits, key)):
        raise ValueError(f"{count} are more than this server allows, serve.{key} = {limit}")


def _check_prompts(value: Any, info: ValidationInfo) -> list[Any]:
    """A text, token ids, or a list of either, as a list."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(item) is int for item in value)):
        value = [value]
    items = value if isinstance(value, list) else []
    _check_limit(len(items), info, "max_prompts")
    are_ids = (isinstance(item, list) and item and all(type(token) is int for token in item) for item in items)
    if not items or not (all(isinstance(item, str) for item in items) or all(are_ids)):
        raise ValueError("must be a text, token ids, or a list of texts or of token ids")
    return [_check_text(item, info) if isinstance(item, str) else item for item in items]


def _check_stop(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("must be a text or a list of texts, none of them empty")
    _check_limit(len(texts), info, "max_stop_strings")
    if any(len(text) > MAX_STOP_LENGTH for text in texts):
        raise ValueError(f"a text has more than {MAX_STOP_LENGTH} characters: shorten it")
    return tuple(texts)


def _check_segments(value: Any, info: ValidationInfo) -> list[str | int]:
    if not isinstance(value, list) or not all(type(item) in (str, int) for item in value):
        raise ValueError("must be a list of texts and of numbers, which are the lengths of masked spans in tokens")
    lengths = [item for item in value if isinstance(item, int)]
    if not lengths or min(lengths) < 1:
        raise ValueError("there must be a masked span, and each at least one token long")
    _check_limit(len(lengths), info, "max_masked_spans")
    _check_length(sum(lengths), info)
    _check_text("".join(item for item in value if isinstance(item, str)), info)
    return value


def _check_bias(value: dict[str, float], info: ValidationInfo) -> dict[str, float]:
    if len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"there are more than {MAX_BIASED_TOKENS} tokens")
    for key in value:
        if not key.isascii() or not key.isdigit() or len(key) > 9 or int(key) >= _context(info).vocab_size:
            raise ValueError(f"{shorten(key)!r} is not a token id below {_context(info).vocab_size}")
    return value


NewTokens = Annotated[PositiveInt, AfterValidator(_check_length)]


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
    content: Annotated[str, BeforeValidator(_join_parts), AfterValidator(_check_text)]
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


class JsonSchemaFormat(Section):
    """``json_schema`` of a `ResponseFormat`; all but the schema has no effect."""

    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Section):
    """OpenAI's constraint on the whole answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('type = "json_schema" needs json_schema, an object with a schema; no other type has one')
        return self


if TYPE_CHECKING:
    DecodingKeys = GenerationConfig
else:
    DecodingKeys = create_model(
        "DecodingKeys",
        __base__=Section,
        __module__=__name__,
        **{
            key: (field.rebuild_annotation(), field)
            for key, field in GenerationConfig.model_fields.items()
            if key not in SERVER_KEYS
        },
    )
    """Keys of decoding. What they mean together is checked with those of the server."""


class GenerationBody(DecodingKeys):
    """Fields of every endpoint that decodes."""

    text_key: ClassVar[str]
    """The field with the text."""
    model: NonEmptyStr | None = None
    n: PositiveInt = 1
    seed: Annotated[int, Field(ge=0, lt=NUM_SEEDS)] | None = None
    max_tokens: NewTokens | None = None
    max_completion_tokens: NewTokens | None = None
    max_new_tokens: NewTokens | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_check_stop)] = ()
    stream: bool = False
    stream_options: StreamOptions | None = None
    diffusing: bool = False
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], AfterValidator(_check_bias)] = Field(
        default_factory=dict
    )
    token_healing: bool | None = None
    return_token_ids: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: Any = None
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    safety_identifier: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_fields(cls, values: Any) -> Any:
        return {key: value for key, value in values.items() if value is not None and not _is_neutral(key, value)}

    @field_validator("n", "steps", "denoising_steps")
    @classmethod
    def _check_number(cls, value: int | None, info: ValidationInfo) -> int | None:
        _check_limit(value or 0, info, "max_choices" if info.field_name == "n" else "max_steps")
        return value

    @field_validator("temperature", "alg_temp", "cfg_scale")
    @classmethod
    def _check_scale(cls, value: float | None) -> float | None:
        if value and not SMALLEST_VALUE <= value <= LARGEST_VALUE:
            raise ValueError(f"must be 0, or {SMALLEST_VALUE:g} to {LARGEST_VALUE:g} on this server")
        return value

    @field_validator("stop_token_ids", "suppress_token_ids", "defer_token_ids")
    @classmethod
    def _check_token_ids(cls, value: tuple[int, ...] | None, info: ValidationInfo) -> tuple[int, ...] | None:
        if value is not None and len(value) > _context(info).vocab_size:
            raise ValueError(f"there are {len(value)} entries, more than the vocabulary has")
        return value

    @model_validator(mode="after")
    def _check_fields_agree(self) -> Self:
        for key in ("stream_options", "diffusing"):
            if getattr(self, key) and not self.stream:
                raise ValueError(f"{key} needs stream = true")
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError("structured_outputs and response_format exclude each other: send one")
        if len({*self.lengths.values()}) > 1:
            raise ValueError(f"{' and '.join(self.lengths)} are all the number of new tokens: set one")
        if self.lengths and self.total_length is not None:
            raise ValueError(f"{', '.join(self.lengths)} and total_length both set the length: remove one")
        return self

    def _refuse_keys(self, keys: Iterable[str]) -> None:
        for key in keys:
            if key in self.model_fields_set:
                raise ValueError(f"{key} has no effect on masked spans, whose lengths are given: remove it")

    @property
    def lengths(self) -> dict[str, int]:
        """The fields that set the number of new tokens, and their values, which are equal."""
        return {key: value for key in LENGTH_KEYS if (value := getattr(self, key)) is not None}

    @property
    def num_alternatives(self) -> int | None:
        """Alternatives of each log-probability; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def constraint_key(self) -> str:
        """The field that constrains the answer."""
        return "structured_outputs" if self.response_format is None else "response_format"

    @property
    def constraint(self) -> Any:
        """What the answer has to be, in the form of vLLM's ``structured_outputs``, or a list of such, one for each
        masked span. None: any text."""
        response_format = self.response_format
        if response_format is None:
            return self.structured_outputs
        if response_format.json_schema is not None:
            return {"json": response_format.json_schema.json_schema}
        return {"json_object": True} if response_format.type == "json_object" else None

    def build_config(self, base: GenerationConfig) -> GenerationConfig:
        """Set the keys of decoding that the request has in the server's config.

        Raises:
            ValueError: a key contradicts another one.
        """
        keys = {key: getattr(self, key) for key in self.model_fields_set & GenerationConfig.model_fields.keys()}
        replaced: set[str] = set()
        if {"steps", "denoising_steps"} & keys.keys():
            replaced |= {"steps", "denoising_steps"}
        if keys.get("remasking_strategy", base.remasking_strategy) != base.remasking_strategy:
            replaced |= {*STRATEGY_KEYS}
        values = {key: getattr(base, key) for key in base.model_fields_set - replaced} | keys
        values["suppress_token_ids"] = (*base.suppress_token_ids, *self.suppress_token_ids)
        return GenerationConfig.model_validate(values)


class CompletionBody(GenerationBody):
    """Fields of a request that continues prompts (``/v1/completions``), or fills a masked span before a suffix."""

    text_key = "prompt"
    prompt: Annotated[list[Any], BeforeValidator(_check_prompts)]
    suffix: Annotated[str, AfterValidator(_check_text)] | None = None
    echo: bool = False
    best_of: PositiveInt | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.best_of not in (None, self.n):
            raise ValueError("best_of is not supported, except if it equals n")
        if self.echo and self.logprobs is not None:
            raise ValueError("logprobs of a prompt have no meaning in diffusion: remove echo or logprobs")
        if self.suffix is not None:
            self._refuse_keys(INFILL_EXCLUDED_KEYS)
            if not self.lengths:
                raise ValueError("suffix needs max_tokens, the length of the masked span")
        return self

    @property
    def num_alternatives(self) -> int | None:
        return self.logprobs


class ChatBody(GenerationBody):
    """Fields of a request that answers a chat (``/v1/chat/completions``)."""

    text_key = "messages"
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        if self.token_healing:
            raise ValueError("token_healing has no effect on a chat")
        return self

    @property
    def num_alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class InfillBody(GenerationBody):
    """Fields of a request that fills the masked spans of a text (``/v1/infill``, not of OpenAI)."""

    text_key = "segments"
    segments: Annotated[list[Any], BeforeValidator(_check_segments)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_infill(self) -> Self:
        self._refuse_keys((*LENGTH_KEYS, "stop", *INFILL_EXCLUDED_KEYS))
        return self

    @property
    def num_alternatives(self) -> int | None:
        return self.logprobs


Body = TypeVar("Body", bound=GenerationBody)


def parse_body(values: Mapping[str, Any], kind: type[Body], context: BodyContext) -> Body:
    """Check the fields of a body.

    Raises:
        ApiError: a key is unknown or not supported, a field has a wrong type or value, or fields contradict each other.
    """
    try:
        return kind.model_validate(values, context=context)
    except ValidationError as error:
        raise to_refusal(error, kind, values) from None


def to_refusal(error: ValueError, kind: type[GenerationBody], keys: Collection[str]) -> ApiError:
    """Describe the first problem of a request.

    Args:
        keys: fields of the request, one of which is wrong.
    """
    message, param, code = str(error), None, None
    if isinstance(error, ValidationError):
        problem = error.errors(include_url=False, include_context=False)[0]
        parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]]
        param, value = shorten("".join(parts).removeprefix(".")), problem["input"]
        message = str(problem["msg"]).removeprefix("Value error, ")
        if problem["type"] == "missing":
            message, code = f"{param} is missing", "missing_required_parameter"
        elif problem["type"] == "extra_forbidden":
            is_unknown = len(parts) == 1 and problem["loc"][0] not in NEUTRAL_VALUES
            message = f"unknown field {param!r}{_hint(param, kind)}" if is_unknown else f"{param} is not supported"
            code = "unknown_parameter" if is_unknown else "unsupported_parameter"
        elif param:
            field = f"{param} = {shorten(repr(value))}" if isinstance(value, str | int | float | bool) else param
            message = f"{field}: {message}"
    if "max_position_embeddings" in message:
        param, code = param or kind.text_key, "context_length_exceeded"
    return ApiError(400, message, param=param or find_key(message, keys) or kind.text_key, code=code)


def find_key(message: str, keys: Iterable[str]) -> str | None:
    """Find the key that a message is about: the first one that it names."""
    words = re.findall(r"\w+", message)
    return min((key for key in keys if key in words), key=words.index, default=None)


def _hint(key: str, kind: type[GenerationBody]) -> str:
    similar = difflib.get_close_matches(key[:64], kind.model_fields, n=1)
    return f": did you mean {similar[0]}?" if similar else ""


def _is_neutral(key: str, value: Any) -> bool:
    """Whether a field that is not supported asks for nothing."""
    neutral_values = NEUTRAL_VALUES.get(key, ())
    return any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in neutral_values)
