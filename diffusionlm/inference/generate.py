"""Decoding: one loop for generation, infilling and streams.

A request is a canvas of given and masked positions. Each forward predicts a token at every masked position of each
request's current block, and the strategy commits some of them. Every request has its own block, step and number of
forwards, and leaves the batch when it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal, TypedDict, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from config.generation import GenerationConfig
from diffusionlm.inference.constraints.compiler import TokenConstraint
from diffusionlm.inference.decoder import Decoder
from diffusionlm.inference.healing import HealedText
from diffusionlm.inference.images import ImageSource, expand_images
from diffusionlm.inference.request_builder import prepare_request
from diffusionlm.inference.requests import (
    DEFAULT_OPTIONS,
    ActiveRequest,
    AllowedTokens,
    PreparedRequest,
    RequestOptions,
    TopLogprobs,
)
from diffusionlm.inference.settings import resolve_settings
from diffusionlm.inference.text import AnswerText
from diffusionlm.models.transformer import Transformer
from diffusionlm.vision.processor import ImageProcessor
from files.usage_error import prefix_errors
from tokenizer import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Trajectory:
    """How a request was decoded: what training on its answer needs, to compute the same probabilities again.

    Arrays have the L positions of the whole canvas: the prompt, the answer, its stop token and what lies behind it, as
    far as the last block was decoded.
    """

    tokens_L: NDArray[np.int64]
    """Token ids; a placeholder where no forward committed a token."""
    is_given_L: NDArray[np.bool_]
    """True for the prompt, or what a canvas has beside its masks."""
    step_map_L: NDArray[np.int64]
    """The request's forward, from 1 on, that committed each token; 0: given, drafted, or never committed."""
    logprobs_L: NDArray[np.float64]
    """Log-probability of each committed token (`Generation.logprobs`); nan elsewhere."""
    text_length: int
    """Positions up to the stop token, which is the last of them, or up to the last final token; else those that were
    asked for."""
    seed: int
    """Of the request: its random numbers are a function of (seed, position, step)."""

    @property
    def committed_positions(self) -> NDArray[np.int64]:
        """Positions of the tokens that forwards committed, ascending."""
        return np.flatnonzero(self.step_map_L)

    @property
    def logprob(self) -> float:
        """Log-probability of all committed tokens, in nats."""
        return float(self.logprobs_L[self.committed_positions].sum())


@dataclass(frozen=True)
class Generation:
    """The result of a request."""

    token_ids: tuple[int, ...]
    """generate: the new tokens, without the stop token. infill: the whole canvas, every mask filled."""
    finish_reason: Literal["stop", "length"]
    """``stop``: the text was cut before a stop token. ``length``: every position was decoded."""
    num_forwards: int
    """Forwards that this request took part in."""
    logprobs: tuple[float, ...]
    """Log-probability in nats of each new token (infill: of each filled position, in order) when it was committed,
    under the model's own distribution: temperature 1, no filter (top-k, top-p, min-p), with the ``logit_bias`` and the
    penalties, without the mask, the suppressed tokens and, where ``allowed_token_ids`` names the position, all others.
    With a constraint it is the token's probability given the constraint and all tokens that were committed before.
    nan: a drafted token stayed."""
    step_map: tuple[int, ...]
    """The request's forward, from 1 on, in which each of these was committed; 0: a drafted token stayed."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """The most probable tokens in the place of each of these, in that forward and under the same distribution, if the
    request has asked for them."""
    choice_logprobs: tuple[tuple[float, ...], ...] = ()
    """Log-probability of each choice of each span (`RequestOptions.choices`): the sum over its positions; with a
    constraint given that it is met, and -inf for a choice that does not meet it."""
    trajectory: Trajectory | None = field(default=None, compare=False, repr=False)
    """The whole canvas with steps and log-probabilities, also of the stop token and what lies behind it."""

    @property
    def tokens_per_forward(self) -> float:
        """New tokens (infill: filled positions) per forward; 0 without a forward."""
        return len(self.logprobs) / self.num_forwards if self.num_forwards else 0.0


@dataclass(frozen=True)
class CanvasSnapshot:
    """A request between two forwards."""

    token_ids: tuple[int, ...]
    """Prompt included; masked positions hold the mask token."""
    is_masked: tuple[bool, ...]
    """Positions that are not committed. Ids cannot identify them: a prompt may contain the mask token as text."""
    logprobs: tuple[float, ...]
    """Like `Generation.logprobs`, of each committed token; nan at given and masked positions."""


@dataclass(frozen=True)
class DecodingStep:
    """The argument of ``on_step`` after each forward."""

    num_forwards: int
    """Forwards of the whole batch so far."""
    canvases: tuple[CanvasSnapshot, ...]
    """One per request, including finished ones."""


StepCallback = Callable[[DecodingStep], None]


class ImageArguments(TypedDict, total=False):
    """Keyword arguments of `generate` and `infill` for texts with images."""

    images: Sequence[Sequence[ImageSource]]
    """Images of each text, in the order of their placeholders."""
    processor: ImageProcessor
    """That of the model (`diffusionlm.load_processor`)."""


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    seeds: Sequence[int] | None = None,
    on_step: StepCallback | None = None,
    allowed_token_ids: Sequence[AllowedTokens] | None = None,
    segment_starts: Sequence[Sequence[int]] | None = None,
    constraints: Sequence[TokenConstraint | None] | None = None,
    **image_arguments: Unpack[ImageArguments],
) -> list[Generation]:
    """Continue each prompt by ``config.max_new_tokens`` tokens, or up to a stop token.

    Keys that the config leaves open have the defaults of the model's family (`resolve_settings`). The mask token is
    never generated.

    Args:
        prompts: token ids of any lengths; an empty prompt is valid. A mask token in a prompt is text like any other.
        seeds: of each request's randomness; None: 0, 1, 2, ... A request's answer depends on its prompt, the config and
            its seed, not on the batch around it (up to rounding in the model).
        on_step: called after each forward.
        allowed_token_ids: for each request the tokens that some positions may hold, counted from the start of the
            prompt: of a text by `TokenHealer`, for example. All other tokens have probability zero there.
        segment_starts: for each prompt the positions where blocks of block-causal attention are counted anew, such as
            the ends of answers that `tokenizer.encode_prompt` returns. None: counted from the start of the text.
        constraints: for each prompt what its new text has to be (`ConstraintCompiler`): the text before the first stop
            token, or of all new tokens. None: any text.
        image_arguments: ``images``, a list for each prompt, and their ``processor`` (`ImageArguments`). The prompts
            have one placeholder token for each image, and the positions of other arguments count it as one.

    Raises:
        ValueError: a prompt and the new tokens do not fit the model's context, an id is outside the vocabulary, the
            number of seeds, of ``allowed_token_ids``, of ``segment_starts``, of ``constraints`` or of ``images``
            differs, an image cannot be read or has no placeholder, ``allowed_token_ids`` name a position that is not
            masked or leave it no token, ``segment_starts`` do not ascend within the prompt or attention is not
            block-causal, no answer of this length fits a constraint, there are fewer ``steps`` than blocks, the config
            does not fit the model, or the model's probabilities are not finite.
    """
    count = len(prompts)
    options = [
        RequestOptions(allowed_token_ids=allowed or {}, segment_starts=starts, constraints=(constraint,))
        for allowed, starts, constraint in zip(
            _expand("allowed_token_ids", allowed_token_ids, count, None),
            _expand("segment_starts", segment_starts, count, ()),
            _expand("constraints", constraints, count, None),
            strict=True,
        )
    ]
    return _decode_texts(model, prompts, config, seeds, options, on_step, **image_arguments)


def infill(
    model: Transformer,
    canvases: Sequence[Sequence[int]],
    config: GenerationConfig,
    seeds: Sequence[int] | None = None,
    on_step: StepCallback | None = None,
    allowed_token_ids: Sequence[AllowedTokens] | None = None,
    constraints: Sequence[Sequence[TokenConstraint | None]] | None = None,
    options: RequestOptions = DEFAULT_OPTIONS,
    **image_arguments: Unpack[ImageArguments],
) -> list[Generation]:
    """Fill every mask token of each canvas; all other tokens stay as they are.

    Like `generate`, but ``max_new_tokens`` and stop tokens have no effect, and a block is ``block_length`` masks,
    wherever they are. A canvas without masks is returned after 0 forwards. A block-causal model does not see what is to
    the right of the mask's block, an autoregressive one nothing to the right of the mask.

    Args:
        constraints: for each canvas what the text of each of its masked spans has to be, None: any text; without
            constraints an empty list.
        options: more of each canvas, such as ``is_read``.
        image_arguments: as in `generate`. The placeholders are repeated in the result.

    Raises:
        ValueError: like `generate`.
    """
    count = len(canvases)
    all_options = [
        replace(options, is_infill=True, allowed_token_ids=allowed or {}, constraints=own_constraints)
        for allowed, own_constraints in zip(
            _expand("allowed_token_ids", allowed_token_ids, count, None),
            _expand("constraints", constraints, count, ()),
            strict=True,
        )
    ]
    return _decode_texts(model, canvases, config, seeds, all_options, on_step, **image_arguments)


def _expand(name: str, values: Sequence[T] | None, num_requests: int, default: T) -> Sequence[T]:
    """Values of a list that has an entry for each request; None: there is no list.

    Raises:
        ValueError: their number differs.
    """
    if values is not None and len(values) != num_requests:
        raise ValueError(f"{name}: {len(values)} for {num_requests} requests: pass one per request, or None")
    return [default] * num_requests if values is None else values


def _decode_texts(
    model: Transformer,
    texts: Sequence[Sequence[int]],
    config: GenerationConfig,
    seeds: Sequence[int] | None,
    options: Sequence[RequestOptions],
    on_step: StepCallback | None,
    images: Sequence[Sequence[ImageSource]] | None = None,
    processor: ImageProcessor | None = None,
) -> list[Generation]:
    settings = resolve_settings(config, model.config)
    seeds = range(len(texts)) if seeds is None else _expand("seeds", seeds, len(texts), 0)
    requests = []
    for index, (token_ids, seed, own, own_images) in enumerate(
        zip(texts, seeds, options, _expand("images", images, len(texts), ()), strict=True)
    ):
        label, text = f"{'canvas' if own.is_infill else 'prompt'} {index}", HealedText(tuple(token_ids), own)
        if own_images:
            with prefix_errors(label):
                text = expand_images(text, own_images, processor, model.config)
        requests.append(prepare_request(settings, text.token_ids, seed, text.options, label))
    return decode(model, requests, on_step)


def decode(
    model: Transformer, prepared_requests: Sequence[PreparedRequest], on_step: StepCallback | None = None
) -> list[Generation]:
    """Decode requests together until all are done.

    Raises:
        ValueError: the model's probabilities are not finite.
    """
    requests = [ActiveRequest(request) for request in prepared_requests]
    for num_forwards in decode_steps(model, requests):
        if on_step is not None:
            on_step(DecodingStep(num_forwards, tuple(take_snapshot(request) for request in requests)))
    return [to_generation(request) for request in requests]


def decode_steps(model: Transformer, requests: Sequence[ActiveRequest]) -> Iterator[int]:
    """Decode requests together; yields the number of forwards after each one.

    Raises:
        ValueError: the model's probabilities are not finite.
    """
    decoder = Decoder.for_requests(model, requests)
    for output in decoder.steps():
        if output.has_forward:
            yield decoder.counts.num_steps


def stream(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: Sequence[int] | HealedText,
    config: GenerationConfig,
    seed: int = 0,
    segment_starts: Sequence[int] = (),
    constraint: TokenConstraint | None = None,
) -> Iterator[str]:
    """Iterate over the pieces of text by which `generate` continues a prompt; none is empty or splits a character.

    Tokens are passed on from the left as soon as they are final: when everything before them is committed, too. A
    strategy that remasks does so within the current block alone, so a block is final when the next one has begun.

    Pieces do not repeat the text that a `HealedText` has taken back. A prompt with images is one of `expand_images`.

    A forward is computed when the pieces before it have been taken: a closed iterator computes no more.

    Args:
        segment_starts: of the prompt, as in `generate`.
        constraint: on the new text, as in `generate`.

    Raises:
        ValueError: like `generate`, when a piece is requested.
    """
    text = prompt if isinstance(prompt, HealedText) else HealedText(tuple(prompt))
    options = replace(text.options, constraints=(constraint,))
    if segment_starts:
        options = replace(options, segment_starts=segment_starts)
    prepared = prepare_request(resolve_settings(config, model.config), text.token_ids, seed, options, "the prompt")
    request = ActiveRequest(prepared)
    answer = AnswerText(tokenizer, num_repeated_bytes=text.num_repeated_bytes)
    for is_done in chain((False for _ in decode_steps(model, [request])), [True]):
        for token in request.final_token_ids()[len(answer.tokens) :]:
            answer.push(token)
        if is_done:
            answer.finish()
        if piece := answer.take_new()[0]:
            yield piece


def take_snapshot(request: ActiveRequest) -> CanvasSnapshot:
    """The canvas of a request between two forwards."""
    text = slice(request.prepared.text_length)
    return CanvasSnapshot(
        token_ids=tuple(request.tokens_L[text].tolist()),
        is_masked=tuple(request.is_masked_L[text].tolist()),
        logprobs=tuple(request.logprobs_L[text].tolist()),
    )


def to_generation(request: ActiveRequest) -> Generation:
    """The result of a request that is done."""
    positions = request.answer_positions[: request.stop_index]
    token_ids = request.tokens_L if request.options.is_infill else request.tokens_L[positions]
    return Generation(
        token_ids=tuple(token_ids.tolist()),
        finish_reason="length" if request.stop_index is None else "stop",
        num_forwards=request.num_forwards,
        logprobs=tuple(request.logprobs_L[positions].tolist()),
        step_map=tuple(request.step_map_L[positions].tolist()),
        top_logprobs=request.top_logprobs_at(positions),
        choice_logprobs=request.choice_logprobs,
        trajectory=to_trajectory(request),
    )


def to_trajectory(request: ActiveRequest) -> Trajectory:
    """What a request has decoded so far."""
    is_given_L = np.ones(len(request.tokens_L), dtype=np.bool_)
    is_given_L[request.masked_positions] = False
    text_length, final_positions = request.prepared.text_length, request.final_positions()
    if request.stop_index is not None:
        text_length = int(request.answer_positions[request.stop_index]) + 1
    elif not (request.is_done or request.options.is_infill):  # a stop string has ended it
        text_length = int(final_positions[-1]) + 1 if len(final_positions) else int(request.masked_positions[0])
    return Trajectory(
        request.tokens_L.copy(),
        is_given_L,
        request.step_map_L * ~(is_given_L | request.is_masked_L),
        request.logprobs_L.copy(),
        text_length,
        request.prepared.seed,
    )


def replay(
    model: Transformer, requests: Sequence[PreparedRequest], trajectories: Sequence[Trajectory]
) -> list[Trajectory]:
    """Decode requests again, with the tokens of their trajectories in place of sampled ones.

    The steps are the same, and the log-probabilities are, up to rounding; an engine with ``deterministic`` gives the
    same bits for each `known_request`.

    Raises:
        ValueError: the model's probabilities are not finite.
    """
    known = map(known_request, requests, trajectories)
    return [item.trajectory for item in decode(model, list(known)) if item.trajectory is not None]


def known_request(request: PreparedRequest, trajectory: Trajectory) -> PreparedRequest:
    """The request that commits the tokens of a trajectory.

    Raises:
        ValueError: of a request with speculation, whose forwards depend on its drafts.
    """
    if request.settings.has_speculation:
        raise ValueError(
            f'a trajectory of speculation = "{request.settings.config.speculation}" cannot be replayed: remove it'
        )
    return replace(request, known_tokens_L=trajectory.tokens_L)
