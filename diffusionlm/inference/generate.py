"""Decoding: one loop for generation and infilling.

A request is a canvas of fixed and masked positions. Each forward proposes a token for every masked position of each
request's current block; the policy settles some of them. Requests go at their own pace: each has its own block, step
and count of forwards, and leaves the batch when it is done.

Shapes: B requests, L positions, R masked positions of the requests' current blocks (flat B * L, ascending),
V vocabulary, M those of one request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.generation import GenerationConfig
from diffusionlm.diffusion.chance import Stream, generator
from diffusionlm.inference.blocks import (
    CHUNK_BYTES,
    Block,
    block_causal_length,
    blocks_of,
    comparable,
    open_logits,
    placeholder_token,
)
from diffusionlm.inference.filters import choose_tokens, filter_logits
from diffusionlm.inference.policies import Policy, build_policy
from diffusionlm.inference.stopping import FinishReason, find_stop, stop_tokens
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


@dataclass(frozen=True)
class Canvas:
    """A request between two forwards."""

    token_ids: tuple[int, ...]
    """Prompt included; masked positions hold the mask token."""
    is_masked: tuple[bool, ...]
    """Which positions are not final. Not to be read off the ids: a prompt may contain the mask token as text."""


@dataclass(frozen=True)
class Step:
    """What ``on_step`` is told after each forward."""

    num_forwards: int
    """Forwards of the whole batch so far."""
    canvases: tuple[Canvas, ...]
    """One for each request, finished ones included."""


OnStep = Callable[[Step], None]


@torch.inference_mode()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    seeds: Sequence[int] | None = None,
    on_step: OnStep | None = None,
) -> list[Generation]:
    """Continue each prompt by ``config.max_new_tokens`` tokens, or up to a stop token.

    The sampler is LLaDA's semi-autoregressive one (Nie et al. 2025, generate.py), with a mask token that is never
    chosen, confidences in fp64 and prompts of any lengths.

    Args:
        prompts: token ids; an empty prompt samples from nothing. A mask token in a prompt is text like any other.
        seeds: of each request's chance; None: 0, 1, 2, ... A request's answer depends on its prompt, the config and its
            seed, not on the batch around it (up to rounding in the model).
        on_step: called after each forward.

    Raises:
        ValueError: a prompt and the new tokens do not fit the model's context, an id is outside the vocabulary, seeds
            do not match, ``steps`` are fewer than blocks, or the model's probabilities are not finite.
    """
    _check_config(config, model)
    new = config.max_new_tokens
    for index, prompt in enumerate(prompts):
        what = f"prompt {index} ({len(prompt)} tokens) and max_new_tokens = {new}"
        _check_length(len(prompt) + new, model, what, "shorten the prompt or lower max_new_tokens")
    placeholder = placeholder_token(config, model.config)
    tokens = [np.array([*prompt, *[placeholder] * new], dtype=np.int64) for prompt in prompts]
    holes = [np.arange(len(prompt), len(prompt) + new) for prompt in prompts]
    requests = _requests(model, tokens, holes, config, seeds)
    _decode(model, requests, config, stop_tokens(config, model.config), on_step)
    return [_generated(request) for request in requests]


@torch.inference_mode()
def infill(
    model: Transformer,
    canvases: Sequence[Sequence[int]],
    config: GenerationConfig,
    seeds: Sequence[int] | None = None,
    on_step: OnStep | None = None,
) -> list[Generation]:
    """Fill every mask token of each canvas; all other tokens stay as they are.

    As `generate`, but ``max_new_tokens`` and stop tokens play no part, and a block is ``block_length`` holes, wherever
    they are. A canvas without holes comes back after 0 forwards. A block-causal model does not see what is right of the
    hole's block, an autoregressive one nothing right of the token.

    Raises:
        ValueError: as in `generate`.
    """
    requests = _infill_requests(model, canvases, config, seeds)
    _decode(model, requests, config, frozenset(), on_step)
    return [_infilled(request) for request in requests]


def check_infill(model: Transformer, canvases: Sequence[Sequence[int]], config: GenerationConfig) -> None:
    """Say now what `infill` would refuse later.

    Raises:
        ValueError: as in `infill`.
    """
    _infill_requests(model, canvases, config, None)


class _Request:
    """The state of one request."""

    def __init__(self, tokens_L: NDArray[np.int64], holes: NDArray[np.int64], seed: int, blocks: list[Block]) -> None:
        self.tokens_L = tokens_L
        self.holes = holes
        self.seed = seed
        self.blocks = blocks
        """Still to be decoded, the current one first."""
        self.is_masked_L = np.zeros(len(tokens_L), dtype=np.bool_)
        self.is_masked_L[holes] = True
        self.logprobs_L = np.full(len(tokens_L), np.nan)
        self.step_map_L = np.zeros(len(tokens_L), dtype=np.int64)
        self.num_forwards = 0
        self.stop: int | None = None
        """Place of the stop token among the holes."""

    @property
    def is_done(self) -> bool:
        return not self.blocks or self.stop is not None

    def open_positions(self) -> NDArray[np.int64]:
        """Masked positions of the current block, [M]."""
        positions = self.blocks[0].positions
        return positions[self.is_masked_L[positions]]

    def uniforms(self, stream: Stream) -> NDArray[np.float64]:
        """A number in [0, 1) for each open position, [M]: a function of (seed, position, forward) alone."""
        return generator(self.seed, stream, self.num_forwards).random(len(self.tokens_L))[self.open_positions()]

    def settle(self, proposal: _Proposal, policy: Policy, stop_ids: frozenset[int]) -> None:
        """Make some open positions final."""
        block = self.blocks[0]
        confidence_M = comparable(proposal.confidence_M, self.tokens_L)
        chosen_M = policy.choose(confidence_M, block.quotas.pop(0))
        positions = self.open_positions()[chosen_M]
        self.num_forwards += 1
        self.tokens_L[positions] = proposal.tokens_M[chosen_M]
        self.logprobs_L[positions] = proposal.logprobs_M[chosen_M]
        self.step_map_L[positions] = self.num_forwards
        self.is_masked_L[positions] = False
        if not self.is_masked_L[block.positions].any():
            self.blocks.pop(0)
        if stop_ids:
            self.stop = find_stop(self.tokens_L[self.holes], self.is_masked_L[self.holes], stop_ids)

    def canvas(self) -> Canvas:
        return Canvas(tuple(self.tokens_L.tolist()), tuple(self.is_masked_L.tolist()))


@dataclass(frozen=True)
class _Proposal:
    """A token for each open position of a request."""

    tokens_M: NDArray[np.int64]
    confidence_M: NDArray[np.float64]
    logprobs_M: NDArray[np.float64]


def _decode(
    model: Transformer,
    requests: list[_Request],
    config: GenerationConfig,
    stop_ids: frozenset[int],
    on_step: OnStep | None,
) -> None:
    """Run forwards until every request is done."""
    block_length, device = block_causal_length(config, model.config), model.lm_head.weight.device
    mask = [] if model.config.mask_token_id is None else [model.config.mask_token_id]
    forbidden = torch.tensor([*mask, *config.suppress_token_ids], device=device, dtype=torch.long)
    reader = _Reader(config, build_policy(config), forbidden)
    num_forwards = 0
    while active := [request for request in requests if not request.is_done]:
        canvases = [request.tokens_L for request in active]
        logits_RV = open_logits(model, canvases, [request.open_positions() for request in active], block_length)
        num_forwards += 1
        for request, proposal in zip(active, _propose(logits_RV, active, reader), strict=True):
            request.settle(proposal, reader.policy, stop_ids)
        if on_step is not None:
            on_step(Step(num_forwards, tuple(request.canvas() for request in requests)))


@dataclass(frozen=True)
class _Reader:
    """How logits are read."""

    config: GenerationConfig
    policy: Policy
    forbidden: Tensor
    """Tokens of probability zero: the mask, as in training (SUBS, Sahoo et al. 2024), and the suppressed ones."""

    def read(self, logits_RV: Tensor, token_R: Tensor | None, order_R: Tensor) -> Tensor:
        """Chosen token, confidence and log-probability of each row, [3, R] in fp64 (which holds ids exactly).

        ``token_R`` and ``order_R`` are uniforms for the tokens (None: greedy) and for the order. fp64 throughout: in
        fp32 all probabilities near 1 are equal, and the order among them would be chance.
        """
        config = self.config
        own_RV = logits_RV.to(torch.float64, copy=True).index_fill_(1, self.forbidden, float("-inf"))
        logprobs_RV = own_RV.log_softmax(dim=1)
        own_probs_RV = logprobs_RV.exp()
        filtered_RV = filter_logits(own_RV, temperature=config.temperature, top_k=config.top_k, top_p=config.top_p)
        probs_RV = own_probs_RV if filtered_RV is own_RV else filtered_RV.softmax(dim=1)
        tokens_R = choose_tokens(probs_RV, token_R)
        basis_RV = own_probs_RV if config.confidence_from == "unfiltered" else probs_RV
        confidence_R = self.policy.confidence(basis_RV, tokens_R, order_R)
        logprobs_R = logprobs_RV.gather(1, tokens_R[:, None])[:, 0]
        return torch.stack([tokens_R.double(), confidence_R, logprobs_R])


def _propose(logits_RV: Tensor, active: list[_Request], reader: _Reader) -> list[_Proposal]:
    """What the open rows say, request by request; the one wait for the device in a forward."""
    R, V = logits_RV.shape
    order_R = _uniforms(active, Stream.ORDER, logits_RV.device)
    token_R = _uniforms(active, Stream.TOKEN, logits_RV.device) if reader.config.temperature > 0.0 else None
    size = max(1, CHUNK_BYTES // (8 * V))
    chunks = [slice(start, start + size) for start in range(0, R, size)]
    read = [reader.read(logits_RV[some], None if token_R is None else token_R[some], order_R[some]) for some in chunks]
    tokens_R, confidence_R, logprobs_R = torch.cat(read, dim=1).cpu().numpy()
    if not np.isfinite(logprobs_R).all():
        raise ValueError(
            "the model's probabilities are not finite: its weights may be damaged, or its numbers overflow in this "
            'dtype; try dtype = "float32"'
        )
    ends = np.cumsum([0, *(len(request.open_positions()) for request in active)]).tolist()
    return [
        _Proposal(tokens_R[start:end].astype(np.int64), confidence_R[start:end], logprobs_R[start:end])
        for start, end in pairwise(ends)
    ]


def _uniforms(active: list[_Request], stream: Stream, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([request.uniforms(stream) for request in active])).to(device)


def _infill_requests(
    model: Transformer, canvases: Sequence[Sequence[int]], config: GenerationConfig, seeds: Sequence[int] | None
) -> list[_Request]:
    _check_config(config, model)
    for index, canvas in enumerate(canvases):
        _check_length(len(canvas), model, f"canvas {index}", "shorten the text or its holes")
    tokens = [np.array(canvas, dtype=np.int64) for canvas in canvases]
    holes = [np.flatnonzero(canvas == model.config.mask_token) for canvas in tokens]
    return _requests(model, tokens, holes, config, seeds)


def _requests(
    model: Transformer,
    tokens: list[NDArray[np.int64]],
    holes: list[NDArray[np.int64]],
    config: GenerationConfig,
    seeds: Sequence[int] | None,
) -> list[_Request]:
    """Checked requests with their blocks."""
    seeds = range(len(tokens)) if seeds is None else seeds
    if len(seeds) != len(tokens):
        raise ValueError(f"{len(seeds)} seeds were given for {len(tokens)} requests: give one for each, or None")
    requests = []
    for index, (tokens_L, places, seed) in enumerate(zip(tokens, holes, seeds, strict=True)):
        if seed < 0:
            raise ValueError(f"seed {seed} of request {index} is negative: use 0 or more")
        _check_tokens(tokens_L.tolist(), model, f"request {index}")
        if model.config.logit_alignment == "shifted" and 0 in places:
            raise ValueError(
                f"request {index}: the first token of a text cannot be predicted by this model, whose output i - 1 "
                "predicts token i: begin with a token, such as end of text"
            )
        requests.append(_Request(tokens_L, places, seed, blocks_of(places, config, model.config)))
    return requests


def _generated(request: _Request) -> Generation:
    new = request.holes[: request.stop]
    return Generation(
        token_ids=tuple(request.tokens_L[new].tolist()),
        finish_reason="length" if request.stop is None else "stop",
        num_forwards=request.num_forwards,
        logprobs=tuple(request.logprobs_L[new].tolist()),
        step_map=tuple(request.step_map_L[new].tolist()),
    )


def _infilled(request: _Request) -> Generation:
    return Generation(
        token_ids=tuple(request.tokens_L.tolist()),
        finish_reason="length",
        num_forwards=request.num_forwards,
        logprobs=tuple(request.logprobs_L[request.holes].tolist()),
        step_map=tuple(request.step_map_L[request.holes].tolist()),
    )


def _check_config(config: GenerationConfig, model: Transformer) -> None:
    """The ids of the config are the model's, and leave a token to choose."""
    _check_tokens(config.stop_token_ids or (), model, "stop_token_ids")
    _check_tokens(config.suppress_token_ids, model, "suppress_token_ids")
    if len({model.config.mask_token_id, *config.suppress_token_ids} - {None}) == model.config.vocab_size:
        raise ValueError("suppress_token_ids leave no token to choose: remove some")


def _check_tokens(token_ids: Sequence[int], model: Transformer, what: str) -> None:
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
