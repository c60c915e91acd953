"""Forwards of decoding: texts of any lengths in one batch, with and without a cache of keys and values.

Three caches. ``block`` (block-causal attention): exact. A block's keys and values become final in the first forward
of the next block, which reads both, so that no forward is spent on storing them, nor on the prompt. ``prefix`` and
``dual`` (bidirectional attention, Wu et al. 2025): the first forward of a block reads the whole text; the others read
from the block on, or the block alone, beside keys and values that have become stale.

Shapes: B texts, L positions, Q inputs of a forward, R open positions of the texts' current blocks (flat, ascending),
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.generation import GenerationConfig
from diffusionlm.inference.blocks import block_causal_length
from diffusionlm.inference.requests import Request
from diffusionlm.models.cache import KeyValueCache, Slots
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, BlockCausal
from diffusionlm.models.transformer import Transformer
from profiling import nvtx


def open_logits(
    model: Transformer,
    canvases: Sequence[NDArray[np.int64]],
    open_positions: Sequence[NDArray[np.int64]],
    block_length: int | None,
) -> Tensor:
    """One forward of texts of any lengths: the logits that predict their open positions, [R, V].

    Args:
        canvases: tokens of each text, placeholders where nothing is decided yet.
        open_positions: of each text, ascending; at least one in all.
        block_length: of block-causal attention, blocks counted from the start of the text; None: bidirectional.
    """
    lengths = [len(canvas) for canvas in canvases]
    L, device = max(lengths), model.lm_head.weight.device
    documents_BL = torch.full((len(canvases), L), -1)  # hides the padding
    for index, length in enumerate(lengths):
        documents_BL[index, :length] = 0
    documents = None if min(lengths) == L else documents_BL.to(device)
    pattern = Bidirectional(documents) if block_length is None else BlockCausal(block_length, documents)
    # Shifted: output i - 1 predicts token i; before a block's first token stands a final one, so it is the clean
    # stream's output of training.
    shift = int(model.config.logit_alignment == "shifted")
    rows = np.concatenate([index * L + positions - shift for index, positions in enumerate(open_positions)])
    return model(_padded(canvases).to(device), pattern=pattern, rows=torch.from_numpy(rows).to(device))


@dataclass(frozen=True)
class Span:
    """What a forward reads of one request."""

    start: int
    end: int
    """The inputs."""
    visible: int
    """The keys."""
    kept: int
    """Keys and values that stay as they are until the block is over."""


class Forwards:
    """The forwards of some requests; what finished leaves the batch."""

    def __init__(self, model: Transformer, config: GenerationConfig, requests: Sequence[Request]) -> None:
        self._model, self._config = model, config
        self._block_length = block_causal_length(config, model.config)
        self._shift = int(model.config.logit_alignment == "shifted")
        pattern: AttentionPattern = Bidirectional() if self._block_length is None else BlockCausal(self._block_length)
        self._pattern = pattern
        self._is_guided = config.cfg_scale > 0.0
        self._held = list(requests)
        """Whose keys and values the cache has, in its order; with guidance twice, the unguided ones behind."""
        self._cache: KeyValueCache | None = None
        if config.cache != "none" and requests:
            weight = model.lm_head.weight
            copies, length = (2 if self._is_guided else 1), max(len(request.tokens_L) for request in requests)
            kind = weight.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
            self._cache = KeyValueCache(model.config, copies * len(requests), length, weight.device, dtype)

    def __call__(self, active: Sequence[Request]) -> Tensor:
        """Logits that predict the positions that ``active`` requests read, [R, V]; with guidance in fp64.

        Classifier-free guidance (Nie et al. 2025): ``u + (s + 1) (c - u)``, where u does not see what was given.
        """
        spans = [self.span(request) for request in active]
        canvases = [request.tokens_L[: span.visible] for request, span in zip(active, spans, strict=True)]
        read = [request.read for request in active]
        if self._is_guided:
            canvases += [_ungiven(request, span.visible) for request, span in zip(active, spans, strict=True)]
            spans, read = [*spans, *spans], [*read, *read]
        with nvtx.range(self._name(active, spans)):
            if self._cache is None:
                logits_RV = open_logits(self._model, canvases, read, self._block_length)
            else:
                self._hold(active)
                logits_RV = self._cached(canvases, read, spans)
        for request, span in zip(active, spans, strict=False):
            request.kept, request.is_fresh = span.kept, False
        if not self._is_guided:
            return logits_RV
        given_RV, ungiven_RV = logits_RV.double().chunk(2)
        return ungiven_RV + (self._config.cfg_scale + 1.0) * (given_RV - ungiven_RV)

    def span(self, request: Request) -> Span:
        """What the next forward reads of a request."""
        positions, length = request.blocks[0].positions, len(request.tokens_L)
        first, after = int(positions[0]), int(positions[-1]) + 1
        first_read = max(0, int(request.read[0]) - self._shift)
        if self._block_length is not None:
            first = first // self._block_length * self._block_length
            visible = min(first + self._block_length, length)
            if self._block_length == 1 and self._shift:
                visible = first  # Nothing that is read sees the token itself.
            start = 0 if self._cache is None else request.kept
            return Span(min(start, first_read), visible, visible, first)
        visible = after if self._config.canvas == "growing" else length
        if self._cache is None or request.is_fresh:
            return Span(0, visible, visible, first)
        return Span(min(first, first_read), after if self._config.cache == "dual" else visible, visible, first)

    def _name(self, active: Sequence[Request], spans: Sequence[Span]) -> str:
        """Of a forward's range: one that fills the cache with a text from its first token on is a prefill."""
        pairs = () if self._cache is None else zip(active, spans, strict=False)
        fills = any(request.is_fresh and span.start == 0 for request, span in pairs)
        return "decoding: prefill" if fills else "decoding: forward"

    def _hold(self, active: Sequence[Request]) -> None:
        """Give up the keys and values of requests that are done."""
        assert self._cache is not None
        if len(active) < len(self._held):
            places = {id(request): place for place, request in enumerate(self._held)}
            rows = [places[id(request)] for request in active]
            self._cache.select([*rows, *(len(self._held) + row for row in rows)] if self._is_guided else rows)
            self._held = list(active)

    def _cached(self, canvases: list[NDArray[np.int64]], read: list[NDArray[np.int64]], spans: list[Span]) -> Tensor:
        assert self._cache is not None
        device = self._model.lm_head.weight.device
        tokens_BQ = _padded([canvas[span.start : span.end] for canvas, span in zip(canvases, spans, strict=True)])
        Q = tokens_BQ.shape[1]
        places_Q = np.arange(Q)
        positions_BQ = np.stack(
            [np.where(places_Q < span.end - span.start, span.start + places_Q, -1) for span in spans]
        )
        rows = np.concatenate(
            [
                index * Q + some - span.start - self._shift
                for index, (some, span) in enumerate(zip(read, spans, strict=True))
            ]
        )
        slots = Slots(self._cache, torch.from_numpy(positions_BQ), torch.tensor([span.visible for span in spans]))
        return self._model(
            tokens_BQ.to(device), pattern=self._pattern, rows=torch.from_numpy(rows).to(device), cache=slots
        )


def _padded(texts: Sequence[NDArray[np.int64]]) -> Tensor:
    """Texts below each other, zeros behind the shorter ones."""
    tokens_BL = torch.zeros((len(texts), max(len(text) for text in texts)), dtype=torch.int64)
    for index, text in enumerate(texts):
        tokens_BL[index, : len(text)] = torch.from_numpy(text)
    return tokens_BL


def _ungiven(request: Request, visible: int) -> NDArray[np.int64]:
    """The canvas with placeholders in place of all that was given."""
    canvas_L = np.full_like(request.tokens_L, request.placeholder)
    canvas_L[request.holes] = request.tokens_L[request.holes]
    return canvas_L[:visible]
