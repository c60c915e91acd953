"""The fields that the bodies of all decoding endpoints share: OpenAI's, vLLM's and the keys of `GenerationConfig`.

An endpoint's own fields, their encoding and its response are in one module: `completions` (infills too), `chat`.
pydantic checks all fields; limits of the server are the context of the validators.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from config.base import NonEmptyStr, NonNegativeInt, PositiveInt, Section, TupleOf
from config.generation import STRATEGY_KEYS, GenerationConfig
from diffusionlm.inference.healing import HealedText
from diffusionlm.inference.request_builder import RequestBuilder
from diffusionlm.serving.http.wire import BodyContext, is_neutral
from tokenizer import Tokenizer

NUM_SEEDS = 2**63
MAX_TOP_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024

SMALLEST_VALUE, LARGEST_VALUE = 1e-4, 100.0
"""Bounds of temperatures and of cfg_scale, except zero: beyond them probabilities overflow."""

LENGTH_KEYS = ("max_completion_tokens", "max_tokens", "max_new_tokens")
"""Fields that set the number of new tokens."""
SPAN_EXCLUDED_KEYS = ("total_length", "stop_token_ids", "min_new_tokens", "min_tokens", "ignore_eos", "prompt_logprobs")
"""Fields without an effect on masked spans."""
CONSTRAINT_KEYS = ("structured_outputs", "response_format", "guided_json", "guided_regex", "guided_choice")
"""Fields that constrain the answer; the last ones are vLLM's older spellings of the first."""

SERVER_KEYS = {"attention_bias"}
"""Keys of decoding that name files of the server, so a request may not set them."""


def context_of(info: ValidationInfo) -> BodyContext:
    assert isinstance(info.context, BodyContext)
    return info.context


def check_limit(value: Any, info: ValidationInfo, *, key: str) -> Any:
    """Refuse a number, or a list with more items, beyond a limit of the server."""
    count, limit = value if isinstance(value, int) else len(value), getattr(context_of(info).limits, key)
    if count > limit:
        raise ValueError(f"{count} are more than this server allows, serve.{key} = {limit}")
    return value


def check_text(value: str, info: ValidationInfo) -> str:
    """Refuse a text before it is encoded that no tokenization could fit into the context."""
    value.encode()  # a lone surrogate is a ValueError
    if len(value) > context_of(info).max_characters:
        raise ValueError(
            f"{len(value)} characters are more than the model's context can hold, max_position_embeddings = "
            f"{context_of(info).max_length}: shorten it"
        )
    return value


def check_length(value: int, info: ValidationInfo) -> int:
    """Refuse more tokens than the model's context has."""
    if value > context_of(info).max_length:
        raise ValueError(
            f"{value} tokens are more than the model's context, max_position_embeddings = {context_of(info).max_length}"
        )
    return value


NewTokens = Annotated[PositiveInt, AfterValidator(check_length)]
TokenKey = Annotated[int, Field(ge=0, strict=False)]
"""A token id as the key of an object, which JSON writes as text."""
StopString = Annotated[str, Field(min_length=1, max_length=1024)]


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

    @property
    def constraint(self) -> dict[str, Any] | None:
        """In the form of vLLM's ``structured_outputs``."""
        if self.json_schema is not None:
            return {"json": self.json_schema.json_schema}
        return {"json_object": True} if self.type == "json_object" else None


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
    n: Annotated[PositiveInt, AfterValidator(partial(check_limit, key="max_choices"))] = 1
    seed: Annotated[int, Field(ge=0, lt=NUM_SEEDS)] | None = None
    max_tokens: NewTokens | None = None
    max_completion_tokens: NewTokens | None = None
    max_new_tokens: NewTokens | None = None
    min_tokens: Annotated[NonNegativeInt, AfterValidator(check_length)] | None = None
    ignore_eos: bool = False
    stop: Annotated[
        TupleOf[StopString],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        AfterValidator(partial(check_limit, key="max_stop_strings")),
    ] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    diffusing: bool = False
    logit_bias: dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]] = Field(
        default_factory=dict, max_length=MAX_BIASED_TOKENS
    )
    token_healing: bool | None = None
    return_token_ids: bool = False
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    best_of: PositiveInt | None = None
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    safety_identifier: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_fields(cls, values: Any) -> Any:
        return {key: value for key, value in values.items() if not is_neutral(key, value)}

    @field_validator("steps", "denoising_steps")
    @classmethod
    def _check_steps(cls, value: int | None, info: ValidationInfo) -> int | None:
        return None if value is None else cast("int", check_limit(value, info, key="max_steps"))

    @field_validator("temperature", "alg_temp", "cfg_scale")
    @classmethod
    def _check_scale(cls, value: float | None) -> float | None:
        if value and not SMALLEST_VALUE <= value <= LARGEST_VALUE:
            raise ValueError(f"must be 0, or {SMALLEST_VALUE:g} to {LARGEST_VALUE:g} on this server")
        return value

    @field_validator("stop_token_ids", "suppress_token_ids", "defer_token_ids")
    @classmethod
    def _check_token_ids(cls, value: tuple[int, ...] | None, info: ValidationInfo) -> tuple[int, ...] | None:
        if value is not None and len(value) > context_of(info).vocab_size:
            raise ValueError(f"there are {len(value)} entries, more than the vocabulary has")
        return value

    @model_validator(mode="after")
    def _check_fields_agree(self) -> Self:
        for key in ("stream_options", "diffusing"):
            if getattr(self, key) and not self.stream:
                raise ValueError(f"{key} needs stream = true")
        if self.stream and self.num_prompt_alternatives is not None:
            raise ValueError(
                "stream has no log-probabilities of the prompt (prompt_logprobs, echo): remove one of them"
            )
        if len(keys := self._constraint_keys) > 1:
            raise ValueError(f"{' and '.join(keys)} exclude each other: send one")
        if self.min_tokens is not None and self.min_new_tokens not in (0, self.min_tokens):
            raise ValueError("min_tokens and min_new_tokens are the same: send one")
        if self.best_of not in (None, self.n):
            raise ValueError("best_of is not supported, except if it equals n: choose among n answers yourself")
        if len({*self.lengths.values()}) > 1:
            raise ValueError(f"{' and '.join(self.lengths)} are all the number of new tokens: set one")
        if self.lengths and self.total_length is not None:
            raise ValueError(f"{', '.join(self.lengths)} and total_length both set the length: remove one")
        return self

    def refuse_keys(self, keys: Iterable[str], what: str = "masked spans, whose lengths are given") -> None:
        for key in keys:
            if key in self.model_fields_set and getattr(self, key) != type(self).model_fields[key].get_default():
                raise ValueError(f"{key} has no effect on {what}: remove it")

    @property
    def lengths(self) -> dict[str, int]:
        """The fields that set the number of new tokens, and their values, which are equal."""
        return {key: value for key in LENGTH_KEYS if (value := getattr(self, key)) is not None}

    @property
    def num_alternatives(self) -> int | None:
        """Alternatives of each log-probability; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_alternatives(self) -> int | None:
        """Alternatives of each log-probability of the prompt; None: no log-probabilities."""
        return self.prompt_logprobs

    @property
    def constraint_key(self) -> str:
        """The field that constrains the answer."""
        return next(iter(self._constraint_keys), CONSTRAINT_KEYS[0])

    @property
    def _constraint_keys(self) -> list[str]:
        return [key for key in CONSTRAINT_KEYS if getattr(self, key) is not None]

    @property
    def constraint(self) -> Any:
        """What the answer has to be, in the form of vLLM's ``structured_outputs``, or a list of such, one for each
        masked span. None: any text."""
        for key in self._constraint_keys:
            value = getattr(self, key)
            if isinstance(value, ResponseFormat):
                return value.constraint
            return {key.removeprefix("guided_"): value} if key.startswith("guided_") else value
        return None

    @property
    def can_be_healed(self) -> bool:
        """Token healing may take back the ends of the texts."""
        return True

    @property
    def callable_tools(self) -> dict[str, dict[str, Any]]:
        """Name -> schema of the arguments, of the tools that the answer may call."""
        return {}

    def encode(self, builder: RequestBuilder) -> list[HealedText]:
        """Encode each text of the request.

        Raises:
            ValueError: a text does not fit the model, or the chat template rejects it.
        """
        raise NotImplementedError

    def prompt_text(self, index: int, tokenizer: Tokenizer) -> str:
        """A prompt as text; "" if the endpoint has none."""
        return ""

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
        if self.min_tokens is not None:
            values["min_new_tokens"] = self.min_tokens
        if self.ignore_eos:
            values["stop_token_ids"] = self.stop_token_ids or ()
        values["suppress_token_ids"] = (*base.suppress_token_ids, *self.suppress_token_ids)
        return GenerationConfig.model_validate(values)


class UnloadAdapterBody(Section):
    """Fields of a request that unloads an adapter (``/v1/unload_lora_adapter``, as vLLM's)."""

    lora_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/@+-]{1,128}$")]
    lora_int_id: int | None = None
    """Without effect."""


class LoadAdapterBody(UnloadAdapterBody):
    """Fields of a request that loads an adapter (``/v1/load_lora_adapter``, as vLLM's)."""

    lora_path: Annotated[str, Field(min_length=1, max_length=1024)]
    load_inplace: bool = False
    """Replace the adapter that has the name."""
    base_model_name: str | None = None
    """Without effect."""
