"""Forwards of decoding: texts of any lengths in one batch, with and without a KV cache.

Three caches. ``block`` (block-causal attention): exact. A block's keys and values become final in the first forward
of the next block, which reads both, so neither storing them nor the prompt takes a forward of its own. ``prefix`` and
``dual`` (bidirectional attention, Wu et al. 2025): the first forward of a block reads the whole text; the others read
from the block on, or the block alone, and attend to stale keys and values elsewhere.

Shapes: B texts, L positions, Q inputs of a forward, N output positions of all texts (flat, ascending), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.model import ModelConfig
from diffusionlm.diffusion.attention_bias import read_attention_bias
from diffusionlm.inference.blocks import TextSegments
from diffusionlm.inference.requests import ActiveRequest
from diffusionlm.inference.settings import DecodingSettings
from diffusionlm.models.cache import CacheSlots, KeyValueCache
from diffusionlm.models.layers import compute_dtype
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, BlockCausal, DenseBias, PromptAndOwnBlock
from diffusionlm.models.transformer import Transformer
from profiling import nvtx


@dataclass(frozen=True)
class TextAttention:
    """The attention of whole texts, without a cache."""

    block_length: int | None
    """Of block-causal attention, counted from the start of the text; with prompts of independent blocks, counted from
    the end of the prompt. None: bidirectional."""
    prompt_lengths: Sequence[int] | None = None
    """Of each text, if its blocks are independent: positions attend to the prompt and their own block."""
    bias: Tensor | None = None
    """Bias of bidirectional attention; see `DenseBias`."""
    segments: Sequence[TextSegments] = ()
    """Of each text, under block-causal attention. Empty: each text is one segment."""

    def build_pattern(self, length: int, documents_BL: Tensor | None) -> AttentionPattern:
        """The pattern of texts that are padded to a length."""
        if self.prompt_lengths is not None:
            assert self.block_length is not None
            is_prompt_BL = torch.arange(length) < torch.tensor(self.prompt_lengths)[:, None]
            return PromptAndOwnBlock(self.block_length, is_prompt_BL, documents_BL)
        if self.bias is not None:
            return DenseBias(self.bias[..., :length, :length], documents_BL)
        if self.block_length is None:
            return Bidirectional(documents_BL)
        return BlockCausal(self.block_length, documents_BL, _segment_numbers(self.segments, length))


def masked_position_logits(
    model: Transformer,
    canvases: Sequence[NDArray[np.int64]],
    masked_positions: Sequence[NDArray[np.int64]],
    attention: TextAttention,
) -> Tensor:
    """Logits that predict the masked positions of texts of any lengths, [N, V], in one forward.

    Args:
        canvases: tokens of each text, placeholders at masked positions.
        masked_positions: of each text, ascending; at least one in all.
    """
    lengths = [len(canvas) for canvas in canvases]
    L, device = max(lengths), model.lm_head.weight.device
    documents_BL = torch.full((len(canvases), L), -1)  # -1 hides the padding
    for index, length in enumerate(lengths):
        documents_BL[index, :length] = 0
    pattern = attention.build_pattern(L, None if min(lengths) == L else documents_BL).to(device)
    shift = _output_shift(model.config)
    flat_positions = [index * L + positions - shift for index, positions in enumerate(masked_positions)]
    output_positions_N = torch.from_numpy(np.concatenate(flat_positions)).to(device)
    return model(_pad(canvases).to(device), pattern=pattern, output_positions=output_positions_N)


def _output_shift(model: ModelConfig) -> int:
    """1 if output i - 1 predicts token i. The token before a block is final, so that output is the clean stream's of
    training."""
    return int(model.logit_alignment == "shifted")


@dataclass(frozen=True)
class InputSlice:
    """The positions of one request that a forward reads and attends to."""

    start: int
    """First input."""
    end: int
    """After the last input."""
    num_visible: int
    """Keys from the start of the text."""
    cached_length: int
    """Keys and values that do not change until the block is complete."""


class ModelRunner:
    """Runs the model on a batch of requests and maintains their KV cache. Finished requests are removed from it."""

    def __init__(self, model: Transformer, settings: DecodingSettings, requests: Sequence[ActiveRequest]) -> None:
        self._model, self._config, self._settings = model, settings.config, settings
        bias_path = settings.config.attention_bias
        self._bias = None if bias_path is None else read_attention_bias(bias_path, model.config)
        self._block_length = settings.block_causal_length
        self._shift = _output_shift(model.config)
        self._has_guidance = settings.config.cfg_scale > 0.0
        self._cached_requests = list(requests)
        """Requests in the order of the cache. With guidance the cache has a second copy, for unconditional inputs."""
        self._cache: KeyValueCache | None = None
        if settings.config.cache != "none" and requests:
            weight = model.lm_head.weight
            batch_size = len(requests) * (2 if self._has_guidance else 1)
            length = max(len(request.tokens_L) for request in requests)
            self._cache = KeyValueCache(model.config, batch_size, length, weight.device, compute_dtype(weight))

    def __call__(self, requests: Sequence[ActiveRequest]) -> Tensor:
        """Logits that predict the output positions of the requests, [N, V]; with guidance in fp64.

        Classifier-free guidance (Nie et al. 2025): ``u + (s + 1) (c - u)``, where u is computed with the prompt masked.
        """
        slices = [self.input_slice(request) for request in requests]
        output_positions = [request.output_positions for request in requests]
        pairs = list(zip(requests, slices, strict=True))
        canvases = [request.tokens_L[: input_slice.num_visible] for request, input_slice in pairs]
        # A forward that fills the cache with a text from its first token on is a prefill.
        is_prefill = self._cache is not None and any(
            request.needs_prefill and input_slice.start == 0 for request, input_slice in pairs
        )
        if self._has_guidance:
            canvases += [_unconditional_canvas(request, input_slice.num_visible) for request, input_slice in pairs]
            slices, output_positions = slices * 2, output_positions * 2
        with nvtx.annotate("decoding: prefill" if is_prefill else "decoding: forward"):
            if self._cache is None:
                logits_NV = masked_position_logits(
                    self._model, canvases, output_positions, self._text_attention(requests)
                )
            else:
                self._drop_finished_requests(requests)
                pattern = self._text_attention(requests).build_pattern(self._cache.max_length, None)
                logits_NV = self._forward_with_cache(canvases, output_positions, slices, pattern)
        for request, input_slice in pairs:
            request.cached_length, request.needs_prefill = input_slice.cached_length, False
        if not self._has_guidance:
            return logits_NV
        conditional_NV, unconditional_NV = logits_NV.double().chunk(2)
        return unconditional_NV + (self._config.cfg_scale + 1.0) * (conditional_NV - unconditional_NV)

    def input_slice(self, request: ActiveRequest) -> InputSlice:
        """The positions of a request that the next forward reads."""
        block_positions, length = request.blocks[0].positions, len(request.tokens_L)
        block_start, block_end = int(block_positions[0]), int(block_positions[-1]) + 1
        first_output = max(0, int(request.output_positions[0]) - self._shift)
        if self._block_length is not None:
            segments = request.segments
            block_start = int(segments.block_starts(block_positions[:1], self._block_length)[0])
            num_visible = min(segments.block_end(block_start, self._block_length), length)
            if self._block_length == 1 and self._shift:
                num_visible = block_start  # No output that is computed attends to the token itself.
            start = 0 if self._cache is None else request.cached_length
            return InputSlice(min(start, first_output), num_visible, num_visible, block_start)
        num_visible = block_end if self._config.canvas == "growing" else length
        if self._cache is None or request.needs_prefill:
            return InputSlice(0, num_visible, num_visible, block_start)
        end = block_end if self._config.cache == "dual" else num_visible
        return InputSlice(min(block_start, first_output), end, num_visible, block_start)

    def _text_attention(self, requests: Sequence[ActiveRequest]) -> TextAttention:
        num_copies = 2 if self._has_guidance else 1
        if self._settings.has_independent_blocks:
            prompt_lengths = [int(request.masked_positions[0]) for request in requests]
            return TextAttention(self._config.block_length, prompt_lengths * num_copies)
        segments = [request.segments for request in requests] * num_copies
        has_segments = any(len(parts.starts) > 1 for parts in segments)
        return TextAttention(self._block_length, bias=self._bias, segments=segments if has_segments else ())

    def _drop_finished_requests(self, requests: Sequence[ActiveRequest]) -> None:
        assert self._cache is not None
        if len(requests) < len(self._cached_requests):
            rows = {id(request): row for row, request in enumerate(self._cached_requests)}
            active_rows = [rows[id(request)] for request in requests]
            if self._has_guidance:
                active_rows += [len(self._cached_requests) + row for row in active_rows]
            self._cache.select(active_rows)
            self._cached_requests = list(requests)

    def _forward_with_cache(
        self,
        canvases: Sequence[NDArray[np.int64]],
        output_positions: Sequence[NDArray[np.int64]],
        slices: Sequence[InputSlice],
        pattern: AttentionPattern,
    ) -> Tensor:
        assert self._cache is not None
        device = self._model.lm_head.weight.device
        inputs = [canvas[part.start : part.end] for canvas, part in zip(canvases, slices, strict=True)]
        tokens_BQ = _pad(inputs)
        Q = tokens_BQ.shape[1]
        offsets_Q = np.arange(Q)
        positions_BQ = np.stack(
            [np.where(offsets_Q < part.end - part.start, part.start + offsets_Q, -1) for part in slices]
        )
        flat_positions = [
            index * Q + positions - part.start - self._shift
            for index, (positions, part) in enumerate(zip(output_positions, slices, strict=True))
        ]
        num_visible_B = torch.tensor([part.num_visible for part in slices])
        return self._model(
            tokens_BQ.to(device),
            pattern=pattern,
            output_positions=torch.from_numpy(np.concatenate(flat_positions)).to(device),
            cache=CacheSlots(self._cache, torch.from_numpy(positions_BQ), num_visible_B),
        )


def _segment_numbers(segments: Sequence[TextSegments], length: int) -> Tensor | None:
    """Number of each position's segment, [B, L]; None: there are no segments."""
    return torch.from_numpy(np.stack([parts.numbers(length) for parts in segments])) if segments else None


def _pad(texts: Sequence[NDArray[np.int64]]) -> Tensor:
    """Stack texts, with zeros behind the shorter ones, [B, L]."""
    tokens_BL = torch.zeros((len(texts), max(len(text) for text in texts)), dtype=torch.int64)
    for index, text in enumerate(texts):
        tokens_BL[index, : len(text)] = torch.from_numpy(text)
    return tokens_BL


def _unconditional_canvas(request: ActiveRequest, num_visible: int) -> NDArray[np.int64]:
    """The canvas with everything that was given replaced by placeholders."""
    canvas_L = np.full_like(request.tokens_L, request.placeholder_id)
    canvas_L[request.masked_positions] = request.tokens_L[request.masked_positions]
    return canvas_L[:num_visible]
