"""Bodies of requests: OpenAI's fields and the keys of `GenerationConfig`, which pydantic checks.

null stands for an absent field, as clients send it. Limits of the server are the context of the validators.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from config.base import NonEmptyStr, NonNegativeInt, PositiveInt, Section
from config.generation import STRATEGY_KEYS, GenerationConfig
from diffusionlm.inference.settings import READ_KEYS
from diffusionlm.serving.http.errors import shorten
from diffusionlm.serving.http.parsing import BodyContext, is_neutral

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
INFILL_EXCLUDED_KEYS = (
    "total_length",
    "stop_token_ids",
    "min_new_tokens",
    "min_tokens",
    "ignore_eos",
    "prompt_logprobs",
)
READ_EXCLUDED_KEYS = (*(key for key in GenerationConfig.model_fields if key not in READ_KEYS), "n", "seed", "stream")
DEFAULT_READ_LOGPROBS = 5
"""Alternatives of each position of a read."""
CONSTRAINT_KEYS = ("structured_outputs", "response_format", "guided_json", "guided_regex", "guided_choice")
"""Fields that constrain the answer; the last ones are vLLM's older spellings of the first."""

SERVER_KEYS = {"attention_bias"}
"""Keys of decoding that name files of the server, so a request may not set them."""


def _context(info: ValidationInfo) -> BodyContext:
    assert isinstance(info.context, BodyContext)
    return info.context


def check_text(value: str, info: ValidationInfo) -> str:
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
    return [check_text(item, info) if isinstance(item, str) else item for item in items]


def _check_stop(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("must be a text or a list of texts, none of them empty")
    _check_limit(len(texts), info, "max_stop_strings")
    if any(len(text) > MAX_STOP_LENGTH for text in texts):
        raise ValueError(f"a text has more than {MAX_STOP_LENGTH} characters: shorten it")
    return tuple(texts)


def _check_segments(value: Any, info: ValidationInfo) -> list[str | int | dict[str, str]]:
    items: list[Any] = value if isinstance(value, list) else [None]
    drafts = [item.get("draft") for item in items if isinstance(item, dict) and item.keys() == {"draft"}]
    lengths = [item for item in items if type(item) is int]
    texts = [item for item in (*items, *drafts) if isinstance(item, str)]
    if len(texts) + len(lengths) != len(items):
        raise ValueError(
            'must be a list of texts, numbers, which are the lengths of masked spans in tokens, and {"draft": "TEXT"}'
        )
    if not (lengths or drafts) or min(lengths, default=1) < 1 or "" in drafts:
        raise ValueError("there must be a masked span, and each at least one token long")
    _check_limit(len(lengths) + len(drafts), info, "max_masked_spans")
    _check_length(sum(lengths), info)
    check_text("".join(texts), info)
    return items


def _check_choices(value: list[list[str] | None]) -> list[list[str] | None]:
    if not all(texts for texts in value if texts is not None) or all(texts is None for texts in value):
        raise ValueError("must be a list with a list of texts for each masked span, null for none")
    return value


def _check_bias(value: dict[str, float], info: ValidationInfo) -> dict[str, float]:
    if len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"there are more than {MAX_BIASED_TOKENS} tokens")
    for key in value:
        if not key.isascii() or not key.isdigit() or len(key) > 9 or int(key) >= _context(info).vocab_size:
            raise ValueError(f"{shorten(key)!r} is not a token id below {_context(info).vocab_size}")
    return value


NewTokens = Annotated[PositiveInt, AfterValidator(_check_length)]


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
    min_tokens: Annotated[NonNegativeInt, AfterValidator(_check_length)] | None = None
    ignore_eos: bool = False
    stop: Annotated[tuple[str, ...], BeforeValidator(_check_stop)] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    diffusing: bool = False
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], AfterValidator(_check_bias)] = Field(
        default_factory=dict
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
        return {key: value for key, value in values.items() if value is not None and not is_neutral(key, value)}

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

    def _refuse_keys(self, keys: Iterable[str], what: str = "masked spans, whose lengths are given") -> None:
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
        return next(iter(self._constraint_keys), "structured_outputs")

    @property
    def _constraint_keys(self) -> list[str]:
        return [key for key in CONSTRAINT_KEYS if getattr(self, key) is not None]

    @property
    def constraint(self) -> Any:
        """What the answer has to be, in the form of vLLM's ``structured_outputs``, or a list of such, one for each
        masked span. None: any text."""
        response_format = self.response_format
        if response_format is None:
            key = next(iter(self._constraint_keys), "structured_outputs")
            value = getattr(self, key)
            return {key.removeprefix("guided_"): value} if key.startswith("guided_") else value
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
        if self.min_tokens is not None:
            values["min_new_tokens"] = self.min_tokens
        if self.ignore_eos:
            values["stop_token_ids"] = self.stop_token_ids or ()
        values["suppress_token_ids"] = (*base.suppress_token_ids, *self.suppress_token_ids)
        return GenerationConfig.model_validate(values)


class CompletionBody(GenerationBody):
    """Fields of a request that continues prompts (``/v1/completions``), or fills a masked span before a suffix."""

    text_key = "prompt"
    prompt: Annotated[list[Any], BeforeValidator(_check_prompts)]
    suffix: Annotated[str, AfterValidator(check_text)] | None = None
    max_tokens: Annotated[NonNegativeInt, AfterValidator(_check_length)] | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("max_tokens = 0 needs echo or prompt_logprobs: there would be no answer")
        if self.suffix is not None:
            self._refuse_keys(INFILL_EXCLUDED_KEYS)
            if not any(self.lengths.values()):
                raise ValueError("suffix needs max_tokens, the length of the masked span")
            if self.num_prompt_alternatives is not None:
                raise ValueError("suffix has no log-probabilities of the prompt: remove echo or logprobs")
        return self

    @property
    def num_prompt_alternatives(self) -> int | None:
        counts = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((count for count in counts if count is not None), default=None)

    @property
    def num_alternatives(self) -> int | None:
        return self.logprobs


class TokenizeOptions(Section):
    """Fields of ``/tokenize`` beside those of a completion or a chat, as vLLM's."""

    add_special_tokens: bool | None = None
    """None: true for a prompt; the template of a chat writes its own."""
    return_token_strs: bool = False


class DetokenizeBody(Section):
    """Fields of a request that decodes tokens (``/detokenize``, as vLLM's)."""

    tokens: list[NonNegativeInt]
    model: NonEmptyStr | None = None


class UnloadAdapterBody(Section):
    """Fields of a request that unloads an adapter (``/v1/unload_lora_adapter``, as vLLM's)."""

    lora_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/@+-]{1,128}$")]


class LoadAdapterBody(UnloadAdapterBody):
    """Fields of a request that loads an adapter (``/v1/load_lora_adapter``, as vLLM's)."""

    lora_path: Annotated[str, Field(min_length=1, max_length=1024)]
    load_inplace: bool = False
    """Replace the adapter that has the name."""


class InfillBody(GenerationBody):
    """Fields of a request that fills the masked spans of a text (``/v1/infill``, not of OpenAI)."""

    text_key = "segments"
    segments: Annotated[list[Any], BeforeValidator(_check_segments)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    remask: Annotated[float, Field(ge=0, le=1)] = 0.0
    read: bool = False
    choices: Annotated[list[list[str] | None], AfterValidator(_check_choices)] | None = None

    @model_validator(mode="after")
    def _check_infill(self) -> Self:
        self._refuse_keys((*LENGTH_KEYS, "stop", *INFILL_EXCLUDED_KEYS))
        if self.read:
            self._refuse_keys(READ_EXCLUDED_KEYS, "a read, which is one forward without sampling")
        elif self.choices is not None:
            raise ValueError("choices needs read = true")
        return self

    @property
    def num_alternatives(self) -> int | None:
        return DEFAULT_READ_LOGPROBS if self.read and self.logprobs is None else self.logprobs
