"""Forwards of decoding: requests with settings of their own in one batch, with and without a KV cache.

Three caches. ``block`` (block-causal attention): exact. A block's keys and values become final in the first forward
of the next block, which reads both, so neither storing them nor the prompt takes a forward of its own. ``prefix`` and
``dual`` (bidirectional attention, Wu et al. 2025): the first forward of a block reads the whole text; the others read
from the block on, or the block alone, and attend to stale keys and values elsewhere.

Texts of any lengths follow each other in one row, without padding.

Shapes: L positions of a text, Q inputs of a forward, N output positions of all texts (flat), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.model import ModelConfig
from diffusionlm.diffusion.attention_bias import read_attention_bias
from diffusionlm.inference.cuda_graphs import GraphedForward
from diffusionlm.inference.requests import ActiveRequest
from diffusionlm.inference.settings import MAX_KEPT_SETTINGS, DecodingSettings
from diffusionlm.models.cache import PagedCache
from diffusionlm.models.patterns import (
    AttentionPattern,
    Bidirectional,
    BlockCausal,
    DenseBias,
    PromptAndOwnBlock,
)
from diffusionlm.models.row_adapters import AdapterRows
from diffusionlm.models.tensors import copy_to_device
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.varlen import SequenceSlice, VarlenBatch
from profiling import nvtx


def masked_position_logits(
    model: Transformer,
    canvases: Sequence[NDArray[np.int64]],
    masked_positions: Sequence[NDArray[np.int64]],
    patterns: Sequence[AttentionPattern],
) -> Tensor:
    """Logits that predict the masked positions of texts of any lengths, [N, V], in one forward without a cache.

    Args:
        canvases: tokens of each text, placeholders at masked positions.
        masked_positions: of each text, ascending; at least one in all.
        patterns: attention of each text.
    """
    shift = _output_shift(model.config)
    sequences = [
        SequenceSlice(0, len(canvas), len(canvas), pattern, outputs=positions - shift)
        for canvas, positions, pattern in zip(canvases, masked_positions, patterns, strict=True)
    ]
    return _forward(model, canvases, VarlenBatch(sequences))


def _forward(model: Transformer, canvases: Sequence[NDArray[np.int64]], batch: VarlenBatch) -> Tensor:
    """Logits of the outputs of all sequences, [N, V]."""
    inputs = [canvas[part.start : part.end] for canvas, part in zip(canvases, batch.sequences, strict=True)]
    tokens_1Q = copy_to_device(torch.from_numpy(np.concatenate(inputs))[None], model.lm_head.weight.device)
    return model(tokens_1Q, pattern=batch)


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


@dataclass(frozen=True)
class ScheduledRequest:
    """What one forward does for a request."""

    request: ActiveRequest
    part: InputSlice
    is_decoded: bool = True
    """False: keys and values of a part of its text are cached, nothing else."""

    @property
    def num_tokens(self) -> int:
        """Inputs of all texts of the request."""
        return (self.part.end - self.part.start) * self.request.num_texts


def find_input_slice(request: ActiveRequest) -> InputSlice:
    """The positions of a request that its next step reads."""
    config, block_length = request.settings.config, request.settings.block_causal_length
    block_positions, length = request.blocks[0].positions, len(request.tokens_L)
    block_start, block_end = int(block_positions[0]), int(block_positions[-1]) + 1
    shift = _output_shift(request.settings.model)
    first_output = max(0, int(request.output_positions[0]) - shift)
    if block_length is not None:
        segments = request.prepared.segments
        block_start = int(segments.block_starts(block_positions[:1], block_length)[0])
        num_visible = min(segments.block_end(block_start, block_length), length)
        if block_length == 1 and shift:
            num_visible = block_start  # No output that is computed attends to the token itself.
        start = min(request.cached_length, first_output) if request.uses_cache else 0
        return InputSlice(start, num_visible, num_visible, block_start)
    num_visible = block_end if config.canvas == "growing" else length
    if not request.uses_cache or request.needs_prefill:
        return InputSlice(0, num_visible, num_visible, block_start)
    end = block_end if config.cache == "dual" else num_visible
    return InputSlice(min(block_start, first_output), end, num_visible, block_start)


def find_prompt_slice(request: ActiveRequest, num_tokens: int) -> InputSlice | None:
    """The next whole blocks of a text that is read in parts, of at most ``num_tokens`` positions, or one block if
    these are fewer; None: ``num_tokens`` is 0, or the step of the request reads no more than that.

    Only for block-causal attention with a cache.
    """
    block_length, part = request.settings.block_causal_length, find_input_slice(request)
    assert block_length is not None and request.uses_blocks
    if num_tokens < 1:
        return None
    segments = request.prepared.segments
    limit = min(part.start + num_tokens, part.cached_length)
    starts = segments.block_starts(np.array([part.start, limit]), block_length).tolist()
    end = max(starts[1], segments.block_end(starts[0], block_length))
    return InputSlice(part.start, end, end, end) if end <= part.cached_length else part


def count_final_tokens(request: ActiveRequest) -> int:
    """Positions at the beginning whose keys and values the next step does not compute anew."""
    part = find_input_slice(request)
    return min(part.cached_length, max(0, int(request.output_positions[0]) - _output_shift(request.settings.model)))


def count_unchanging_tokens(request: ActiveRequest) -> int:
    """Positions at the beginning whose cached keys and values are not written anymore: with shifted outputs each
    step reads the position before the block again."""
    return max(0, request.cached_length - _output_shift(request.settings.model))


@dataclass(frozen=True)
class InputText:
    """A text in a forward."""

    tokens_L: NDArray[np.int64]
    sequence: SequenceSlice
    adapter: str | None = None
    """Name of its adapter."""


class ModelRunner:
    """Runs the model on requests, which own pages of a cache."""

    def __init__(
        self,
        model: Transformer,
        cache: PagedCache | None,
        adapter_rows: AdapterRows | None = None,
        graphed_forward: GraphedForward | None = None,
    ) -> None:
        """
        Args:
            adapter_rows: of a model with adapters of single rows (`add_row_adapters`).
            graphed_forward: computes the forwards without adapters that have a CUDA graph.
        """
        self._model, self._cache, self._adapter_rows = model, cache, adapter_rows
        self._graphed_forward = graphed_forward
        self._shift = _output_shift(model.config)
        self._get_pattern = lru_cache(MAX_KEPT_SETTINGS)(build_pattern)

    def __call__(self, scheduled: Sequence[ScheduledRequest]) -> Tensor:
        """Logits that predict the output positions of the requests that are decoded, and then, for those with guidance,
        the logits of the same positions with the prompt masked, [N, V]."""
        # A forward that fills the cache with a text from its first token on is a prefill.
        is_prefill = any(
            item.request.uses_cache and item.request.needs_prefill and item.part.start == 0 for item in scheduled
        )
        guided = [item for item in scheduled if item.request.has_guidance]
        texts = [self._text(item, 0) for item in scheduled] + [self._text(item, 1) for item in guided]
        with nvtx.annotate("decoding: prefill" if is_prefill else "decoding: forward"):
            logits_NV = self._compute_logits(texts)
        for item in scheduled:
            item.request.cached_length = item.part.cached_length
            item.request.needs_prefill &= not item.is_decoded
        return logits_NV

    def _compute_logits(self, texts: Sequence[InputText]) -> Tensor:
        """Logits of the outputs of all texts, [N, V]."""
        logits_NV = None
        if self._graphed_forward is not None and all(text.adapter is None for text in texts):
            logits_NV = self._graphed_forward([(text.tokens_L, text.sequence) for text in texts])
        return self._forward(texts) if logits_NV is None else logits_NV

    def _forward(self, texts: Sequence[InputText], *, copies_keys: bool = False) -> Tensor:
        """Logits of one forward: of the outputs of all texts [N, V], or of all inputs [1, Q, V]."""
        batch = VarlenBatch([text.sequence for text in texts], self._cache, copies_keys=copies_keys)
        device = self._model.lm_head.weight.device
        if self._adapter_rows is None:
            return _forward(self._model, [text.tokens_L for text in texts], batch)
        with self._adapter_rows.adapters_context(batch, [text.adapter for text in texts], device):
            return _forward(self._model, [text.tokens_L for text in texts], batch)

    def _text(self, item: ScheduledRequest, number: int) -> InputText:
        """The text of a request, or with guidance and number 1 the one without what was given."""
        request, part = item.request, item.part
        sequence = SequenceSlice(
            part.start,
            part.end,
            part.num_visible,
            self._pattern(request, part.num_visible),
            pages=request.pages[number] if request.uses_cache else None,
            outputs=request.output_positions - self._shift if item.is_decoded else request.output_positions[:0],
        )
        tokens_L = _unconditional_canvas(request) if number else request.tokens_L
        return InputText(tokens_L, sequence, request.prepared.options.adapter)

    def _pattern(self, request: ActiveRequest, length: int) -> AttentionPattern:
        """Attention of a request's text; requests with the same settings share one."""
        settings = request.settings
        if settings.has_independent_blocks:
            assert settings.config.block_length is not None
            is_prompt_1L = torch.arange(length)[None] < int(request.masked_positions[0])
            return PromptAndOwnBlock(settings.config.block_length, is_prompt_1L)
        if settings.block_causal_length is not None and len(request.prepared.segments.starts) > 1:
            segments_1L = torch.from_numpy(request.prepared.segments.numbers(length))[None]
            return BlockCausal(settings.block_causal_length, segments_BL=segments_1L)
        pattern = self._get_pattern(settings)
        return DenseBias(pattern.bias[..., :length, :length]) if isinstance(pattern, DenseBias) else pattern


def build_pattern(settings: DecodingSettings) -> AttentionPattern:
    """Attention of texts of any length: that of an attention bias is for the longest one."""
    if settings.config.attention_bias is not None:
        return DenseBias(read_attention_bias(settings.config.attention_bias, settings.model))
    return Bidirectional() if settings.block_causal_length is None else BlockCausal(settings.block_causal_length)


def _unconditional_canvas(request: ActiveRequest) -> NDArray[np.int64]:
    """The canvas with everything that was given replaced by placeholders."""
    canvas_L = np.full_like(request.tokens_L, request.placeholder_id)
    canvas_L[request.masked_positions] = request.tokens_L[request.masked_positions]
    return canvas_L
