"""From the body of a request to what the engine decodes: texts become token ids, settings and constraints are checked.

Nothing here waits for the engine; a long text or a constraint takes a while, so it runs in threads beside the event
loop.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from config.generation import GenerationConfig
from config.model import ModelConfig
from config.serving.server import ServeSection
from diffusionlm.inference.constraints.compiler import ConstraintCompiler, TokenConstraint
from diffusionlm.inference.healing import HealedText, TokenHealer
from diffusionlm.inference.request_builder import RequestBuilder, suppress_ids_without_text
from diffusionlm.inference.requests import PreparedRequest, RequestOptions
from diffusionlm.inference.settings import DecodingSettings, check_token_ids, resolve_settings
from diffusionlm.serving.http.bodies import (
    NUM_SEEDS,
    BodyContext,
    ChatBody,
    CompletionBody,
    GenerationBody,
    InfillBody,
    to_refusal,
)
from diffusionlm.serving.http.errors import ApiError
from tokenizer import CHAT_TEMPLATES, ChatTemplate, Tokenizer

_KEPT_HEALERS = 8
_RANDOM_SEEDS = 2**48
"""Seeds of requests without one: every JSON parser can hold them."""


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
        max_length = model.max_position_embeddings
        max_characters = max(map(len, tokenizer.vocab)) * max_length
        self.context = BodyContext(limits, model.vocab_size, max_length, max_characters)
        self._template = template
        self._generation = suppress_ids_without_text(generation, tokenizer, model.vocab_size)
        self._get_healer = lru_cache(_KEPT_HEALERS)(self._build_healer)
        resolve_settings(self._generation, model)

    @cached_property
    def _compiler(self) -> ConstraintCompiler:
        """Made at the first request that needs it: it takes a fraction of a second."""
        return ConstraintCompiler(self.tokenizer, self.limits.max_constraint_states)

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

    def prepare(self, body: GenerationBody, cache_salt: str) -> PreparedCall:
        """
        Raises:
            ApiError: the request is wrong, does not fit the model, or is beyond a limit of the server.
        """
        try:
            return self._prepare(body, cache_salt)
        except ValueError as error:
            refusal = to_refusal(error, type(body), body.model_fields_set)
            if "constraint" in refusal.message and refusal.param == body.text_key and body.constraint is not None:
                refusal.param = body.constraint_key
            raise refusal from None

    def _prepare(self, body: GenerationBody, cache_salt: str) -> PreparedCall:
        name = self.find_model(body.model)
        config = body.build_config(self._generation).model_copy(update={"max_new_tokens": None})
        settings = resolve_settings(config, self.model)
        builder = RequestBuilder(self.tokenizer, settings, self._template, self._find_healer(body, settings))
        texts = self._encode(body, builder)
        lengths = [self._count_new_tokens(text, body, settings) for text in texts]
        self._check_limits(body, texts, lengths, settings)
        options: dict[str, Any] = {
            "constraints": self._compile_constraints(body, texts[0].options),
            "logit_bias": {int(token): value for token, value in body.logit_bias.items()},
            "num_top_logprobs": body.num_alternatives or 0,
            "with_canvas": body.diffusing,
            "adapter": None if name == self.names[0] else name,
            "cache_salt": cache_salt,
        }
        seed = secrets.randbelow(_RANDOM_SEEDS) if body.seed is None else body.seed
        requests: list[PreparedRequest] = []
        for text, length in zip(texts, lengths, strict=True):
            max_new_tokens = None if config.total_length is not None else length
            request = builder.prepare(text, 0, "the text", max_new_tokens=max_new_tokens, **options)
            requests += [replace(request, seed=(seed + len(requests) + index) % NUM_SEEDS) for index in range(body.n)]
        counts = [text.num_given_tokens for text in texts for _ in range(body.n)]
        return PreparedCall(name, body, tuple(requests), tuple(counts))

    def _find_healer(self, body: GenerationBody, settings: DecodingSettings) -> TokenHealer | None:
        if isinstance(body, CompletionBody) and len(body.prompt) > 1 and body.constraint is not None:
            return None  # each end of a prompt would need an automaton of its own
        is_healed = self.limits.token_healing if body.token_healing is None else body.token_healing
        excluded_token_ids = frozenset((*settings.forbidden_token_ids, *settings.stop_token_ids))
        return self._get_healer(excluded_token_ids) if is_healed else None

    def _build_healer(self, excluded_token_ids: frozenset[int]) -> TokenHealer:
        return TokenHealer(self.tokenizer, excluded_token_ids)

    def _encode(self, body: GenerationBody, builder: RequestBuilder) -> list[HealedText]:
        """Encode each text of a request."""
        match body:
            case ChatBody():
                if self._template is None:
                    raise ValueError(
                        "messages: the model has no chat template: use /v1/completions, or start the server with "
                        f"--set serve.chat_template=NAME, one of {', '.join(CHAT_TEMPLATES)}"
                    )
                return [builder.encode_chat([message.to_template() for message in body.messages])]
            case InfillBody():
                return [self._encode_segments(body.segments, builder)]
            case CompletionBody():
                return [self._encode_prompt(prompt, body, builder) for prompt in body.prompt]
        raise AssertionError(f"{type(body).__name__} has no encoding")

    def _encode_prompt(self, prompt: str | list[int], body: CompletionBody, builder: RequestBuilder) -> HealedText:
        length = next(iter(body.lengths.values()), None)
        if isinstance(prompt, str):
            if body.suffix is None or length is None:
                return builder.encode_text(prompt, length)
            return self._encode_segments([prompt, length, body.suffix], builder)
        check_token_ids((min(prompt), max(prompt)), self.model, "prompt")
        if body.echo:
            self.tokenizer.decode(prompt)  # the model may have more tokens than the tokenizer
        if body.suffix is None or length is None:
            return HealedText(tuple(prompt))
        mask = self._require_mask_token_id()
        if mask in prompt:
            raise ValueError("prompt: with suffix its ids must not have the mask token")
        ids = (*prompt, *[mask] * length, *self.tokenizer.encode(body.suffix))
        return HealedText(ids, RequestOptions(is_infill=True, span_lengths=(length,)))

    def _encode_segments(self, segments: Sequence[str | int], builder: RequestBuilder) -> HealedText:
        """Encode texts and masked spans as a canvas."""
        self._require_mask_token_id()
        pieces, text = [], ""
        for segment in segments:
            if isinstance(segment, str):
                text += segment
            else:
                pieces.append((text, segment))
                text = ""
        return builder.encode_spans([*pieces, (text, 0)])

    def _require_mask_token_id(self) -> int:
        if self.model.mask_token_id is None:
            raise ValueError("suffix, segments: the model has no mask token, so it cannot fill masked spans")
        return self.model.mask_token_id

    def _count_new_tokens(self, text: HealedText, body: GenerationBody, settings: DecodingSettings) -> int:
        """Return the most new tokens that the answer to a text may have.

        Raises:
            ValueError: they are more than the server allows.
        """
        limit, total_length, key = self.limits.max_tokens, settings.config.total_length, next(iter(body.lengths), None)
        if text.options.is_infill:
            count = sum(text.options.span_lengths)
        elif total_length is not None:
            key, count = "total_length", total_length - len(text.token_ids)
        elif key is not None:
            count = body.lengths[key]
        else:
            room = self.model.max_position_embeddings - len(text.token_ids)
            count = max(1, min(self.limits.default_max_tokens, limit or room, room))
        if limit is not None and count > limit:
            raise ValueError(f"{key or body.text_key}: {count} new tokens, and this server allows at most {limit}")
        return count

    def _check_limits(
        self, body: GenerationBody, texts: Sequence[HealedText], lengths: Sequence[int], settings: DecodingSettings
    ) -> None:
        """Check the number of choices, the size of the answer, and the steps of a choice.

        Raises:
            ValueError: one is beyond a limit of the server.
        """
        count, limit = body.n * len(texts), self.limits.max_requests + self.limits.max_waiting
        if count > limit:
            raise ValueError(
                f"{'n' if body.n > 1 else body.text_key}: {count} choices are more than the server accepts at a time "
                f"(serve.max_requests + max_waiting = {limit}): send fewer"
            )
        count = sum(lengths) * body.n * (body.num_alternatives or 0)
        if count > self.limits.max_alternatives:
            raise ValueError(
                f"choices x new tokens x alternatives (top_logprobs, logprobs) = {count}: this server allows at most "
                f"{self.limits.max_alternatives} (serve.max_alternatives)"
            )
        for text, length in zip(texts, lengths, strict=True):
            self._check_steps(length, len(text.options.span_lengths) or 1, settings)

    def _check_steps(self, num_tokens: int, num_spans: int, settings: DecodingSettings) -> None:
        """Refuse a choice of more steps than the server allows, before its schedules are computed."""
        steps_per_block = settings.config.denoising_steps
        if steps_per_block is None:
            return  # `steps` are those of all blocks; without either there is at most one step per token
        block_length = settings.config.block_length or max(1, num_tokens)
        num_blocks = -(-num_tokens // block_length)
        if settings.block_causal_length is not None:  # blocks of the text: a span touches a part of two more
            num_blocks = min(num_tokens, num_tokens // block_length + 2 * num_spans)
        if num_blocks * steps_per_block > self.limits.max_total_steps:
            raise ValueError(
                f"denoising_steps = {steps_per_block} in up to {num_blocks} blocks: this server allows at most "
                f"{self.limits.max_total_steps} steps in all (serve.max_total_steps)"
            )

    def _compile_constraints(self, body: GenerationBody, options: RequestOptions) -> list[TokenConstraint | None]:
        """Constraints of an answer, one for each masked span; equal ones are compiled once. Empty: any text.

        Raises:
            ValueError: one is wrong, or they are too many or too large together.
        """
        value, num_spans, key = body.constraint, len(options.span_lengths) or 1, body.constraint_key
        if value is None:
            return []
        values = value if options.is_infill and isinstance(value, list) else [value] * num_spans
        if len(values) != num_spans:
            raise ValueError(f"{key} has {len(values)} entries for {num_spans} masked spans")
        names = [None if value is None else json.dumps(value, sort_keys=True) for value in values]
        different = {name: value for name, value in zip(names, values, strict=True) if name is not None}
        if len(different) > self.limits.max_constraints:
            raise ValueError(
                f"{key} has {len(different)} different constraints: this server allows at most "
                f"{self.limits.max_constraints} (serve.max_constraints)"
            )
        constraints: dict[str | None, TokenConstraint] = {}
        for name, value in different.items():
            try:
                constraints[name] = self._compiler.compile_structured_outputs(value)
            except ValueError as error:
                hint = " (serve.max_constraint_states)" if " states" in str(error) else ""
                raise ValueError(f"{key}: {error}{hint}") from None
            num_states = sum(constraint.num_states for constraint in constraints.values())
            if num_states > self.limits.max_constraint_states:
                raise ValueError(
                    f"{key}: the constraints of all masked spans together are too large, {num_states} states or more: "
                    f"this server allows at most {self.limits.max_constraint_states} (serve.max_constraint_states)"
                )
        return [constraints.get(name) for name in names]
