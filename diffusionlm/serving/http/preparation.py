"""From the body of a request to what the engine decodes: texts become token ids, settings and constraints are checked.

Nothing here waits for the engine; a long text or a constraint takes a while, so it runs in threads beside the event
loop.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np

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
from diffusionlm.inference.settings import DecodingSettings, check_token_ids, resolve_settings
from diffusionlm.inference.text import token_texts
from diffusionlm.serving.http.bodies import (
    NUM_SEEDS,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    InfillBody,
    TokenizeOptions,
)
from diffusionlm.serving.http.chat import ChatBody
from diffusionlm.serving.http.errors import ApiError
from diffusionlm.serving.http.parsing import BodyContext, parse_body, to_refusal
from tokenizer import CHAT_TEMPLATES, ChatTemplate, Tokenizer, render_chat
from tokenizer.tool_calls import ToolCallFormat, find_tool_call_format

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
    """One for each choice: ``n`` of the first prompt, then those of the next one; then one for each prompt whose
    log-probabilities are asked for."""
    num_prompt_tokens: tuple[int, ...]
    """Tokens of the text of each choice as it was sent, whatever token healing takes back."""
    tool_format: ToolCallFormat | None
    """How the answer writes calls of tools. None: it has none."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def num_choices(self) -> int:
        return len(self.num_prompt_tokens)


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

    def tokenize(self, values: dict[str, Any]) -> dict[str, Any]:
        """The response of ``/tokenize``: the tokens of a prompt or of the messages of a chat, without token healing.

        Raises:
            ApiError: the request is wrong.
        """
        own = {key: values.pop(key, None) for key in TokenizeOptions.model_fields}
        options = parse_body(
            {key: item for key, item in own.items() if item is not None}, TokenizeOptions, self.context
        )
        kind = CompletionBody if values.get("messages") is None else ChatBody
        body = parse_body(values, kind, self.context)
        self.find_model(body.model)
        builder = RequestBuilder(self.tokenizer, resolve_settings(self._generation, self.model), self._template)
        try:
            if isinstance(body, CompletionBody) and (len(body.prompt) > 1 or not isinstance(body.prompt[0], str)):
                raise ValueError("prompt: must be one text")
            if isinstance(body, ChatBody) and options.add_special_tokens:
                raise ValueError(
                    "add_special_tokens has no effect on messages, whose template writes its own: remove it"
                )
            token_ids = list(self._encode(body, builder)[0].token_ids)
        except ValueError as error:
            raise to_refusal(error, kind, {**values, **own}) from None
        if options.add_special_tokens is False and isinstance(body, CompletionBody):
            token_ids = token_ids[len(builder.prefix_ids) :]
        texts = token_texts(self.tokenizer, token_ids) if options.return_token_strs else None
        length = self.model.max_position_embeddings
        return {"count": len(token_ids), "max_model_len": length, "tokens": token_ids, "token_strs": texts}

    def detokenize(self, values: dict[str, Any]) -> dict[str, Any]:
        """The response of ``/detokenize``: the text of tokens.

        Raises:
            ApiError: the request is wrong, or a token has no text.
        """
        body = parse_body(values, DetokenizeBody, self.context)
        self.find_model(body.model)
        try:
            return {"prompt": self.tokenizer.decode(body.tokens)}
        except ValueError as error:
            raise ApiError(400, f"tokens: {error}", param="tokens") from None

    def _prepare(self, body: GenerationBody, cache_salt: str) -> PreparedCall:
        name = self.find_model(body.model)
        config = body.build_config(self._generation).model_copy(update={"max_new_tokens": None})
        settings = resolve_settings(config, self.model)
        builder = RequestBuilder(self.tokenizer, settings, self._template, self._find_healer(body, settings))
        tool_format = None
        if isinstance(body, ChatBody) and body.callable_tools and self._template is not None:
            tool_format = find_tool_call_format(self._template)
        texts = self._encode(body, builder)
        lengths = [self._count_new_tokens(text, body, settings) for text in texts]
        self._check_limits(body, texts, lengths, settings)
        options: dict[str, Any] = {
            "constraints": self._compile_constraints(body, texts[0].options, tool_format),
            "logit_bias": {int(token): value for token, value in body.logit_bias.items()},
            "num_top_logprobs": body.num_alternatives or 0,
            "with_canvas": body.diffusing,
            "adapter": None if name == self.names[0] else name,
            "cache_salt": cache_salt,
        }
        if isinstance(body, InfillBody):
            choices = self._encode_choices(body, texts[0])
            options |= {"is_read": body.read, "choices": choices, "remask": body.remask}
        known_texts = self._score_prompts(body, texts, settings, options)
        seed = secrets.randbelow(_RANDOM_SEEDS) if body.seed is None else body.seed
        requests: list[PreparedRequest] = []
        for text, length in zip(texts, lengths, strict=True):
            max_new_tokens = None if config.total_length is not None else length
            if length:
                request = builder.prepare(text, 0, "the text", max_new_tokens=max_new_tokens, **options)
            else:  # max_tokens = 0: nothing is decoded
                request = prepare_known_text(settings, text.plain_token_ids, np.arange(0))
            requests += [replace(request, seed=(seed + len(requests) + index) % NUM_SEEDS) for index in range(body.n)]
        counts = [text.num_given_tokens for text in texts for _ in range(body.n)]
        return PreparedCall(name, body, (*requests, *known_texts), tuple(counts), tool_format)

    def _score_prompts(
        self, body: GenerationBody, texts: Sequence[HealedText], settings: DecodingSettings, options: dict[str, Any]
    ) -> list[PreparedRequest]:
        """Requests for the log-probabilities of the prompts; none if they are not asked for.

        Raises:
            ValueError: the prompts have too many tokens.
        """
        num_top = body.num_prompt_alternatives
        if num_top is None:
            return []
        count, limit = sum(len(text.plain_token_ids) for text in texts), self.limits.max_prompt_logprobs
        if count > limit:
            key = "echo with logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
            raise ValueError(
                f"{key}: the prompts have {count} tokens, and this server computes the log-probabilities of at most "
                f"{limit} of a request (serve.max_prompt_logprobs)"
            )
        requests = []
        for index, text in enumerate(texts):
            prompt = body.prompt[index] if isinstance(body, CompletionBody) else ""
            data = self.tokenizer.decode_bytes(text.plain_token_ids)
            end = (prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)).encode()
            own = RequestOptions(
                num_top_logprobs=num_top,
                adapter=options["adapter"],
                cache_salt=options["cache_salt"],
                segment_starts=text.options.segment_starts,
                repeated_bytes=(data[: -len(end)] if end and data.endswith(end) else b"",),  # of tokens before it
            )
            requests.append(prepare_prompt_scoring(settings, text.plain_token_ids, own))
        return requests

    def _find_healer(self, body: GenerationBody, settings: DecodingSettings) -> TokenHealer | None:
        if isinstance(body, CompletionBody) and len(body.prompt) > 1 and body.constraint is not None:
            return None  # each end of a prompt would need an automaton of its own
        if isinstance(body, InfillBody) and body.choices and body.constraint is not None:
            return None  # the constraint may not fit what healing takes back, and choices are encoded before that
        is_healed = self.limits.token_healing if body.token_healing is None else body.token_healing
        excluded_token_ids = frozenset((*settings.forbidden_token_ids, *settings.stop_token_ids))
        return self._get_healer(excluded_token_ids) if is_healed else None

    def _encode(self, body: GenerationBody, builder: RequestBuilder) -> list[HealedText]:
        """Encode each text of a request."""
        match body:
            case ChatBody():
                if self._template is None:
                    raise ValueError(
                        "messages: the model has no chat template: use /v1/completions, or start the server with "
                        f"--chat-template NAME, one of {', '.join(CHAT_TEMPLATES)}, or a file with Jinja"
                    )
                return [self._encode_chat(body, self._template, builder)]
            case InfillBody():
                return [self._encode_segments(body.segments, builder)]
            case CompletionBody():
                return [self._encode_prompt(prompt, body, builder) for prompt in body.prompt]
        raise AssertionError(f"{type(body).__name__} has no encoding")

    def _encode_chat(self, body: ChatBody, template: ChatTemplate, builder: RequestBuilder) -> HealedText:
        messages = [message.to_template() for message in body.messages]
        tools, variables = [tool.to_template() for tool in body.tools] or None, body.chat_template_kwargs
        has_prompt = not body.continue_final_message and body.add_generation_prompt is not False
        if tools:
            with_tools, without_tools = (
                render_chat(template, messages, add_generation_prompt=has_prompt, tools=value, **variables)
                for value in (tools, None)
            )
            if with_tools == without_tools:
                raise ValueError(
                    "tools: the chat template ignores them: use another one, such as --chat-template chatml"
                )
        return builder.encode_chat(
            messages, tools, variables=variables, has_prompt=has_prompt, continues_answer=body.continue_final_message
        )

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

    def _encode_segments(
        self, segments: Sequence[str | int | Mapping[str, str]], builder: RequestBuilder
    ) -> HealedText:
        """Encode texts, masked spans and drafts as a canvas."""
        self._require_mask_token_id()
        pieces: list[tuple[str, int | list[int]]] = []
        text = ""
        for segment in segments:
            if isinstance(segment, str):
                text += segment
            else:
                pieces.append((text, segment if isinstance(segment, int) else self.tokenizer.encode(segment["draft"])))
                text = ""
        return builder.encode_spans([*pieces, (text, 0)])

    def _encode_choices(self, body: InfillBody, text: HealedText) -> dict[int, list[list[int]]]:
        """Token ids of the choices of each masked span, by its first position."""
        lengths, repeated_bytes = text.options.span_lengths, text.options.repeated_bytes
        if body.choices is not None and len(body.choices) != len(lengths):
            raise ValueError(f"choices has {len(body.choices)} entries for {len(lengths)} masked spans")
        count = sum(len(texts or ()) * length for texts, length in zip(body.choices or (), lengths, strict=False))
        if count > self.limits.max_alternatives:
            raise ValueError(
                f"choices have {count} tokens together: this server allows at most {self.limits.max_alternatives} "
                "(serve.max_alternatives)"
            )
        masked_positions = [index for index, token in enumerate(text.token_ids) if token == self.model.mask_token_id]
        encoded: dict[int, list[list[int]]] = {}
        for number, choices in enumerate(body.choices or ()):
            prefix, start = repeated_bytes[number].decode(), masked_positions[sum(lengths[:number])]
            for choice in choices or ():
                token_ids = self.tokenizer.encode(prefix + choice)
                if len(token_ids) != lengths[number]:
                    raise ValueError(
                        f"choices: {choice[:60]!r} has {len(token_ids)} tokens, and masked span {number + 1} has "
                        f"{lengths[number]}: ask for choices of another length in a request of their own"
                    )
                encoded.setdefault(start, []).append(token_ids)
        return encoded

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
        num_each = body.n + (body.num_prompt_alternatives is not None)
        count, limit = num_each * len(texts), self.limits.max_requests + self.limits.max_waiting
        if count > limit:
            raise ValueError(
                f"{'n' if body.n > 1 else body.text_key}: {count} choices are more than the server accepts at a time "
                f"(serve.max_requests + max_waiting = {limit}): send fewer"
            )
        count = sum(lengths) * body.n * (body.num_alternatives or 0)
        count += sum(len(text.plain_token_ids) for text in texts) * (body.num_prompt_alternatives or 0)
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

    def _compile_constraints(
        self, body: GenerationBody, options: RequestOptions, tool_format: ToolCallFormat | None
    ) -> list[TokenConstraint | None]:
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
                if tool_format is None:
                    constraints[name] = self._compiler.compile_structured_outputs(value)
                else:
                    constraints[name] = self._compiler.compile_tool_calls(call_format=tool_format, **value)
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
