"""Decoding: one loop for generation and infilling.

A request is a canvas of fixed and masked positions. Each forward proposes a token for every masked position of each
request's current block; the policy settles some of them. Requests go at their own pace: each has its own block, step
and count of forwards, and leaves the batch when it is done.

Shapes: B requests, L positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from config.generation import STRATEGIES, GenerationConfig
from diffusionlm.inference.blocks import block_causal_length, placeholder_token_id, split_into_blocks
from diffusionlm.inference.model_runner import ModelRunner
from diffusionlm.inference.requests import ActiveRequest
from diffusionlm.inference.sampling import TokenSampler
from diffusionlm.inference.settings import fill_defaults
from diffusionlm.inference.stopping import FinishReason, resolve_stop_token_ids
from diffusionlm.inference.strategies import build_strategy
from diffusionlm.models.transformer import Transformer


@dataclass(frozen=True)
class Generation:
    """What became of a request."""

    token_ids: tuple[int, ...]
    """generate: the new tokens, without the stop token. infill: the whole canvas, every hole filled."""
    finish_reason: FinishReason
    """``stop``: cut before a stop token. ``length``: all positions."""
    num_forwards: int
    """Forwards that this request took part in."""
    logprobs: tuple[float, ...]
    """Log-probability in nats of each new token (infill: of each filled hole, in order) when it became final, under the
    model's own distribution: temperature 1, no top-k or top-p, without the mask and the suppressed tokens."""
    step_map: tuple[int, ...]
    """The request's forward, from 1 on, in which each of these became final."""

    @property
    def tokens_per_forward(self) -> float:
        """Tokens of the answer (infill: filled holes) for each forward; 0 without one."""
        return len(self.logprobs) / self.num_forwards if self.num_forwards else 0.0


@dataclass(frozen=True)
class CanvasSnapshot:
    """A request between two forwards."""

    token_ids: tuple[int, ...]
    """Prompt included; masked positions hold the mask token."""
    is_masked: tuple[bool, ...]
    """Which positions are not final. Not to be read off the ids: a prompt may contain the mask token as text."""
    logprobs: tuple[float, ...]
    """As in `Generation`, of each settled token; nan where a token was given or nothing is settled."""


@dataclass(frozen=True)
class DecodingStep:
    """What ``on_step`` is told after each forward."""

    num_forwards: int
    """Forwards of the whole batch so far."""
    canvases: tuple[CanvasSnapshot, ...]
    """One for each request, finished ones included."""


StepCallback = Callable[[DecodingStep], None]


@torch.inference_mode()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    seeds: Sequence[int] | None = None,
    on_step: StepCallback | None = None,
) -> list[Generation]:
    """Continue each prompt by ``config.max_new_tokens`` tokens, or up to a stop token.

    The strategies are published ones, each with its family's defaults (`fill_defaults`), with a mask token that is
    never chosen, confidences in fp64 and prompts of any lengths.

    Args:
        prompts: token ids; an empty prompt samples from nothing. A mask token in a prompt is text like any other.
        seeds: of each request's chance; None: 0, 1, 2, ... A request's answer depends on its prompt, the config and its
            seed, not on the batch around it (up to rounding in the model).
        on_step: called after each forward.

    Raises:
        ValueError: a prompt and the new tokens do not fit the model's context, an id is outside the vocabulary, seeds
            do not match, ``steps`` are fewer than blocks, the config does not fit the model, or the model's
            probabilities are not finite.
    """
    config = fill_defaults(config, model.config)
    requests = prepare_prompts(model, prompts, config, seeds)
    _decode(model, requests, config, resolve_stop_token_ids(config, model.config), on_step)
    return [_generation_result(request) for request in requests]


@torch.inference_mode()
def infill(
    model: Transformer,
    canvases: Sequence[Sequence[int]],
    config: GenerationConfig,
    seeds: Sequence[int] | None = None,
    on_step: StepCallback | None = None,
) -> list[Generation]:
    """Fill every mask token of each canvas; all other tokens stay as they are.

    As `generate`, but ``max_new_tokens`` and stop tokens play no part, and a block is ``block_length`` holes, wherever
    they are. A canvas without holes comes back after 0 forwards. A block-causal model does not see what is right of the
    hole's block, an autoregressive one nothing right of the token.

    Raises:
        ValueError: as in `generate`.
    """
    config = fill_defaults(config, model.config)
    requests = prepare_infills(model, canvases, config, seeds)
    _decode(model, requests, config, frozenset(), on_step)
    return [_infill_result(request) for request in requests]


def check_generate(model: Transformer, prompts: Sequence[Sequence[int]], config: GenerationConfig) -> None:
    """Say now what `generate` would refuse later.

    Raises:
        ValueError: as in `generate`.
    """
    prepare_prompts(model, prompts, fill_defaults(config, model.config), None)


def check_infill(model: Transformer, canvases: Sequence[Sequence[int]], config: GenerationConfig) -> None:
    """Say now what `infill` would refuse later.

    Raises:
        ValueError: as in `infill`.
    """
    prepare_infills(model, canvases, fill_defaults(config, model.config), None)


def _decode(
    model: Transformer,
    requests: list[ActiveRequest],
    config: GenerationConfig,
    stop_ids: frozenset[int],
    on_step: StepCallback | None,
) -> None:
    """Run forwards until every request is done."""
    mask = [] if model.config.mask_token_id is None else [model.config.mask_token_id]
    device = model.lm_head.weight.device
    forbidden_token_ids = torch.tensor([*mask, *config.suppress_token_ids], device=device, dtype=torch.long)
    strategy, deferred_token_ids = build_strategy(config), frozenset(config.defer_token_ids)
    token_sampler, forwards = TokenSampler(config, strategy, forbidden_token_ids), ModelRunner(model, config, requests)
    active, num_forwards = requests, 0
    while True:
        for request in active:
            request.prepare_step(strategy)
            request.find_stop_token(strategy, stop_ids)
        active = [request for request in active if not request.is_done]
        if not active:
            return
        proposals = token_sampler.sample_predictions(forwards(active), active)
        num_forwards += 1
        for request, predictions in zip(active, proposals, strict=True):
            request.commit(predictions, strategy, deferred_token_ids)
        if on_step is not None:
            on_step(DecodingStep(num_forwards, tuple(_take_snapshot(request) for request in requests)))


def _num_new_tokens(config: GenerationConfig, prompt_length: int, what: str) -> int:
    """New tokens of a prompt."""
    if config.total_length is None:
        assert config.max_new_tokens is not None
        return config.max_new_tokens
    if prompt_length >= config.total_length:
        raise ValueError(
            f"{what}: {prompt_length} tokens leave no room for new ones in total_length = {config.total_length}: "
            "raise it, or shorten the prompt"
        )
    return config.total_length - prompt_length


def _decoded_length(length: int, config: GenerationConfig, model: Transformer) -> int:
    """SDAR decodes the last block whole, as it was trained, and cuts what is too much."""
    block_length = block_causal_length(config, model.config)
    assert config.remasking_strategy is not None
    if block_length is None or STRATEGIES[config.remasking_strategy].family != "SDAR":
        return length
    return -(-length // block_length) * block_length


def prepare_prompts(
    model: Transformer, prompts: Sequence[Sequence[int]], config: GenerationConfig, seeds: Sequence[int] | None = None
) -> list[ActiveRequest]:
    """What `generate` decodes; the config is one of `fill_defaults`.

    Raises:
        ValueError: as in `generate`.
    """
    _check_config(config, model)
    context = model.config.max_position_embeddings
    placeholder_id = placeholder_token_id(config, model.config)
    tokens, masked_positions, lengths = [], [], []
    for index, prompt in enumerate(prompts):
        new = _num_new_tokens(config, len(prompt), f"prompt {index}")
        what = f"prompt {index} ({len(prompt)} tokens) and max_new_tokens = {new}"
        _check_length(len(prompt) + new, model, what, "shorten the prompt or lower max_new_tokens")
        length = min(_decoded_length(len(prompt) + new, config, model), context)
        tokens.append(np.array([*prompt, *[placeholder_id] * (length - len(prompt))], dtype=np.int64))
        masked_positions.append(np.arange(len(prompt), length))
        lengths.append(len(prompt) + new)
    return _build_requests(model, tokens, masked_positions, lengths, config, seeds)


def prepare_infills(
    model: Transformer, canvases: Sequence[Sequence[int]], config: GenerationConfig, seeds: Sequence[int] | None
) -> list[ActiveRequest]:
    _check_config(config, model)
    for index, canvas in enumerate(canvases):
        _check_length(len(canvas), model, f"canvas {index}", "shorten the text or its holes")
    tokens = [np.array(canvas, dtype=np.int64) for canvas in canvases]
    masked_positions = [np.flatnonzero(canvas == model.config.required_mask_token_id) for canvas in tokens]
    return _build_requests(model, tokens, masked_positions, [len(canvas) for canvas in tokens], config, seeds)


def _build_requests(
    model: Transformer,
    tokens: list[NDArray[np.int64]],
    masked_positions: list[NDArray[np.int64]],
    lengths: list[int],
    config: GenerationConfig,
    seeds: Sequence[int] | None,
) -> list[ActiveRequest]:
    """Checked requests with their blocks; ``lengths`` of the texts, beyond which a last block may be decoded."""
    seeds = range(len(tokens)) if seeds is None else seeds
    if len(seeds) != len(tokens):
        raise ValueError(f"{len(seeds)} seeds were given for {len(tokens)} requests: give one for each, or None")
    requests = []
    for index, (tokens_L, places, length, seed) in enumerate(
        zip(tokens, masked_positions, lengths, seeds, strict=True)
    ):
        if seed < 0:
            raise ValueError(f"seed {seed} of request {index} is negative: use 0 or more")
        _check_token_ids(tokens_L.tolist(), model, f"request {index}")
        if model.config.logit_alignment == "shifted" and 0 in places:
            raise ValueError(
                f"request {index}: the first token of a text cannot be predicted by this model, whose output i - 1 "
                "predicts token i: begin with a token, such as end of text"
            )
        requests.append(ActiveRequest(tokens_L, places, seed, split_into_blocks(places, config, model.config), length))
    return requests


def _take_snapshot(request: ActiveRequest) -> CanvasSnapshot:
    shown = (request.tokens_L, request.is_masked_L, request.logprobs_L)
    return CanvasSnapshot(*(tuple(values_L[: request.length].tolist()) for values_L in shown))


def _generation_result(request: ActiveRequest) -> Generation:
    new = request.new[: request.stop]
    return Generation(
        token_ids=tuple(request.tokens_L[new].tolist()),
        finish_reason="length" if request.stop is None else "stop",
        num_forwards=request.num_forwards,
        logprobs=tuple(request.logprobs_L[new].tolist()),
        step_map=tuple(request.step_map_L[new].tolist()),
    )


def _infill_result(request: ActiveRequest) -> Generation:
    return Generation(
        token_ids=tuple(request.tokens_L.tolist()),
        finish_reason="length",
        num_forwards=request.num_forwards,
        logprobs=tuple(request.logprobs_L[request.masked_positions].tolist()),
        step_map=tuple(request.step_map_L[request.masked_positions].tolist()),
    )


def _check_config(config: GenerationConfig, model: Transformer) -> None:
    """The ids of the config are the model's, and leave a token to choose."""
    _check_token_ids(config.stop_token_ids or (), model, "stop_token_ids")
    _check_token_ids(config.suppress_token_ids, model, "suppress_token_ids")
    _check_token_ids(config.defer_token_ids, model, "defer_token_ids")
    if len({model.config.mask_token_id, *config.suppress_token_ids} - {None}) == model.config.vocab_size:
        raise ValueError("suppress_token_ids leave no token to choose: remove some")


def _check_token_ids(token_ids: Sequence[int], model: Transformer, what: str) -> None:
    vocab_size = model.config.vocab_size
    wrong = next((token for token in token_ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ValueError(
            f"{what}: token {wrong} is outside the model's vocabulary of {vocab_size} tokens; "
            "do tokenizer and model belong together?"
        )


def _check_length(length: int, model: Transformer, what: str, remedy: str) -> None:
    context = model.config.max_position_embeddings
    if length > context:
        raise ValueError(
            f"{what}: {length} tokens are more than the model's context, max_position_embeddings = {context}; {remedy}"
        )
