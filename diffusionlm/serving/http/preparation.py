"""From the body of a request to what the engine decodes: texts become token ids, settings and constraints are checked.

Nothing here waits for the engine; a long text or a constraint takes a while, so it runs in threads beside the event
loop.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any, Literal, Self

import numpy as np
from pydantic import model_validator

from config.base import NonEmptyStr, NonNegativeInt, Section
from config.generation import GenerationConfig
from config.model import ModelConfig
from config.serving.server import ServeSection
from diffusionlm.inference.constraints.compiler import ConstraintCompiler, TokenConstraint
from diffusionlm.inference.healing import HealedText, TokenHealer
from diffusionlm.inference.request_builder import (
    RequestBuilder,
    prepare_known_text,
    prepare_prompt_scoring,
    suppress_ids_without_text,
)
from diffusionlm.inference.requests import PreparedRequest, RequestOptions
from diffusionlm.inference.settings import DecodingSettings, resolve_settings
from diffusionlm.inference.text import token_texts
from diffusionlm.serving.http.answers import Body, PreparedCall
from diffusionlm.serving.http.bodies import NUM_SEEDS, GenerationBody
from diffusionlm.serving.http.chat import ChatBody
from diffusionlm.serving.http.completions import CompletionBody
from diffusionlm.serving.http.wire import ApiError, BodyContext, parse_body, to_refusal
from diffusionlm.vision.processor import ImageProcessor
from tokenizer import ChatTemplate, Tokenizer
from tokenizer.tool_calls import ToolCallFormat, find_tool_call_format

_KEPT_HEALERS = 8
_RANDOM_SEEDS = 2**48
"""Seeds of requests without one: every JSON parser can hold them."""


class RequestPreparer:
    """Prepares requests for a model and its adapters. Threads may share it.

    Args:
        template: of chats; None: the checkpoint has none.
        generation: settings of what a request leaves open.
        names: of the model, then of its adapters.
        processor: of images in chats; None: the model reads none.
    """

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        generation: GenerationConfig,
        limits: ServeSection,
        names: Sequence[str],
        processor: ImageProcessor | None = None,
    ) -> None:
        self.model, self.tokenizer, self.limits = model, tokenizer, limits
        self.names = tuple(names)
        max_length = model.max_position_embeddings
        max_characters = max(map(len, tokenizer.vocab)) * max_length
        self.context = BodyContext(limits, model.vocab_size, max_length, max_characters, processor is not None)
        self._template, self._processor = template, processor
        self._generation = suppress_ids_without_text(generation, tokenizer, model)
        self._get_healer = lru_cache(_KEPT_HEALERS)(partial(TokenHealer, tokenizer))
        resolve_settings(self._generation, model)

    @cached_property
    def _compiler(self) -> ConstraintCompiler:
        """Made at the first request that needs it: it takes a fraction of a second."""
        limits = self.limits
        return ConstraintCompiler(self.tokenizer, limits.max_constraint_states, limits.max_schema_depth)

    @property
    def has_chat(self) -> bool:
        """There is a chat template."""
        return self._template is not None

    def find_model(self, name: str | None) -> str:
        """Return the name of a model; None: the first one.

        Raises:
            ApiError: there is none of this name.
        """
        if name is not None and name not in self.names:
            message = f"there is no model {name[:100]!r}: use {' or '.join(self.names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name or self.names[0]

    def make_builder(self, body: GenerationBody) -> RequestBuilder:
        """What encodes the texts of a request, with its settings in the server's config.

        Raises:
            ValueError: the settings of a request contradict each other, or do not fit the model.
        """
        config = body.build_config(self._generation).model_copy(update={"max_new_tokens": None})
        settings = resolve_settings(config, self.model)
        is_healed = self.limits.token_healing if body.token_healing is None else body.token_healing
        excluded_token_ids = frozenset((*settings.forbidden_token_ids, *settings.stop_token_ids))
        healer = self._get_healer(excluded_token_ids) if is_healed and body.can_be_healed else None
        return RequestBuilder(self.tokenizer, settings, self._template, healer, self._processor)

    def prepare(self, body: Body, cache_salt: str) -> PreparedCall[Body]:
        """
        Raises:
            ApiError: the request is wrong, does not fit the model, or is beyond a limit of the server.
        """
        name = self.find_model(body.model)
        with refusals_of(body):
            builder = self.make_builder(body)
            settings, texts = builder.settings, body.encode(builder)
            tool_format = None
            if body.callable_tools and self._template is not None:
                tool_format = find_tool_call_format(self._template)
            lengths = [self._count_new_tokens(text, body, settings) for text in texts]
            self._check_limits(body, texts, lengths, settings)
            owner = {"adapter": None if name == self.names[0] else name, "cache_salt": cache_salt}
            options: dict[str, Any] = {
                "constraints": self._compile_constraints(body, texts[0].options, tool_format),
                "logit_bias": body.logit_bias,
                "num_top_logprobs": body.num_alternatives or 0,
                "with_canvas": body.diffusing,
                **owner,
            }
            scored_prompts = self._score_prompts(body, texts, settings, owner)
            seed = secrets.randbelow(_RANDOM_SEEDS) if body.seed is None else body.seed
            requests: list[PreparedRequest] = []
            for text, length in zip(texts, lengths, strict=True):
                max_new_tokens = None if settings.config.total_length is not None else length
                if length:
                    request = builder.prepare(text, 0, "the text", max_new_tokens=max_new_tokens, **options)
                else:  # max_tokens = 0: nothing is decoded
                    request = prepare_known_text(settings, text.plain_token_ids, np.arange(0))
                first = seed + len(requests)
                requests += [replace(request, seed=(first + index) % NUM_SEEDS) for index in range(body.n)]
        counts = [text.num_given_tokens for text in texts for _ in range(body.n)]
        return PreparedCall(name, body, (*requests, *scored_prompts), tuple(counts), tool_format)

    def _score_prompts(
        self, body: GenerationBody, texts: Sequence[HealedText], settings: DecodingSettings, owner: dict[str, Any]
    ) -> list[PreparedRequest]:
        """Requests for the log-probabilities of the prompts; none if they are not asked for."""
        num_top = body.num_prompt_alternatives
        if num_top is None:
            return []
        count = sum(len(text.plain_token_ids) for text in texts)
        self._check_limit(
            "max_prompt_logprobs", count, "prompt_logprobs (or echo with logprobs): tokens of the prompts"
        )
        requests = []
        for index, text in enumerate(texts):
            data, end = self.tokenizer.decode_bytes(text.plain_token_ids), body.prompt_text(index, self.tokenizer)
            start = data.removesuffix(end.encode()) if end else b""  # of tokens before the prompt
            repeated_bytes = (b"" if start == data else start,)
            own: dict[str, Any] = {"num_top_logprobs": num_top, "repeated_bytes": repeated_bytes, **owner}
            options = replace(text.options, allowed_token_ids={}, **own)
            requests.append(prepare_prompt_scoring(settings, text.plain_token_ids, options))
        return requests

    def _count_new_tokens(self, text: HealedText, body: GenerationBody, settings: DecodingSettings) -> int:
        """Return the most new tokens that the answer to a text may have."""
        total_length, key = settings.config.total_length, next(iter(body.lengths), None)
        if text.options.is_infill:
            count = sum(text.options.span_lengths)
        elif total_length is not None:
            key, count = "total_length", total_length - len(text.token_ids)
        elif key is not None:
            count = body.lengths[key]
        else:
            room = self.model.max_position_embeddings - len(text.token_ids)
            count = max(1, min(self.limits.default_max_tokens, self.limits.max_tokens or room, room))
        self._check_limit("max_tokens", count, f"{key or body.text_key}: new tokens")
        return count

    def _check_limits(
        self, body: GenerationBody, texts: Sequence[HealedText], lengths: Sequence[int], settings: DecodingSettings
    ) -> None:
        """Check the number of choices, the size of the answer, and the steps of a choice."""
        num_each = body.n + (body.num_prompt_alternatives is not None)
        count, limit = num_each * len(texts), self.limits.max_requests + self.limits.max_waiting
        if count > limit:
            raise ValueError(
                f"{'n' if body.n > 1 else body.text_key}: {count} choices are more than the server accepts at a time "
                f"(serve.max_requests + max_waiting = {limit}): send fewer"
            )
        count = sum(lengths) * body.n * (body.num_alternatives or 0)
        count += sum(len(text.plain_token_ids) for text in texts) * (body.num_prompt_alternatives or 0)
        self._check_limit("max_alternatives", count, "logprobs, top_logprobs: choices x new tokens x alternatives")
        num_read = sum(len(ids) for text in texts for choices in text.options.choices.values() for ids in choices)
        self._check_limit("max_alternatives", num_read, "choices: their tokens")
        steps = settings.config.denoising_steps
        if steps is not None:  # `steps` are those of all blocks; without either there is at most one per token
            for text, length in zip(texts, lengths, strict=True):
                block_length = settings.config.block_length or max(1, length)
                num_blocks = -(-length // block_length)
                if settings.block_causal_length is not None:  # blocks of the text: a span touches a part of two more
                    num_blocks = min(length, length // block_length + 2 * (len(text.options.span_lengths) or 1))
                what = f"denoising_steps = {steps} in up to {num_blocks} blocks: steps"
                self._check_limit("max_total_steps", num_blocks * steps, what)

    def _check_limit(self, key: str, count: int, what: str) -> None:
        """Refuse more than a limit of the server, before it is computed."""
        limit = getattr(self.limits, key)
        if limit is not None and count > limit:
            raise ValueError(f"{what} = {count}, and this server allows at most {limit} (serve.{key})")

    def _compile_constraints(
        self, body: GenerationBody, options: RequestOptions, tool_format: ToolCallFormat | None
    ) -> list[TokenConstraint | None]:
        """Constraints of an answer, one for each masked span; equal ones are compiled once. Empty: any text."""
        value, num_spans, key = body.constraint, len(options.span_lengths) or 1, body.constraint_key
        if value is None:
            return []
        values = value if options.is_infill and isinstance(value, list) else [value] * num_spans
        if len(values) != num_spans:
            raise ValueError(f"{key} has {len(values)} entries for {num_spans} masked spans")
        names = [None if value is None else json.dumps(value, sort_keys=True) for value in values]
        different = {name: value for name, value in zip(names, values, strict=True) if name is not None}
        self._check_limit("max_constraints", len(different), f"{key}: different constraints")
        constraints: dict[str | None, TokenConstraint] = {}
        for name, value in different.items():
            try:
                if tool_format is None:
                    constraints[name] = self._compiler.compile_structured_outputs(value)
                else:
                    constraints[name] = self._compiler.compile_tool_calls(call_format=tool_format, **value)
            except ValueError as error:
                hint = " (serve.max_constraint_states)" if " states" in str(error) else ""
                raise ValueError(f"{key}: {error}{hint}") from None
            num_states = sum(constraint.num_states for constraint in constraints.values())
            self._check_limit("max_constraint_states", num_states, f"{key}: states of the constraints of all spans")
        return [constraints.get(name) for name in names]


@contextmanager
def refusals_of(body: GenerationBody) -> Iterator[None]:
    """Context whose ValueErrors are problems of a request.

    Raises:
        ApiError: for each of them, with the field that it is about.
    """
    try:
        yield
    except ValueError as error:
        refusal = to_refusal(error, type(body), body.model_fields_set)
        if "constraint" in refusal.message and refusal.param == body.text_key and body.constraint is not None:
            refusal.param = body.constraint_key
        raise refusal from None


class TokenizedPrompt(CompletionBody):
    """Fields of a request for the tokens of a text."""

    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if len(self.prompt) > 1 or not isinstance(self.prompt[0], str):
            raise ValueError("prompt: must be one text")
        return self

    def encode(self, builder: RequestBuilder) -> list[HealedText]:
        num_special = 0 if self.add_special_tokens else len(builder.prefix_ids)
        return [HealedText(text.plain_token_ids[num_special:]) for text in super().encode(builder)]


class TokenizedChat(ChatBody):
    """Fields of a request for the tokens of a chat."""

    add_special_tokens: Literal[False] = False
    """The chat template writes its own."""
    return_token_strs: bool = False


class DetokenizeBody(Section):
    """Fields of a request for the text of tokens."""

    tokens: list[NonNegativeInt]
    model: NonEmptyStr | None = None


def tokenize(preparer: RequestPreparer, values: dict[str, Any]) -> dict[str, Any]:
    """The response of ``/tokenize``: the tokens of a prompt or of the messages of a chat, without token healing.

    Raises:
        ApiError: the request is wrong.
    """
    body: TokenizedPrompt | TokenizedChat
    if values.get("messages") is None:
        body = parse_body(values, TokenizedPrompt, preparer.context)
    else:
        body = parse_body(values, TokenizedChat, preparer.context)
    preparer.find_model(body.model)
    with refusals_of(body):
        [text] = body.encode(preparer.make_builder(body))
    texts = token_texts(preparer.tokenizer, text.plain_token_ids) if body.return_token_strs else None
    length, tokens = preparer.model.max_position_embeddings, list(text.plain_token_ids)
    return {"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": texts}


def detokenize(preparer: RequestPreparer, values: dict[str, Any]) -> dict[str, Any]:
    """The response of ``/detokenize``: the text of tokens.

    Raises:
        ApiError: the request is wrong, or a token has no text.
    """
    body = parse_body(values, DetokenizeBody, preparer.context)
    preparer.find_model(body.model)
    try:
        return {"prompt": preparer.tokenizer.decode(body.tokens)}
    except ValueError as error:
        raise ApiError(400, f"tokens: {error}", param="tokens") from None
