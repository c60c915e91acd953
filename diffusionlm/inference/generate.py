"""Decoding: one loop for generation and infilling.

A request is a canvas of given and masked positions. Each forward predicts a token at every masked position of each
request's current block, and the strategy commits some of them. Every request has its own block, step and number of
forwards, and leaves the batch when it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from config.generation import GenerationConfig
from diffusionlm.inference.constraints.compiler import TokenConstraint, constrain_infill, constrain_prompt
from diffusionlm.inference.decoder import PAGE_SIZE, Decoder, DecoderLimits
from diffusionlm.inference.requests import (
    ActiveRequest,
    AllowedTokens,
    PreparedRequest,
    TopLogprobs,
    prepare_infill,
    prepare_prompt,
)
from diffusionlm.inference.settings import DecodingSettings, resolve_settings
from diffusionlm.models.transformer import Transformer


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
    under the model's own distribution: temperature 1, no top-k or top-p, with the ``logit_bias``, without the mask, the
    suppressed tokens and, where ``allowed_token_ids`` names the position, all others. With a constraint it is the
    token's probability given the constraint and all tokens that were committed before."""
    step_map: tuple[int, ...]
    """The request's forward, from 1 on, in which each of these was committed."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """The most probable tokens in the place of each of these, in that forward and under the same distribution, if the
    request has asked for them."""

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


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    seeds: Sequence[int] | None = None,
    on_step: StepCallback | None = None,
    allowed_token_ids: Sequence[AllowedTokens] | None = None,
    segment_starts: Sequence[Sequence[int]] | None = None,
    constraints: Sequence[TokenConstraint | None] | None = None,
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
            `tokenizer.EncodedPrompt.answer_ends` of a chat. None: blocks are counted from the start of the text.
        constraints: for each prompt what its new text has to be (`ConstraintCompiler`): the text before the first stop
            token, or of all new tokens. None: any text.

    Raises:
        ValueError: a prompt and the new tokens do not fit the model's context, an id is outside the vocabulary, the
            number of seeds, of ``allowed_token_ids``, of ``segment_starts`` or of ``constraints`` differs,
            ``allowed_token_ids`` name a position that is not masked or leave it no token, ``segment_starts`` do not
            ascend within the prompt or attention is not block-causal, no answer of this length fits a constraint, there
            are fewer ``steps`` than blocks, the config does not fit the model, or the model's probabilities are not
            finite.
    """
    settings = resolve_settings(config, model.config)
    _check_counts(
        len(prompts), seeds=seeds, allowed_token_ids=allowed_token_ids, segment_starts=segment_starts,
        constraints=constraints,
    )  # fmt: skip
    requests = []
    for index, token_ids in enumerate(prompts):
        label, seed = f"prompt {index}", index if seeds is None else seeds[index]
        allowed = None if allowed_token_ids is None else allowed_token_ids[index]
        starts = () if segment_starts is None else segment_starts[index]
        request = prepare_prompt(settings, token_ids, seed, label, allowed, starts)
        constraint = None if constraints is None else constraints[index]
        requests.append(constrain_prompt(request, settings, constraint, label))
    return decode(model, settings, requests, on_step)


def infill(
    model: Transformer,
    canvases: Sequence[Sequence[int]],
    config: GenerationConfig,
    seeds: Sequence[int] | None = None,
    on_step: StepCallback | None = None,
    allowed_token_ids: Sequence[AllowedTokens] | None = None,
    constraints: Sequence[Sequence[TokenConstraint | None]] | None = None,
) -> list[Generation]:
    """Fill every mask token of each canvas; all other tokens stay as they are.

    Like `generate`, but ``max_new_tokens`` and stop tokens have no effect, and a block is ``block_length`` masks,
    wherever they are. A canvas without masks is returned after 0 forwards. A block-causal model does not see what is to
    the right of the mask's block, an autoregressive one nothing to the right of the mask.

    Args:
        constraints: for each canvas what the text of each of its masked spans has to be, None: any text; without
            constraints an empty list.

    Raises:
        ValueError: like `generate`.
    """
    settings = resolve_settings(config, model.config)
    _check_counts(len(canvases), seeds=seeds, allowed_token_ids=allowed_token_ids, constraints=constraints)
    requests = []
    for index, token_ids in enumerate(canvases):
        label, seed = f"canvas {index}", index if seeds is None else seeds[index]
        allowed = None if allowed_token_ids is None else allowed_token_ids[index]
        request = prepare_infill(settings, token_ids, seed, label, allowed)
        requests.append(constrain_infill(request, settings, () if constraints is None else constraints[index], label))
    return decode(model, settings, requests, on_step)


def decode(
    model: Transformer,
    settings: DecodingSettings,
    prepared_requests: Sequence[PreparedRequest],
    on_step: StepCallback | None = None,
) -> list[Generation]:
    """Decode requests together until all are done.

    Raises:
        ValueError: the model's probabilities are not finite.
    """
    requests = [ActiveRequest(request, settings) for request in prepared_requests]
    for num_forwards in decode_rounds(model, requests):
        if on_step is not None:
            on_step(DecodingStep(num_forwards, tuple(take_snapshot(request) for request in requests)))
    return [to_generation(request) for request in requests]


def decode_rounds(model: Transformer, requests: Sequence[ActiveRequest]) -> Iterator[int]:
    """Decode requests together; yields the number of forwards after each one.

    Raises:
        ValueError: the model's probabilities are not finite.
    """
    num_pages = sum(
        -(-len(request.tokens_L) // PAGE_SIZE) * request.num_texts for request in requests if request.uses_cache
    )
    decoder = Decoder(model, DecoderLimits(num_pages))
    for request in requests:
        decoder.add(request)
    while decoder.has_work:
        result = decoder.run_round()
        error = next((request.error for request in requests if request.error is not None), None)
        if error is not None:
            raise error
        if result.has_forward:
            yield decoder.counts.num_rounds
    decoder.keep_graphs()


def _check_counts(num_requests: int, **lists: Sequence[object] | None) -> None:
    """Check that each list has an entry for each request; None: there is no list.

    Raises:
        ValueError: one differs.
    """
    for name, values in lists.items():
        if values is not None and len(values) != num_requests:
            raise ValueError(f"{name}: {len(values)} for {num_requests} requests: pass one per request, or None")


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
    token_ids = request.tokens_L if request.prepared.is_infill else request.tokens_L[positions]
    return Generation(
        token_ids=tuple(token_ids.tolist()),
        finish_reason="length" if request.stop_index is None else "stop",
        num_forwards=request.num_forwards,
        logprobs=tuple(request.logprobs_L[positions].tolist()),
        step_map=tuple(request.step_map_L[positions].tolist()),
        top_logprobs=request.top_logprobs_at(positions),
    )
