"""How texts, chats, texts with masked spans and token ids become requests: the one place for all callers.

`RequestBuilder` encodes texts for a model; `prepare_request` checks token ids against the model and the settings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from config.generation import GenerationConfig
from config.model import ModelConfig
from diffusionlm.inference.blocks import DecodingBlock, TextSegments, split_into_blocks
from diffusionlm.inference.constraints.token_automaton import ConstrainedSpan
from diffusionlm.inference.healing import HealedText, TokenHealer, encode_pieces
from diffusionlm.inference.images import check_images, check_vision, expand_images
from diffusionlm.inference.requests import DEFAULT_OPTIONS, PreparedRequest, RequestOptions
from diffusionlm.inference.settings import DecodingSettings, check_token_ids, resolve_read_settings, resolve_settings
from diffusionlm.inference.strategies import STRATEGIES
from diffusionlm.vision.images import EncodedImage
from diffusionlm.vision.messages import IMAGE_TOKENS, locate_images, split_images
from diffusionlm.vision.processor import ImageProcessor
from files.usage_error import prefix_errors
from tokenizer import ChatTemplate, Tokenizer, encode_answer, encode_chat, encode_prompt

MAX_TOP_LOGPROBS = 20
SCORED_TOKENS = 64
"""Tokens of a known text that a forward of an autoregressive model scores."""


def suppress_ids_without_text(config: GenerationConfig, tokenizer: Tokenizer, model: ModelConfig) -> GenerationConfig:
    """Suppress the ids of the model that the tokenizer does not have (padding of the embedding, unused ids), and those
    around an image, which a later message of a chat could not repeat."""
    image_ends = {model.vision_start_token_id, model.vision_end_token_id}
    ids_with_text = {*tokenizer.vocab.values(), *tokenizer.special_tokens.values()} - image_ends
    ids_without_text = [token for token in range(model.vocab_size) if token not in ids_with_text]
    return config.model_copy(update={"suppress_token_ids": (*config.suppress_token_ids, *ids_without_text)})


@lru_cache(1)
def _read_placeholders(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer for chats with images, whose messages contain placeholders."""
    return tokenizer.with_visible_tokens(IMAGE_TOKENS)


@dataclass(frozen=True)
class RequestBuilder:
    """Makes requests of texts, for one model and one config."""

    tokenizer: Tokenizer
    settings: DecodingSettings
    template: ChatTemplate | None = None
    """Of chats; None: there are none."""
    healer: TokenHealer | None = None
    """None: no token healing."""
    processor: ImageProcessor | None = None
    """Of the images in chats; None: chats have none."""

    @classmethod
    def from_config(
        cls,
        tokenizer: Tokenizer,
        model: ModelConfig,
        config: GenerationConfig,
        template: ChatTemplate | None = None,
        *,
        token_healing: bool = False,
        processor: ImageProcessor | None = None,
    ) -> RequestBuilder:
        """Resolve the settings of a model whose answers are texts.

        Raises:
            ValueError: the config does not fit the model.
        """
        settings = resolve_settings(suppress_ids_without_text(config, tokenizer, model), model)
        excluded_token_ids = {*settings.forbidden_token_ids, *settings.stop_token_ids}
        healer = TokenHealer(tokenizer, excluded_token_ids) if token_healing else None
        return cls(tokenizer, settings, template, healer, processor)

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Tokens that every text begins with, except for a chat, whose template writes its own."""
        return tuple(self.settings.model.prefix_ids or self.tokenizer.prefix_ids)

    def encode_text(self, text: str, max_new_tokens: int | None = None) -> HealedText:
        """Encode a text to continue.

        Args:
            max_new_tokens: of the request; None: as the config says.
        """
        if self.healer is not None:
            return self.healer.heal_prompt(text, self.prefix_ids, max_new_tokens or self.settings.config.max_new_tokens)
        return HealedText((*self.prefix_ids, *self.tokenizer.encode(text)))

    def encode_spans(
        self, pieces: Sequence[tuple[str, int | Sequence[int]]], prompt: HealedText | None = None
    ) -> HealedText:
        """Encode a text with masked spans.

        Args:
            pieces: of the text, each with the number of masked tokens after it, 0 after the last one alone, or with
                token ids of a draft.
            prompt: what is before the text, such as a chat whose answer it is. None: `prefix_ids`.

        Raises:
            ValueError: there is no mask token.
        """
        mask = self.settings.model.mask_token_id
        prefix_ids = self.prefix_ids if prompt is None else prompt.plain_token_ids
        text = encode_pieces(self.tokenizer, pieces, prefix_ids, mask, self.healer)
        if prompt is None:
            return text
        given = {name: getattr(prompt.options, name) for name in ("images", "processor", "segment_starts")}
        return replace(text, options=replace(text.options, **given))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        answer_prefix: str = "",
        variables: Mapping[str, Any] | None = None,
        *,
        has_prompt: bool = True,
        continues_answer: bool = False,
        folder: Path | None = None,
    ) -> HealedText:
        """Encode a chat whose next answer is to be decoded. It is not healed: templates end with a whole token. The
        ends of its earlier answers are found only if the settings count blocks from turns.

        Args:
            messages: contents may be parts, with images of users (`split_images`).
            answer_prefix: text that the answer begins with.
            variables: of the template.
            has_prompt: the template writes the beginning of an answer.
            continues_answer: the last message is the beginning of the answer.
            folder: where paths of images begin. None: the messages name none.

        Raises:
            ValueError: the template rejects the chat, it has images and the model reads none, or an image is wrong.
        """
        assert self.template is not None, "callers check that there is a template"
        parts, (messages, files) = messages, split_images(messages, folder)
        tokenizer, images = self.tokenizer, list[EncodedImage]()
        if files:
            _, processor = check_vision(self.settings.model, self.processor)
            images = [
                processor.read_image(file, place, resize=True)
                for file, place in zip(files, locate_images(parts), strict=True)
            ]
            tokenizer = _read_placeholders(tokenizer)
        options: dict[str, Any] = {"tools": tools, **(variables or {})}
        token_ids: Sequence[int]
        prefix_ids, ends = tuple(self.tokenizer.encode(answer_prefix)), tuple[int, ...]()
        if continues_answer:
            now = datetime.now()
            answer = encode_answer(tokenizer, self.template, messages, is_finished=False, now=now, **options)
            assert answer is not None, "only an answer that is finished can be left out"
            token_ids, prefix_ids, messages = answer.prompt_ids, (*answer.answer_ids, *prefix_ids), messages[:-1]
        if self.settings.config.block_origin == "turn" and (has_prompt or continues_answer):
            token_ids, ends = encode_prompt(tokenizer, self.template, messages, **options)
        elif not continues_answer:
            token_ids = encode_chat(tokenizer, self.template, messages, add_generation_prompt=has_prompt, **options)
        text = HealedText((*token_ids, *prefix_ids), RequestOptions(segment_starts=ends))
        return expand_images(text, images, self.processor, self.settings.model) if images else text

    def prepare(self, text: HealedText, seed: int = 0, label: str | None = None, **options: Any) -> PreparedRequest:
        """Check an encoded text, with more options (`RequestOptions`). If the constraints allow no text behind what
        token healing takes back, the text is taken as it is.

        Raises:
            ValueError: like `prepare_request`.
        """
        merged = replace(text.options, **options)
        try:
            return prepare_request(self.settings, text.token_ids, seed, merged, label)
        except ValueError:
            if not (any(merged.constraints) and any(merged.repeated_bytes)):
                raise
        plain = replace(merged, allowed_token_ids={}, repeated_bytes=())
        return prepare_request(self.settings, text.plain_token_ids, seed, plain, label)


def prepare_request(
    settings: DecodingSettings,
    token_ids: Sequence[int],
    seed: int = 0,
    options: RequestOptions = DEFAULT_OPTIONS,
    label: str | None = None,
) -> PreparedRequest:
    """Append masks to a prompt, or with ``options.is_infill`` find those of a canvas, and check it.

    Args:
        label: name of the text in errors.

    Raises:
        ValueError: the prompt and the new tokens do not fit the model's context, ``total_length`` leaves no new token,
            a token id is outside the vocabulary, the seed is negative, there are fewer ``steps`` than blocks, a canvas
            is to be filled and the model has no mask token, an option is wrong, no text fits the constraints, or a
            canvas is used with speculation, or a constraint with rejection.
    """
    _check_options(options, settings.model)
    with prefix_errors(label or ("canvas 0" if options.is_infill else "prompt 0")):
        return _prepare(settings, token_ids, seed, options)


def _prepare(
    settings: DecodingSettings, token_ids: Sequence[int], seed: int, options: RequestOptions
) -> PreparedRequest:
    if settings.has_speculation and options.is_infill:
        raise ValueError(
            f'speculation = "{settings.config.speculation}" continues prompts, and has no infilling: remove it for '
            "this request"
        )
    if settings.rejects_drafts and any(options.constraints):
        raise ValueError('acceptance = "rejection" has no constraints: set "keyed", or remove the constraint')
    if options.is_read:
        settings = resolve_read_settings(settings)
    _check_segments(settings, options.segments, len(token_ids))
    check_images(settings.model, token_ids, options)
    if options.is_infill:
        text_length = len(token_ids)
        _check_length(text_length, settings, "shorten the text or its masked spans")
        canvas_L = np.array(token_ids, dtype=np.int64)
        masked_positions = np.flatnonzero(canvas_L == settings.model.required_mask_token_id)
    else:
        text_length = _resolve_text_length(settings, options, len(token_ids))
        canvas_length = _find_canvas_length(settings, options.segments, text_length)
        masks = [settings.placeholder_token_id] * (canvas_length - len(token_ids))
        canvas_L = np.array([*token_ids, *masks], dtype=np.int64)
        masked_positions = np.arange(len(token_ids), canvas_length)
    blocks = tuple(split_into_blocks(masked_positions, settings, options.segments, is_infill=options.is_infill))
    if options.is_read and blocks:
        blocks = (DecodingBlock(masked_positions, (len(masked_positions),)),)
    request = PreparedRequest(settings, options, seed, canvas_L, masked_positions, blocks, text_length)
    _check_request(request)
    return replace(request, constrained_spans=_constrain(request)) if options.constraints else request


def prepare_known_text(
    settings: DecodingSettings,
    token_ids: Sequence[int] | NDArray[np.int64],
    masked_positions: NDArray[np.int64],
    options: RequestOptions = DEFAULT_OPTIONS,
) -> PreparedRequest:
    """Prepare to decode some positions of a text that is known: the strategy selects positions as always, and the
    text's own tokens are committed there, with their log-probabilities. With a strategy that does not look at sampled
    tokens these sum to the log-likelihood of the text under it (DUEL, arXiv 2603.01367).
    """
    _check_segments(settings, options.segments, len(token_ids))
    check_images(settings.model, token_ids, options)
    known_tokens_L = np.array(token_ids, dtype=np.int64)
    canvas_L = known_tokens_L.copy()
    canvas_L[masked_positions] = settings.placeholder_token_id
    blocks = tuple(split_into_blocks(masked_positions, settings, options.segments))
    options = replace(options, is_infill=True)
    request = PreparedRequest(settings, options, 0, canvas_L, masked_positions, blocks, len(canvas_L))
    return replace(request, known_tokens_L=known_tokens_L)


def prepare_prompt_scoring(
    settings: DecodingSettings, token_ids: Sequence[int], options: RequestOptions = DEFAULT_OPTIONS
) -> PreparedRequest:
    """Prepare to decode a known text from left to right, one token per forward, with the attention, blocks and canvas
    of the settings and without what else they change in the model's distributions. Placeholders of images are given.
    Where attention is causal and outputs are shifted, no distribution depends on later tokens, so a forward scores
    `SCORED_TOKENS` of them.

    Raises:
        ValueError: the text is longer than the model's context, or a token id is outside the vocabulary.
    """
    keys = ("attention", "attention_bias", "block_length", "block_origin", "canvas", "next_token_first")
    model = settings.model
    _check_length(len(token_ids), settings, "shorten the text")
    check_token_ids(token_ids, model)
    config = GenerationConfig(remasking_strategy="sequential", **{key: getattr(settings.config, key) for key in keys})
    scoring = resolve_settings(config, model)
    is_shifted = scoring.output_shift == 1
    is_scored_L = np.ones(len(token_ids), dtype=np.bool_)
    is_scored_L[:is_shifted] = False
    for placed in options.images:
        is_scored_L[placed.start : placed.end] = False
    positions = np.flatnonzero(is_scored_L)
    request = prepare_known_text(scoring, token_ids, positions, options)
    if not (is_shifted and request.settings.block_causal_length == 1):
        return request
    groups = np.split(positions, range(SCORED_TOKENS, len(positions), SCORED_TOKENS))
    blocks = tuple(DecodingBlock(group, (len(group),)) for group in groups if len(group))
    assert request.known_tokens_L is not None
    return replace(request, canvas_L=request.known_tokens_L, blocks=blocks)


def _check_options(options: RequestOptions, model: ModelConfig) -> None:
    if not 0 <= options.num_top_logprobs <= MAX_TOP_LOGPROBS:
        raise ValueError(f"num_top_logprobs = {options.num_top_logprobs} must be 0 to {MAX_TOP_LOGPROBS}")
    if (options.is_read or options.choices) and not (options.is_read and options.is_infill):
        raise ValueError("choices need is_read, and is_read needs is_infill: set them")
    length = options.max_new_tokens
    if length is not None and (not isinstance(length, int) or length < 1):
        raise ValueError(f"max_new_tokens = {length!r} must be a whole number of at least 1")
    check_token_ids(options.logit_bias.keys(), model, "logit_bias")
    for token, value in options.logit_bias.items():
        if not math.isfinite(value):
            raise ValueError(f"logit_bias of token {token} is {value}: use a finite number")


def _check_segments(settings: DecodingSettings, segments: TextSegments, num_tokens: int) -> None:
    starts = segments.starts
    if len(starts) > 1 and settings.block_causal_length is None:
        raise ValueError(
            f'segment_starts need attention = "block_causal", and it is "{settings.config.attention}": leave them out'
        )
    if any(start >= following for start, following in pairwise(starts)) or starts[-1] > num_tokens:
        raise ValueError(
            f"segment_starts = {list(starts[1:])} must ascend from 1 at least to {num_tokens}, the length of the "
            "prompt, at most"
        )


def _find_canvas_length(settings: DecodingSettings, segments: TextSegments, text_length: int) -> int:
    """Length of a prompt and all that is decoded: SDAR decodes the last block to its end, as it was trained, and cuts
    it."""
    block_length = settings.block_causal_length
    if block_length is None or not settings.strategy.family.uses_whole_blocks:
        return text_length
    last_segment = segments.starts[-1]
    num_blocks = -(-(text_length - last_segment) // block_length)
    return min(last_segment + num_blocks * block_length, settings.model.max_position_embeddings)


def _check_request(request: PreparedRequest) -> None:
    model, masked_positions = request.settings.model, request.masked_positions
    if not isinstance(request.seed, Integral):
        raise ValueError(f"seed = {request.seed!r} is not a whole number")
    if request.seed < 0:
        raise ValueError(f"seed = {request.seed} is negative: use 0 or more")
    check_token_ids(request.canvas_L.tolist(), model)
    if request.settings.output_shift and 0 in masked_positions:
        raise ValueError(
            "this model cannot predict the first token of a text, because its output i - 1 predicts token i: begin "
            "with a token, such as end of text"
        )
    for position, ids in request.options.allowed_token_ids.items():
        if position not in masked_positions:
            raise ValueError(f"allowed_token_ids names position {position}, which is not masked: remove it")
        stop_ids = request.settings.stop_token_ids if position < request.first_stop_position else ()
        if np.isin(ids, [*request.settings.forbidden_token_ids, *stop_ids]).all():
            raise ValueError(
                f"allowed_token_ids leaves no token at position {position}: add one that is not suppressed, and among "
                "the first min_new_tokens one that is no stop token"
            )
        check_token_ids((int(np.min(ids)), int(np.max(ids))), model, "allowed_token_ids")
    _check_draft(request)
    spans = dict(_find_spans(request)) if request.options.choices else {}
    for start, choices in request.options.choices.items():
        length = spans.get(start, start) - start
        if {*map(len, choices)} != {length}:
            raise ValueError(f"choices of position {start} must have {length} tokens each, those of its masked span")
        check_token_ids({token for choice in choices for token in choice}, model, "choices")


def _check_draft(request: PreparedRequest) -> None:
    options, strategy = request.options, request.settings.strategy
    draft, num_masks = options.draft_token_ids, len(request.masked_positions)
    if draft and (options.is_read or any(options.constraints)):
        raise ValueError("a draft excludes reads and constraints: remove one of them")
    if len(draft) not in (0, num_masks):
        raise ValueError(f"draft_token_ids has {len(draft)} entries for {num_masks} masks: pass one per mask")
    if not 0.0 <= options.remask <= 1.0 or (options.remask and not draft):
        raise ValueError(f"remask = {options.remask} must be 0 to 1, and needs a draft")
    check_token_ids({*draft} - {-1}, request.settings.model, "draft_token_ids")
    if draft and not (strategy.can_remask or options.num_remasked):
        names = ", ".join(name for name, kind in STRATEGIES.items() if kind.can_remask)
        raise ValueError(
            f'remask = {options.remask} masks no drafted token, and remasking_strategy = "{strategy.name}" keeps them '
            f"all: raise remask, or use {names}"
        )


def _resolve_text_length(settings: DecodingSettings, options: RequestOptions, prompt_length: int) -> int:
    """Length of the prompt and the new tokens."""
    config, total_length = settings.config, settings.config.total_length
    max_new_tokens = config.max_new_tokens if options.max_new_tokens is None else options.max_new_tokens
    if max_new_tokens is None:
        assert total_length is not None, "resolve_settings sets one of the two"
        key, text_length = f"total_length = {total_length}", total_length
        if prompt_length >= total_length:
            raise ValueError(
                f"{prompt_length} tokens leave no new token in total_length = {total_length}: shorten the prompt or "
                "raise total_length"
            )
    else:
        key, text_length = f"max_new_tokens = {max_new_tokens}", prompt_length + max_new_tokens
    if (min_new_tokens := config.min_new_tokens) > text_length - prompt_length:
        raise ValueError(
            f"min_new_tokens (min_tokens) = {min_new_tokens} is more than the {text_length - prompt_length} new tokens "
            f"of {key}: lower it"
        )
    num_of_images = sum(placed.image.num_tokens for placed in options.images)
    share = f" ({num_of_images} of images)" if num_of_images else ""
    remedy = f"shorten the prompt or lower {key.split()[0]}"
    _check_length(text_length, settings, remedy, f"{prompt_length} tokens{share} and {key}: ")
    return text_length


def _check_length(length: int, settings: DecodingSettings, remedy: str, parts: str = "") -> None:
    context = settings.model.max_position_embeddings
    if length > context:
        raise ValueError(
            f"{parts}{length} tokens are more than the model's context, max_position_embeddings = {context}: {remedy}"
        )


def _constrain(request: PreparedRequest) -> tuple[ConstrainedSpan, ...]:
    """Constrain the text of each masked span; of a prompt the text before the first stop token, or all of it.

    Raises:
        ValueError: the number of spans differs, or no text of a span's length fits its constraint.
    """
    options, spans = request.options, _find_spans(request)
    if len(options.constraints) != len(spans):
        raise ValueError(
            f"{len(options.constraints)} constraints for {len(spans)} masked spans, and a prompt has one: pass one per "
            "span, None for any text"
        )
    prefixes = options.repeated_bytes or [b""] * len(spans)
    constrained = []
    for number, (constraint, prefix, span) in enumerate(zip(options.constraints, prefixes, spans, strict=True), 1):
        if constraint is None:
            continue
        try:
            automaton = constraint.after(prefix).token_automaton(request.settings, can_stop=not options.is_infill)
            min_length = max(request.first_stop_position - span[0], 0)
            constrained.append(ConstrainedSpan(automaton, *span, options.allowed_token_ids, min_length))
        except ValueError as error:
            raise ValueError(f"masked span {number}: {error}" if options.is_infill else str(error)) from None
    return tuple(constrained)


def _find_spans(request: PreparedRequest) -> list[tuple[int, int]]:
    """First position of each masked span, and the one after its last."""
    positions, lengths = request.masked_positions, request.options.span_lengths
    if not request.options.is_infill:
        return [(int(positions[0]), request.text_length)]
    ends: NDArray[np.int64] = np.cumsum(lengths)[:-1] if lengths else np.flatnonzero(np.diff(positions) > 1) + 1
    spans = np.split(positions, ends) if len(positions) else []
    return [(int(span[0]), int(span[-1]) + 1) for span in spans]
