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
from diffusionlm.inference.requests import ActiveRequest
from diffusionlm.models.cache import CacheSlots, KeyValueCache
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, BlockCausal
from diffusionlm.models.transformer import Transformer
from profiling import nvtx


def masked_position_logits(
    model: Transformer,
    canvases: Sequence[NDArray[np.int64]],
    masked_positions: Sequence[NDArray[np.int64]],
    block_length: int | None,
) -> Tensor:
    """One forward of texts of any lengths: the logits that predict their open positions, [R, V].

    Args:
        canvases: tokens of each text, placeholders where nothing is decided yet.
        masked_positions: of each text, ascending; at least one in all.
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
    rows = np.concatenate([index * L + positions - shift for index, positions in enumerate(masked_positions)])
    return model(_pad(canvases).to(device), pattern=pattern, output_positions=torch.from_numpy(rows).to(device))


@dataclass(frozen=True)
class InputSlice:
    """What a forward reads of one request."""

    start: int
    end: int
    """The inputs."""
    num_visible: int
    """The keys."""
    cached_length: int
    """Keys and values that stay as they are until the block is over."""


class ModelRunner:
    """The forwards of some requests; what finished leaves the batch."""

    def __init__(self, model: Transformer, config: GenerationConfig, requests: Sequence[ActiveRequest]) -> None:
        self._model, self._config = model, config
        self._block_length = block_causal_length(config, model.config)
        self._shift = int(model.config.logit_alignment == "shifted")
        pattern: AttentionPattern = Bidirectional() if self._block_length is None else BlockCausal(self._block_length)
        self._pattern = pattern
        self._has_guidance = config.cfg_scale > 0.0
        self._cached_requests = list(requests)
        """Whose keys and values the cache has, in its order; with guidance twice, the unguided ones behind."""
        self._cache: KeyValueCache | None = None
        if config.cache != "none" and requests:
            weight = model.lm_head.weight
            copies, length = (2 if self._has_guidance else 1), max(len(request.tokens_L) for request in requests)
            kind = weight.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
            self._cache = KeyValueCache(model.config, copies * len(requests), length, weight.device, dtype)

    def __call__(self, active: Sequence[ActiveRequest]) -> Tensor:
        """Logits that predict the positions that ``active`` requests read, [R, V]; with guidance in fp64.

        Classifier-free guidance (Nie et al. 2025): ``u + (s + 1) (c - u)``, where u does not see what was given.
        """
        spans = [self.input_slice(request) for request in active]
        canvases = [
            request.tokens_L[: input_slice.num_visible] for request, input_slice in zip(active, spans, strict=True)
        ]
        read = [request.read for request in active]
        if self._has_guidance:
            canvases += [
                _unconditional_canvas(request, input_slice.num_visible)
                for request, input_slice in zip(active, spans, strict=True)
            ]
            spans, read = [*spans, *spans], [*read, *read]
        with nvtx.annotate(self._nvtx_label(active, spans)):
            if self._cache is None:
                logits_NV = masked_position_logits(self._model, canvases, read, self._block_length)
            else:
                self._drop_finished_requests(active)
                logits_NV = self._forward_with_cache(canvases, read, spans)
        for request, input_slice in zip(active, spans, strict=False):
            request.cached_length, request.needs_prefill = input_slice.cached_length, False
        if not self._has_guidance:
            return logits_NV
        given_NV, ungiven_NV = logits_NV.double().chunk(2)
        return ungiven_NV + (self._config.cfg_scale + 1.0) * (given_NV - ungiven_NV)

    def input_slice(self, request: ActiveRequest) -> InputSlice:
        """What the next forward reads of a request."""
        positions, length = request.blocks[0].positions, len(request.tokens_L)
        first, after = int(positions[0]), int(positions[-1]) + 1
        first_read = max(0, int(request.read[0]) - self._shift)
        if self._block_length is not None:
            first = first // self._block_length * self._block_length
            num_visible = min(first + self._block_length, length)
            if self._block_length == 1 and self._shift:
                num_visible = first  # Nothing that is read sees the token itself.
            start = 0 if self._cache is None else request.cached_length
            return InputSlice(min(start, first_read), num_visible, num_visible, first)
        num_visible = after if self._config.canvas == "growing" else length
        if self._cache is None or request.needs_prefill:
            return InputSlice(0, num_visible, num_visible, first)
        return InputSlice(
            min(first, first_read), after if self._config.cache == "dual" else num_visible, num_visible, first
        )

    def _nvtx_label(self, active: Sequence[ActiveRequest], spans: Sequence[InputSlice]) -> str:
        """Of a forward's range: one that fills the cache with a text from its first token on is a prefill."""
        pairs = () if self._cache is None else zip(active, spans, strict=False)
        fills = any(request.needs_prefill and input_slice.start == 0 for request, input_slice in pairs)
        return "decoding: prefill" if fills else "decoding: forward"

    def _drop_finished_requests(self, active: Sequence[ActiveRequest]) -> None:
        """Give up the keys and values of requests that are done."""
        assert self._cache is not None
        if len(active) < len(self._cached_requests):
            places = {id(request): place for place, request in enumerate(self._cached_requests)}
            rows = [places[id(request)] for request in active]
            self._cache.select(
                [*rows, *(len(self._cached_requests) + row for row in rows)] if self._has_guidance else rows
            )
            self._cached_requests = list(active)

    def _forward_with_cache(
        self, canvases: list[NDArray[np.int64]], read: list[NDArray[np.int64]], spans: list[InputSlice]
    ) -> Tensor:
        assert self._cache is not None
        device = self._model.lm_head.weight.device
        tokens_BQ = _pad(
            [canvas[input_slice.start : input_slice.end] for canvas, input_slice in zip(canvases, spans, strict=True)]
        )
        Q = tokens_BQ.shape[1]
        places_Q = np.arange(Q)
        positions_BQ = np.stack(
            [
                np.where(places_Q < input_slice.end - input_slice.start, input_slice.start + places_Q, -1)
                for input_slice in spans
            ]
        )
        rows = np.concatenate(
            [
                index * Q + some - input_slice.start - self._shift
                for index, (some, input_slice) in enumerate(zip(read, spans, strict=True))
            ]
        )
        slots = CacheSlots(
            self._cache,
            torch.from_numpy(positions_BQ),
            torch.tensor([input_slice.num_visible for input_slice in spans]),
        )
        return self._model(
            tokens_BQ.to(device), pattern=self._pattern, output_positions=torch.from_numpy(rows).to(device), cache=slots
        )


def _pad(texts: Sequence[NDArray[np.int64]]) -> Tensor:
    """Texts below each other, zeros behind the shorter ones."""
    tokens_BL = torch.zeros((len(texts), max(len(text) for text in texts)), dtype=torch.int64)
    for index, text in enumerate(texts):
        tokens_BL[index, : len(text)] = torch.from_numpy(text)
    return tokens_BL


def _unconditional_canvas(request: ActiveRequest, num_visible: int) -> NDArray[np.int64]:
    """The canvas with placeholders in place of all that was given."""
    canvas_L = np.full_like(request.tokens_L, request.placeholder_id)
    canvas_L[request.masked_positions] = request.tokens_L[request.masked_positions]
    return canvas_L[:num_visible]
