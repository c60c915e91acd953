"""From the body of a request to what the engine is given: texts become token ids, settings are checked.

Nothing here waits for the engine; a long text takes a while, so it runs in threads beside the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from config.generation import GenerationConfig
from config.model import ModelConfig
from config.serving.server import ServeSection
from diffusionlm.inference.constraints.compiler import TokenConstraint
from diffusionlm.inference.healing import HealedText, TokenHealer, encode_pieces
from diffusionlm.inference.request_builder import RequestBuilder, suppress_ids_without_text
from diffusionlm.inference.requests import RequestOptions
from diffusionlm.inference.settings import DecodingSettings, check_token_ids, resolve_settings
from diffusionlm.serving.http.bodies import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    InfillBody,
    ParsedBody,
    build_generation_config,
    check_alternatives,
    check_choice_limits,
    choose_seed,
    combine_max_tokens,
    count_choices,
    find_key,
    parse_logit_bias,
    parse_messages,
    parse_prompts,
    parse_segments,
    parse_stop,
    to_pieces,
)
from diffusionlm.serving.http.errors import ApiError
from diffusionlm.serving.structured_outputs import StructuredOutputs
from tokenizer import CHAT_TEMPLATES, ChatTemplate, Tokenizer

_KEPT_HEALERS = 8


@dataclass(frozen=True)
class Submission:
    """One choice of an answer, as the engine is given it."""

    token_ids: tuple[int, ...]
    """A prompt, or a canvas with mask tokens."""
    config: GenerationConfig
    seed: int
    options: RequestOptions
    num_prompt_tokens: int
    repeated_bytes: tuple[int, ...] = (0,)
    """Bytes of the text before each hole that its first token repeats (`HealedText`); a prompt has one hole."""
    echo: str = ""
    """Text before the answer."""
    hole_positions: tuple[int, ...] = ()
    """Masked positions of a canvas."""

    @property
    def num_new_tokens(self) -> int:
        """The most tokens that the choice may have."""
        if self.hole_positions:
            return len(self.hole_positions)
        if self.config.total_length is not None:
            return self.config.total_length - len(self.token_ids)
        assert self.config.max_new_tokens is not None, "the preparation sets a length"
        return self.config.max_new_tokens


@dataclass(frozen=True)
class PreparedCall:
    """A request whose choices can be submitted."""

    model: str
    """Name of the model in the response."""
    submissions: tuple[Submission, ...]
    fields: GenerationBody
    overrides: Mapping[str, Any]
    """Of the request (`ParsedBody.overrides`)."""
    stop: tuple[str, ...] = ()
    segments: tuple[str | int, ...] = ()
    """Of an infill: texts, and holes as their numbers of tokens."""
    num_alternatives: int | None = None
    """Alternatives of each log-probability; None: no log-probabilities."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def hole_lengths(self) -> tuple[int, ...]:
        return tuple(segment for segment in self.segments if isinstance(segment, int))


@dataclass(frozen=True)
class _Encoded:
    """A text of a request, as token ids."""

    text: HealedText
    segment_starts: tuple[int, ...] = ()
    echo: str = ""
    repeated_bytes: tuple[int, ...] = (0,)
    hole_positions: tuple[int, ...] = ()
    hole_lengths: tuple[int, ...] = ()

    @property
    def is_infill(self) -> bool:
        return bool(self.hole_positions)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the text as it was sent, whatever token healing takes back."""
        return len(self.text.plain_token_ids) - len(self.hole_positions)


class RequestPreparer:
    """Prepares requests for a model and its adapters. Threads may share it.

    Args:
        template: of chats; None: the checkpoint has none.
        generation: settings of what a request leaves open.
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
        """The model, then its adapters."""
        self._template = template
        self._generation = suppress_ids_without_text(generation, tokenizer, model.vocab_size)
        self._prefix_ids = tuple(model.prefix_ids or tokenizer.prefix_ids)
        longest = max(map(len, tokenizer.vocab))
        self._max_text_length = longest * model.max_position_embeddings
        self._structured_outputs = StructuredOutputs(tokenizer, limits.max_constraints, limits.max_constraint_states)
        self._get_healer = lru_cache(_KEPT_HEALERS)(self._build_healer)
        resolve_settings(self._generation, model)

    @property
    def has_chat(self) -> bool:
        """There is a chat template."""
        return self._template is not None

    def prepare_completion(self, body: ParsedBody[CompletionBody], salt: str) -> PreparedCall:
        """
        Raises:
            ApiError: the request is wrong.
        """
        fields = body.fields
        prompts, stop = parse_prompts(fields.prompt, self.limits), parse_stop(fields.stop, self.limits)
        if fields.best_of not in (None, fields.n):
            raise ApiError(400, "best_of is not supported, except if it equals n", param="best_of")
        if fields.echo and fields.logprobs is not None:
            raise ApiError(
                400, "logprobs of a prompt have no meaning in diffusion: remove echo or logprobs", param="logprobs"
            )
        if len(prompts) > 1 and body.fields.has_constraint:  # each end of a prompt would need an automaton of its own
            body = body.without_healing()
        config, max_tokens = self._build_config(body, [("max_tokens", fields.max_tokens)])
        encoded = [self._encode_prompt(prompt, body, config, max_tokens) for prompt in prompts]
        if fields.echo:
            echoes = [item if isinstance(item, str) else self._decode(item) for item in prompts]
            encoded = [replace(item, echo=echo) for item, echo in zip(encoded, echoes, strict=True)]
        return self._build_call(body, encoded, config, max_tokens, salt, stop=stop, num_alternatives=fields.logprobs)

    def prepare_chat(self, body: ParsedBody[ChatBody], salt: str) -> PreparedCall:
        """
        Raises:
            ApiError: the request is wrong, or the template rejects the chat.
        """
        fields = body.fields
        messages, stop = parse_messages(fields.messages), parse_stop(fields.stop, self.limits)
        if fields.top_logprobs is not None and not fields.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs = true", param="top_logprobs")
        if fields.token_healing:
            raise ApiError(400, "token_healing has no effect on a chat", param="token_healing")
        if self._template is None:
            raise ApiError(
                400,
                "the model has no chat template: use /v1/completions, or start the server with --set "
                f"serve.chat_template=NAME, one of {', '.join(CHAT_TEMPLATES)}",
                param="messages",
            )
        config, max_tokens = self._build_config(
            body, [("max_completion_tokens", fields.max_completion_tokens), ("max_tokens", fields.max_tokens)]
        )
        self._check_text_length(sum(len(message["content"]) for message in messages), "messages")
        settings = self._resolve(config, body.overrides)
        try:
            prompt = RequestBuilder(self.tokenizer, settings, self._template).encode_chat(messages)
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from None
        encoded = _Encoded(prompt, tuple(prompt.options.segment_starts))
        alternatives = (fields.top_logprobs or 0) if fields.logprobs else None
        return self._build_call(body, [encoded], config, max_tokens, salt, stop=stop, num_alternatives=alternatives)

    def prepare_infill(self, body: ParsedBody[InfillBody], salt: str) -> PreparedCall:
        """
        Raises:
            ApiError: the request is wrong.
        """
        segments = parse_segments(body.fields.segments, self.limits)
        for key in ("max_new_tokens", "total_length", "stop_token_ids"):
            if key in body.overrides:
                raise ApiError(400, f"{key} has no effect on an infill: its holes have a length", param=key)
        num_masked = sum(segment for segment in segments if isinstance(segment, int))
        if num_masked > self.model.max_position_embeddings:
            raise ApiError(
                400, f"the holes have {num_masked} tokens, more than the model's context of "
                f"{self.model.max_position_embeddings}", param="segments", code="context_length_exceeded",
            )  # fmt: skip
        self._check_text_length(sum(len(segment) for segment in segments if isinstance(segment, str)), "segments")
        config, _ = self._build_config(body, [])
        encoded = self._encode_segments(segments, body, config, "segments")
        return self._build_call(
            body, [encoded], config, None, salt, segments=tuple(segments), num_alternatives=body.fields.logprobs
        )

    def _build_config(
        self, body: ParsedBody[Any], max_tokens: Sequence[tuple[str, int | None]]
    ) -> tuple[GenerationConfig, int | None]:
        """The config of decoding without a length, and the number of new tokens that the request names."""
        check_choice_limits(body.fields, self.limits)
        config = build_generation_config(self._generation, body.overrides, self.limits, self.model.vocab_size)
        self._resolve(config, body.overrides)
        length = combine_max_tokens([*max_tokens, ("max_new_tokens", config.max_new_tokens)])
        if length is not None and config.total_length is not None:
            raise ApiError(400, f"{length[0]} and total_length both set the length: remove one", param=length[0])
        limit = self.limits.max_tokens
        if length is not None and limit is not None and length[1] > limit:
            raise ApiError(400, f"{length[0]} = {length[1]}: this server allows at most {limit}", param=length[0])
        return config.model_copy(update={"max_new_tokens": None}), None if length is None else length[1]

    def _resolve(self, config: GenerationConfig, overrides: Mapping[str, Any]) -> DecodingSettings:
        try:
            return resolve_settings(config, self.model)
        except ValueError as error:
            raise ApiError(400, str(error), param=find_key(str(error), overrides)) from None

    def _encode_prompt(
        self,
        prompt: str | list[int],
        body: ParsedBody[CompletionBody],
        config: GenerationConfig,
        max_tokens: int | None,
    ) -> _Encoded:
        suffix = body.fields.suffix
        if isinstance(prompt, list):
            self._check_token_ids(prompt)
        if suffix is not None:
            return self._encode_hole(prompt, suffix, body, config, max_tokens)
        if isinstance(prompt, list):
            return _Encoded(HealedText(tuple(prompt)))
        self._check_text_length(len(prompt), "prompt")
        healer = self._find_healer(body, config, is_alone=max_tokens == 1)
        try:
            if healer is not None:
                text = healer.heal_prompt(prompt, self._prefix_ids)
                return _Encoded(text, repeated_bytes=(text.num_repeated_bytes,))
            return _Encoded(HealedText((*self._prefix_ids, *self.tokenizer.encode(prompt))))
        except ValueError as error:
            raise ApiError(400, str(error), param="prompt") from None

    def _check_token_ids(self, ids: Sequence[int]) -> None:
        try:
            check_token_ids((min(ids), max(ids)), self.model, "prompt")
        except ValueError as error:
            raise ApiError(400, str(error), param="prompt") from None

    def _encode_hole(
        self,
        prompt: str | list[int],
        suffix: str,
        body: ParsedBody[CompletionBody],
        config: GenerationConfig,
        max_tokens: int | None,
    ) -> _Encoded:
        """Encode a prompt and a suffix, with the masks of the new tokens between them."""
        mask, suffix_ids = self._mask_token_id("suffix"), self._encode_text(suffix, "suffix")
        if max_tokens is None:
            raise ApiError(400, "suffix needs max_tokens, the length of the hole", param="max_tokens")
        for key in ("total_length", "stop_token_ids"):
            if key in body.overrides:
                raise ApiError(400, f"{key} has no effect with suffix: max_tokens is the length of the hole", param=key)
        if max_tokens > self.model.max_position_embeddings:
            raise ApiError(
                400, f"max_tokens = {max_tokens} is more than the model's context of "
                f"{self.model.max_position_embeddings}", param="max_tokens", code="context_length_exceeded",
            )  # fmt: skip
        if isinstance(prompt, str):
            self._check_text_length(len(prompt) + len(suffix), "prompt")
            return self._encode_segments([prompt, max_tokens, suffix], body, config, "prompt")
        if mask in prompt:
            raise ApiError(400, "with suffix the ids of prompt must not have the mask token", param="prompt")
        ids = (*prompt, *[mask] * max_tokens, *suffix_ids)
        positions = tuple(range(len(prompt), len(prompt) + max_tokens))
        return _Encoded(HealedText(ids), hole_positions=positions, hole_lengths=(max_tokens,))

    def _encode_text(self, text: str, param: str) -> list[int]:
        self._check_text_length(len(text), param)
        try:
            return self.tokenizer.encode(text)
        except ValueError as error:
            raise ApiError(400, str(error), param=param) from None

    def _encode_segments(
        self, segments: Sequence[str | int], body: ParsedBody[Any], config: GenerationConfig, param: str
    ) -> _Encoded:
        """Encode texts and holes as a canvas."""
        mask = self._mask_token_id(param)
        pieces = to_pieces(segments)
        healer = self._find_healer(body, config, is_alone=False)
        try:
            text = encode_pieces(self.tokenizer, pieces, self._prefix_ids, mask, healer)
        except ValueError as error:
            raise ApiError(400, str(error), param=param) from None
        masked_positions = [position for position, token in enumerate(text.token_ids) if token == mask]
        return _Encoded(
            text,
            repeated_bytes=tuple(map(len, text.options.repeated_bytes)),
            hole_positions=tuple(masked_positions),
            hole_lengths=tuple(num_masked for _, num_masked in pieces[:-1]),
        )

    def _mask_token_id(self, param: str) -> int:
        if self.model.mask_token_id is None:
            raise ApiError(400, "the model has no mask token, so it cannot fill holes", param=param)
        return self.model.mask_token_id

    def _build_call(
        self,
        body: ParsedBody[Any],
        encoded: Sequence[_Encoded],
        config: GenerationConfig,
        max_tokens: int | None,
        salt: str,
        **options: Any,
    ) -> PreparedCall:
        fields: GenerationBody = body.fields
        name = self.find_model(fields.model)
        seed = choose_seed(fields, count_choices(fields, len(encoded), self.limits))
        logit_bias = parse_logit_bias(fields, self.model.vocab_size)
        submissions: list[Submission] = []
        num_holes = len(encoded[0].hole_lengths) if encoded[0].is_infill else None
        constraints = self._compile_constraints(fields, num_holes)
        for item in encoded:
            ids = item.text.token_ids
            choice_options = RequestOptions(
                allowed_token_ids=item.text.allowed_token_ids,
                segment_starts=item.segment_starts,
                is_infill=item.is_infill,
                with_canvas=fields.diffusing,
                adapter=None if name == self.names[0] else name,
                cache_salt=salt,
                logit_bias=logit_bias,
                num_top_logprobs=options.get("num_alternatives") or 0,
                constraints=constraints,
                repeated_bytes=item.text.options.repeated_bytes,
                span_lengths=item.hole_lengths,
            )
            choice_config = config if item.is_infill else self._set_length(config, len(ids), max_tokens, fields)
            submissions += [
                Submission(
                    ids,
                    choice_config,
                    seed + len(submissions) + choice,
                    choice_options,
                    item.num_prompt_tokens,
                    item.repeated_bytes,
                    item.echo,
                    item.hole_positions,
                )
                for choice in range(fields.n)
            ]
        for submission in submissions[:: fields.n]:
            self._check_work(submission, body, max_tokens)
        num_alternatives = options.get("num_alternatives") or 0
        check_alternatives(fields, num_alternatives * sum(item.num_new_tokens for item in submissions), self.limits)
        return PreparedCall(name, tuple(submissions), fields, body.overrides, **options)

    def _check_work(self, submission: Submission, body: ParsedBody[Any], max_tokens: int | None) -> None:
        """
        Raises:
            ApiError: a choice may have more new tokens or steps than the server allows.
        """
        config, num_tokens = submission.config, submission.num_new_tokens
        limit = self.limits.max_tokens
        if limit is not None and num_tokens > limit:
            is_infill = bool(submission.hole_positions) and max_tokens is None
            param = "segments" if is_infill else "total_length"
            raise ApiError(400, f"{param}: {num_tokens} new tokens, this server allows at most {limit}", param=param)
        settings = resolve_settings(config, self.model)
        block_length, steps_per_block = settings.config.block_length or num_tokens, settings.config.denoising_steps
        if steps_per_block is None:
            return  # `steps` are those of all blocks; without either there is at most one step per token
        num_blocks = -(-num_tokens // block_length)
        if settings.block_causal_length is not None:  # blocks of the text: a hole touches a part of two more
            num_blocks = min(num_tokens, num_tokens // block_length + 2 * len(submission.repeated_bytes))
        num_steps = num_blocks * steps_per_block
        if num_steps > self.limits.max_total_steps:
            raise ApiError(
                400, f"denoising_steps = {steps_per_block} in up to {num_blocks} blocks are {num_steps} steps: "
                f"this server allows at most {self.limits.max_total_steps} in all (serve.max_total_steps)",
                param="denoising_steps" if "denoising_steps" in body.overrides else body.fields.text_key,
            )  # fmt: skip

    def _compile_constraints(self, fields: GenerationBody, num_holes: int | None) -> list[TokenConstraint | None]:
        try:
            return self._structured_outputs.compile(fields.response_format, fields.structured_outputs, num_holes)
        except ValueError as error:
            message = str(error)
            param = "response_format" if message.startswith("response_format") else "structured_outputs"
            raise ApiError(400, message, param=param) from None

    def _set_length(
        self, config: GenerationConfig, prompt_length: int, max_tokens: int | None, fields: GenerationBody
    ) -> GenerationConfig:
        if config.total_length is not None:
            return config
        if max_tokens is None:
            room = self.model.max_position_embeddings - prompt_length
            if room < 1:
                raise ApiError(
                    400, f"the prompt's {prompt_length} tokens leave no room in the model's context of "
                    f"{self.model.max_position_embeddings}", param=fields.text_key, code="context_length_exceeded",
                )  # fmt: skip
            max_tokens = min(self.limits.default_max_tokens, self.limits.max_tokens or room, room)
        return config.model_copy(update={"max_new_tokens": max_tokens})

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

    def _decode(self, ids: Sequence[int]) -> str:
        try:
            return self.tokenizer.decode(ids)
        except ValueError as error:  # the model has more tokens than the tokenizer
            raise ApiError(400, str(error), param="prompt") from None

    def _check_text_length(self, num_characters: int, param: str) -> None:
        """Refuse a text that no tokenization could fit into the context, before it is encoded."""
        if num_characters > self._max_text_length:
            raise ApiError(
                400, f"{param}: {num_characters} characters are more than the model's context of "
                f"{self.model.max_position_embeddings} tokens can hold", param=param, code="context_length_exceeded",
            )  # fmt: skip

    def _find_healer(self, body: ParsedBody[Any], config: GenerationConfig, *, is_alone: bool) -> TokenHealer | None:
        """The healer of a request; None: it wants none."""
        settings = self._resolve(config, body.overrides)
        is_on = self.limits.token_healing if body.fields.token_healing is None else body.fields.token_healing
        excluded_token_ids = frozenset((*settings.forbidden_token_ids, *settings.stop_token_ids))
        return self._get_healer(excluded_token_ids, is_alone) if is_on else None

    def _build_healer(self, excluded_token_ids: frozenset[int], is_alone: bool) -> TokenHealer:
        return TokenHealer(self.tokenizer, excluded_token_ids, max_new_tokens=1 if is_alone else None)
