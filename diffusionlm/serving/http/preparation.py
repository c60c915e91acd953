"""From the body of a request to what the engine decodes: texts become token ids, settings and constraints are checked.

Nothing here waits for the engine; a long text or a constraint takes a while, so it runs in threads beside the event
loop.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from config.generation import GenerationConfig
from config.model import ModelConfig
from config.serving.server import ServeSection
from diffusionlm.inference.constraints.compiler import TokenConstraint
from diffusionlm.inference.healing import HealedText, TokenHealer
from diffusionlm.inference.request_builder import RequestBuilder, suppress_ids_without_text
from diffusionlm.inference.requests import PreparedRequest, RequestOptions
from diffusionlm.inference.settings import DecodingSettings, check_token_ids, resolve_settings
from diffusionlm.serving.http.bodies import (
    BodyContext,
    ChatBody,
    CompletionBody,
    GenerationBody,
    InfillBody,
    build_generation_config,
    choose_max_tokens,
    choose_seed,
    count_choices,
    find_key,
)
from diffusionlm.serving.http.errors import ApiError
from diffusionlm.serving.structured_outputs import StructuredOutputs
from tokenizer import CHAT_TEMPLATES, ChatTemplate, Tokenizer

_KEPT_HEALERS = 8


@dataclass(frozen=True)
class PreparedCall:
    """A request whose choices can be submitted."""

    model: str
    """Name of the model in the response."""
    body: GenerationBody
    requests: tuple[PreparedRequest, ...]
    """One for each choice: ``n`` of the first prompt, then those of the next one."""
    num_prompt_tokens: tuple[int, ...]
    """Tokens of the text of each choice as it was sent, whatever token healing takes back."""
    created: int = field(default_factory=lambda: int(time.time()))


class RequestPreparer:
    """Prepares requests for a model and its adapters. Threads may share it.

    Args:
        template: of chats; None: the checkpoint has none.
        generation: settings of what a request leaves open.
        names: of the model, then of its adapters.
    """

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        generation: GenerationConfig,
        limits: ServeSection,
        names: Sequence[str],
    ) -> None:
        self.model, self.tokenizer, self.limits = model, tokenizer, limits
        self.names = tuple(names)
        self.context = BodyContext(limits, model.vocab_size)
        self._template = template
        self._generation = suppress_ids_without_text(generation, tokenizer, model.vocab_size)
        self._max_text_length = max(map(len, tokenizer.vocab)) * model.max_position_embeddings
        self._structured_outputs = StructuredOutputs(tokenizer, limits.max_constraints, limits.max_constraint_states)
        self._get_healer = lru_cache(_KEPT_HEALERS)(self._build_healer)
        resolve_settings(self._generation, model)

    @property
    def has_chat(self) -> bool:
        """There is a chat template."""
        return self._template is not None

    def find_model(self, name: str | None) -> str:
        """Return the name of a model; None: the first one.

        Raises:
            ApiError: there is none of this name.
        """
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise ApiError(
                404,
                f"there is no model {name[:100]!r}: use {' or '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return name

    def prepare(self, body: GenerationBody, cache_salt: str) -> PreparedCall:
        """
        Raises:
            ApiError: the request is wrong, does not fit the model, or is beyond a limit of the server.
        """
        config = build_generation_config(self._generation, body, self.context)
        max_tokens = choose_max_tokens(body, config, self.limits)
        builder = self._find_builder(body, config.model_copy(update={"max_new_tokens": None}))
        name = self.find_model(body.model)
        texts = self._encode(body, builder, max_tokens)
        seed = choose_seed(body, count_choices(body, len(texts), self.limits))
        spans = texts[0].options.span_lengths
        constraints = self._compile_constraints(body, len(spans) if spans else None)
        options: dict[str, Any] = {
            "constraints": constraints,
            "logit_bias": {int(token): value for token, value in body.logit_bias.items()},
            "num_top_logprobs": body.num_alternatives or 0,
            "with_canvas": body.diffusing,
            "adapter": None if name == self.names[0] else name,
            "cache_salt": cache_salt,
        }
        lengths = [self._count_new_tokens(text, body, builder.settings, max_tokens) for text in texts]
        self._check_alternatives(body, sum(lengths) * body.n)
        has_total = builder.settings.config.total_length is not None
        requests: list[PreparedRequest] = []
        for text, length in zip(texts, lengths, strict=True):
            self._check_steps(length, text, body, builder.settings)
            max_new_tokens = None if has_total else length
            with _refusals(body):
                request = builder.prepare(
                    text, seed + len(requests), "the text", max_new_tokens=max_new_tokens, **options
                )
            requests += [replace(request, seed=request.seed + choice) for choice in range(body.n)]
        counts = [text.num_given_tokens for text in texts for _ in range(body.n)]
        return PreparedCall(name, body, tuple(requests), tuple(counts))

    def _find_builder(self, body: GenerationBody, config: GenerationConfig) -> RequestBuilder:
        try:
            settings = resolve_settings(config, self.model)
        except ValueError as error:
            raise ApiError(400, str(error), param=find_key(str(error), body.overrides)) from None
        heals = self.limits.token_healing if body.token_healing is None else body.token_healing
        if isinstance(body, CompletionBody) and len(body.prompt) > 1 and body.has_constraint:
            heals = False  # each end of a prompt would need an automaton of its own
        excluded_token_ids = frozenset((*settings.forbidden_token_ids, *settings.stop_token_ids))
        healer = self._get_healer(excluded_token_ids) if heals else None
        return RequestBuilder(self.tokenizer, settings, self._template, healer)

    def _build_healer(self, excluded_token_ids: frozenset[int]) -> TokenHealer:
        return TokenHealer(self.tokenizer, excluded_token_ids)

    def _encode(self, body: GenerationBody, builder: RequestBuilder, max_tokens: int | None) -> list[HealedText]:
        """Encode each text of a request."""
        match body:
            case CompletionBody(suffix=None):
                return [self._encode_prompt(prompt, body, builder, max_tokens) for prompt in body.prompt]
            case CompletionBody():
                return [self._encode_suffix(prompt, body, builder, max_tokens) for prompt in body.prompt]
            case ChatBody():
                self._check_text_length(sum(len(message.content) for message in body.messages), "messages")
                if self._template is None:
                    raise ApiError(
                        400,
                        "the model has no chat template: use /v1/completions, or start the server with --set "
                        f"serve.chat_template=NAME, one of {', '.join(CHAT_TEMPLATES)}",
                        param="messages",
                    )
                with _wrong_field("messages"):
                    return [builder.encode_chat([message.to_template() for message in body.messages])]
            case InfillBody():
                return [self._encode_segments(body.segments, "segments", builder)]
        raise AssertionError(f"{type(body).__name__} has no encoding")

    def _encode_prompt(
        self, prompt: str | list[int], body: CompletionBody, builder: RequestBuilder, max_tokens: int | None
    ) -> HealedText:
        with _wrong_field("prompt"):
            if isinstance(prompt, str):
                self._check_text_length(len(prompt), "prompt")
                return builder.encode_text(prompt, max_tokens)
            check_token_ids((min(prompt), max(prompt)), self.model, "prompt")
            if body.echo:
                self.tokenizer.decode(prompt)  # the model may have more tokens than the tokenizer
            return HealedText(tuple(prompt))

    def _encode_suffix(
        self, prompt: str | list[int], body: CompletionBody, builder: RequestBuilder, max_tokens: int | None
    ) -> HealedText:
        """Encode a prompt and a suffix, with the masks of the new tokens between them."""
        assert body.suffix is not None
        self._check_text_length(len(body.suffix), "suffix")
        with _wrong_field("suffix"):
            suffix_ids, mask = self.tokenizer.encode(body.suffix), self._mask_token_id
        if max_tokens is None:
            raise ApiError(400, "suffix needs max_tokens, the length of the masked span", param="max_tokens")
        self._check_span_length(max_tokens, "max_tokens")
        if isinstance(prompt, str):
            return self._encode_segments([prompt, max_tokens, body.suffix], "prompt", builder)
        with _wrong_field("prompt"):
            check_token_ids((min(prompt), max(prompt)), self.model, "prompt")
            if body.echo:
                self.tokenizer.decode(prompt)  # the model may have more tokens than the tokenizer
        if mask in prompt:
            raise ApiError(400, "with suffix the ids of prompt must not have the mask token", param="prompt")
        ids = (*prompt, *[mask] * max_tokens, *suffix_ids)
        return HealedText(ids, RequestOptions(is_infill=True, span_lengths=(max_tokens,)))

    def _encode_segments(self, segments: Sequence[str | int], param: str, builder: RequestBuilder) -> HealedText:
        """Encode texts and masked spans as a canvas."""
        self._check_span_length(sum(item for item in segments if isinstance(item, int)), param)
        self._check_text_length(sum(len(item) for item in segments if isinstance(item, str)), param)
        pieces, text = [], ""
        for segment in segments:
            if isinstance(segment, str):
                text += segment
            else:
                pieces.append((text, segment))
                text = ""
        with _wrong_field(param):
            _ = self._mask_token_id
            return builder.encode_spans([*pieces, (text, 0)])

    @property
    def _mask_token_id(self) -> int:
        if self.model.mask_token_id is None:
            raise ValueError("the model has no mask token, so it cannot fill masked spans")
        return self.model.mask_token_id

    def _check_span_length(self, num_masked: int, param: str) -> None:
        context = self.model.max_position_embeddings
        if num_masked > context:
            raise ApiError(
                400, f"{param}: {num_masked} masked tokens are more than the model's context of {context}",
                param=param, code="context_length_exceeded",
            )  # fmt: skip

    def _check_text_length(self, num_characters: int, param: str) -> None:
        """Refuse a text that no tokenization could fit into the context, before it is encoded."""
        if num_characters > self._max_text_length:
            raise ApiError(
                400, f"{param}: {num_characters} characters are more than the model's context of "
                f"{self.model.max_position_embeddings} tokens can hold", param=param, code="context_length_exceeded",
            )  # fmt: skip

    def _count_new_tokens(
        self, text: HealedText, body: GenerationBody, settings: DecodingSettings, max_tokens: int | None
    ) -> int:
        """Return the most new tokens that the answer to a text may have.

        Raises:
            ApiError: there is no room for one, or they are more than the server allows.
        """
        prompt_length, context, limit = len(text.token_ids), self.model.max_position_embeddings, self.limits.max_tokens
        param = body.text_key
        if text.options.is_infill:
            num_tokens = sum(text.options.span_lengths)
        elif settings.config.total_length is not None:
            num_tokens, param = settings.config.total_length - prompt_length, "total_length"
        elif max_tokens is not None:
            num_tokens = max_tokens
        else:
            room = context - prompt_length
            if room < 1:
                raise ApiError(
                    400, f"the prompt's {prompt_length} tokens leave no room in the model's context of {context}",
                    param=param, code="context_length_exceeded",
                )  # fmt: skip
            num_tokens = min(self.limits.default_max_tokens, limit or room, room)
        if limit is not None and num_tokens > limit:
            raise ApiError(400, f"{param}: {num_tokens} new tokens, this server allows at most {limit}", param=param)
        return num_tokens

    def _check_steps(self, num_tokens: int, text: HealedText, body: GenerationBody, settings: DecodingSettings) -> None:
        """Refuse a choice of more steps than the server allows."""
        steps_per_block = settings.config.denoising_steps
        if steps_per_block is None:
            return  # `steps` are those of all blocks; without either there is at most one step per token
        block_length = settings.config.block_length or max(1, num_tokens)
        num_blocks = -(-num_tokens // block_length)
        if settings.block_causal_length is not None:  # blocks of the text: a span touches a part of two more
            num_blocks = min(num_tokens, num_tokens // block_length + 2 * (len(text.options.span_lengths) or 1))
        num_steps = num_blocks * steps_per_block
        if num_steps > self.limits.max_total_steps:
            raise ApiError(
                400, f"denoising_steps = {steps_per_block} in up to {num_blocks} blocks are {num_steps} steps: "
                f"this server allows at most {self.limits.max_total_steps} in all (serve.max_total_steps)",
                param="denoising_steps" if "denoising_steps" in body.overrides else body.text_key,
            )  # fmt: skip

    def _check_alternatives(self, body: GenerationBody, num_tokens: int) -> None:
        """Refuse a request whose response may have more log-probabilities of alternatives than the limit."""
        count = num_tokens * (body.num_alternatives or 0)
        if count > self.limits.max_alternatives:
            raise ApiError(
                400,
                f"choices x new tokens x alternatives = {count}: this server allows at most "
                f"{self.limits.max_alternatives} (serve.max_alternatives)",
                param=body.alternatives_key,
            )

    def _compile_constraints(self, body: GenerationBody, num_spans: int | None) -> list[TokenConstraint | None]:
        try:
            return self._structured_outputs.compile(body.response_format, body.structured_outputs, num_spans)
        except ValueError as error:
            message = str(error)
            param = "response_format" if message.startswith("response_format") else "structured_outputs"
            raise ApiError(400, message, param=param) from None


@contextmanager
def _wrong_field(param: str) -> Iterator[None]:
    """Context whose ValueErrors say what is wrong with a field."""
    try:
        yield
    except ValueError as error:
        raise ApiError(400, str(error), param=param) from None


@contextmanager
def _refusals(body: GenerationBody) -> Iterator[None]:
    """Context whose ValueErrors say why a request does not fit the model."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        if "max_position_embeddings" in message:
            raise ApiError(400, message, param=body.text_key, code="context_length_exceeded") from None
        if "constraint" in message:
            param = "structured_outputs" if body.response_format is None else "response_format"
        else:
            param = find_key(message, body.overrides) or body.text_key
        raise ApiError(400, message, param=param) from None
