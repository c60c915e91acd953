"""Forwards of decoding: requests with settings of their own in one batch, with and without a KV cache.

Three caches. ``block`` (block-causal attention): exact. A block's keys and values become final in the first forward
of the next block, which reads both, so neither storing them nor the prompt takes a forward of its own. ``prefix`` and
``dual`` (bidirectional attention, Wu et al. 2025): the first forward of a block reads the whole text; the others read
from the block on, or the block alone, and attend to stale keys and values elsewhere.

Texts of any lengths follow each other in one row, without padding.

`FixedShapeRunner` gives a request the same bits, whatever is decoded beside it. Rounding of a matrix product depends on
its shape, and may depend on the place of a row in it. So each forward is a *tile* of `TILE_ROWS` inputs, in which each
block of block-causal attention has one place, which depends on its position in the text alone. Prompts in parts, cached
pages, preemption and neighbors change which tiles are computed, not a row of one. A text without such blocks has
forwards of its own. Attention reads keys up to the end of the query's block.

Shapes: L positions of a text, Q inputs of a forward, N output positions of all texts (flat), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionlm.diffusion.layout import read_attention_bias
from diffusionlm.inference.cuda_graphs import GraphedForward, InputText
from diffusionlm.inference.images import FeatureReader, TextImages, join_images
from diffusionlm.inference.requests import ActiveRequest
from diffusionlm.inference.sampling.sharded_sampling import ShardedSampling, sample_from_columns
from diffusionlm.inference.settings import MAX_KEPT_SETTINGS, DecodingSettings
from diffusionlm.models.cache import PagedCache
from diffusionlm.models.moe import MoE
from diffusionlm.models.patterns import (
    AttentionPattern,
    Bidirectional,
    BlockCausal,
    Causal,
    CausalThenBlock,
    DenseBias,
    PromptAndOwnBlock,
)
from diffusionlm.models.row_adapters import ModelAdapter, RowAdaptedModel, share_weights
from diffusionlm.models.tensors import copy_to_device
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.varlen import SequenceSlice, VarlenBatch
from profiling import nvtx

CAUSAL, BIDIRECTIONAL = Causal(), Bidirectional()
"""Attention of noisy blocks."""

TILE_ROWS = 16
"""Inputs of a tile; more if a block is longer, fewer if blocks of this length do not fill it."""


@dataclass(frozen=True)
class ScheduledRequest:
    """What one forward does for a request: the positions that it reads and attends to."""

    request: ActiveRequest
    start: int
    """First input."""
    end: int
    """After the last input."""
    num_visible: int
    """Keys from the start of the text."""
    cached_length: int
    """Keys and values that do not change until the block is complete."""
    is_decoded: bool = True
    """False: keys and values of a part of its text are cached, nothing else."""
    noisy_start: int | None = None
    """First input of the noisy block after token-causal text (`DecodingSettings.has_noisy_blocks`), or of the one that
    drafts tokens (`SpeculationState`). None: there is none."""

    @property
    def num_tokens(self) -> int:
        """Inputs of all texts of the request."""
        return (self.end - self.start) * self.request.num_texts


def schedule_step(request: ActiveRequest) -> ScheduledRequest:
    """The next step of a request."""
    if request.speculation is not None:
        state = request.speculation
        start, end = min(request.cached_length, state.start - 1), state.block_end
        return ScheduledRequest(request, start, end, end, state.num_final, noisy_start=state.block_start)
    config, length, shift = request.settings.config, len(request.tokens_L), request.output_shift
    block_length, block_positions = request.settings.block_causal_length, request.blocks[0].positions
    block_start, block_end = int(block_positions[0]), int(block_positions[-1]) + 1
    first_output = max(0, int(request.output_positions[0]) - shift)
    if block_length is not None:
        segments = request.segments
        # A read, and a known text of a causal model, have several blocks at once (`prepare_prompt_scoring`).
        block_start, last_start = segments.block_starts(block_positions[[0, -1]], block_length).tolist()
        num_visible = min(segments.block_end(last_start, block_length), length)
        if block_length == 1 and shift:
            num_visible = last_start  # No output that is computed attends to the token itself.
        noisy_start = block_start if request.settings.has_noisy_blocks else None
        if request.blocks[0].is_next_token:
            num_visible, noisy_start = int(block_positions[0]), None
        start = min(request.cached_length, first_output) if request.uses_cache else 0
        return ScheduledRequest(request, start, num_visible, num_visible, block_start, noisy_start=noisy_start)
    num_visible = block_end if config.canvas == "growing" else length
    if not request.uses_cache or request.needs_prefill:
        return ScheduledRequest(request, 0, num_visible, num_visible, block_start)
    end = block_end if config.cache == "dual" else num_visible
    return ScheduledRequest(request, min(block_start, first_output), end, num_visible, block_start)


def schedule_prompt_part(request: ActiveRequest, num_tokens: int) -> ScheduledRequest | None:
    """The next whole blocks of a text that is read in parts, of at most ``num_tokens`` positions, or one block if
    these are fewer; the step of the request if it reads no more than that; None: ``num_tokens`` is 0.

    Only for block-causal attention with a cache.
    """
    block_length, step = request.settings.block_causal_length, schedule_step(request)
    assert block_length is not None and request.uses_blocks
    if num_tokens < 1:
        return None
    limit = min(step.start + num_tokens, step.cached_length)
    starts = request.segments.block_starts(np.array([step.start, limit]), block_length).tolist()
    end = max(starts[1], request.segments.block_end(starts[0], block_length))
    # With shifted outputs a step begins before its block, so everything before the block may be cached already.
    if end > step.cached_length or end <= request.cached_length or end == step.end:
        return step
    return ScheduledRequest(request, step.start, end, end, end, is_decoded=False)


def count_final_tokens(request: ActiveRequest) -> int:
    """Positions at the beginning whose keys and values the next step does not compute anew."""
    first_output = max(0, int(request.output_positions[0]) - request.output_shift)
    return min(schedule_step(request).cached_length, first_output)


def count_unchanging_tokens(request: ActiveRequest) -> int:
    """Positions at the beginning whose cached keys and values are not written anymore: with shifted outputs each
    step reads the position before the block again."""
    return max(0, request.cached_length - request.output_shift)


class ModelRunner:
    """Runs the model on requests, which own pages of a cache."""

    def __init__(
        self, model: Transformer, cache: PagedCache | None, graphed_forward: GraphedForward | None = None
    ) -> None:
        """
        Args:
            graphed_forward: computes the forwards without adapters that have a CUDA graph.
        """
        self._model, self._cache, self._graphed_forward = model, cache, graphed_forward
        self.announce: Callable[[Sequence[InputText], ShardedSampling | None], None] | None = None
        """Called before each forward, for other processes that compute their part of it, and of the sampling."""
        self._adapted: RowAdaptedModel | None = None
        """Computes the forwards with adapters. None: there was none yet."""
        self._get_pattern = lru_cache(MAX_KEPT_SETTINGS)(build_pattern)
        self._read_features = FeatureReader(model)

    def read_images(self, item: ScheduledRequest) -> None:
        """Compute the features of the images that a forward reads; equal images of requests share them.

        Raises:
            ValueError: an image cannot be read anymore.
        """
        request, start, block_length = item.request, item.start, item.request.settings.block_causal_length
        if block_length is not None and request.options.images:  # a tile has whole blocks
            start = int(request.segments.block_starts(np.array([start]), block_length)[0])
        for placed in request.options.images:
            if placed.start < item.end and placed.end > start and placed.image.digest not in request.image_features:
                assert request.options.processor is not None, "checked before"
                features_EFD = self._read_features(placed.image, request.options.processor)
                request.image_features[placed.image.digest] = features_EFD

    def prepare_adapter(self, adapter: ModelAdapter) -> None:
        """Make the next forwards able to have an adapter. Another thread may run the model meanwhile.

        Raises:
            ValueError: the model has an adapter itself.
        """
        self._adapted = self._adapted or RowAdaptedModel(self._model)
        self._adapted.prepare(adapter)

    def __call__(self, scheduled: Sequence[ScheduledRequest], sampling: ShardedSampling | None = None) -> Tensor:
        """Logits that predict the output positions of the requests that are decoded, and then, for those with guidance,
        the logits of the same positions with the prompt masked, [N, V]; with ``sampling`` samples in place of logits,
        [3, N] (`sample_from_columns`)."""
        guided = [item for item in scheduled if item.request.has_guidance]
        texts = [text for item in scheduled for text in self._texts(item, 0)]
        texts += [text for item in guided for text in self._texts(item, 1)]
        with nvtx.annotate("decoding: forward"):
            outputs = self.compute_logits(texts) if sampling is None else self.compute_samples(texts, sampling)
        for item in scheduled:
            item.request.cached_length = item.cached_length
            item.request.needs_prefill &= not item.is_decoded
        return outputs

    def compute_logits(self, texts: Sequence[InputText]) -> Tensor:
        """Logits of the outputs of all texts, [N, V]."""
        if self.announce is not None:
            self.announce(texts, None)
        logits_NV = None if self._graphed_forward is None else self._graphed_forward(texts)
        return self._forward(texts) if logits_NV is None else logits_NV

    def compute_samples(self, texts: Sequence[InputText], sampling: ShardedSampling) -> Tensor:
        """Samples at the outputs of all texts, [3, N], of a model whose head is divided over ranks."""
        if self.announce is not None:
            self.announce(texts, sampling)
        return sample_from_columns(self._model, self._forward(texts, keeps_shards=True), sampling)

    def _forward(self, texts: Sequence[InputText], *, copies_keys: bool = False, keeps_shards: bool = False) -> Tensor:
        """Logits of one forward: of the outputs of all texts [N, V], or of all inputs [1, Q, V]. With ``keeps_shards``
        this rank's columns."""
        batch = VarlenBatch([text.sequence for text in texts], self._cache, copies_keys=copies_keys)
        device = self._model.lm_head.weight.device
        tokens_1Q = copy_to_device(
            torch.from_numpy(np.concatenate([text.input_tokens for text in texts]))[None], device
        )
        images = join_images(self._model, batch.sequences, [text.images for text in texts])
        adapters, masked_Q = [text.adapter for text in texts], np.concatenate([text.masked_inputs for text in texts])
        if not any(adapters):
            self._model.keeps_vocabulary_shards = keeps_shards
            masked_1Q = None
            if self._model.masked_rows is not None:
                masked_1Q = copy_to_device(torch.from_numpy(masked_Q)[None], device)
            return self._model(tokens_1Q, pattern=batch, images=images, masked_BL=masked_1Q)
        assert self._adapted is not None, "prepare_adapter precedes"
        self._adapted.model.keeps_vocabulary_shards = keeps_shards
        with self._adapted.rows.adapters_context(batch, adapters, masked_Q, device):
            return self._adapted.model(tokens_1Q, pattern=batch, images=images)

    def _texts(self, item: ScheduledRequest, number: int) -> Iterator[InputText]:
        """The text of a request with this number (`_text`). Committed text and a noisy block with an attention of its
        own are two texts with the same pages: all keys of a layer are written before attention, so the second one reads
        those of the first."""
        text, middle = self._text(item, number), item.noisy_start
        noisy_attention = item.request.settings.model.noisy_attention
        # An adapter of masks has rows of its own, whose number would change those of others in a tile.
        has_drafter = text.adapter is not None and text.adapter.acts_on_masks
        if middle is None or (noisy_attention == "token" and not has_drafter):
            yield text
            return
        sequence, outputs = text.sequence, text.sequence.outputs
        assert outputs is not None
        is_causal = noisy_attention != "block"
        if sequence.pages is None:
            pattern = CAUSAL if is_causal else CausalThenBlock(middle, item.end)
            yield _order_inputs(replace(text, sequence=replace(sequence, pattern=pattern)), item)
            return
        if item.start < middle:
            own = outputs[outputs < middle]
            yield replace(text, sequence=replace(sequence, end=middle, num_visible=middle, outputs=own))
        if middle < item.end:
            own = outputs[outputs >= middle]
            noisy_pattern = CAUSAL if is_causal else BIDIRECTIONAL
            noisy = replace(sequence, start=middle, pattern=noisy_pattern, outputs=own)
            yield _order_inputs(replace(text, sequence=noisy), item)

    def _text(self, item: ScheduledRequest, number: int) -> InputText:
        """The text of a request, or with guidance and number 1 the one without what was given: masks at the same
        position ids, also in place of images."""
        request, outputs = item.request, item.request.output_rows()
        sequence = SequenceSlice(
            item.start,
            item.end,
            item.num_visible,
            self._pattern(request, item.num_visible),
            pages=request.pages[number] if request.uses_cache else None,
            outputs=outputs if item.is_decoded else outputs[:0],
        )
        tokens_L = _unconditional_canvas(request) if number else request.input_tokens_L
        adapter, masked_L = request.adapter, request.masked_inputs_L
        if adapter is not None and adapter.acts_on_masks and not masked_L[item.start : item.end].any():
            adapter = None
        if request.mrope_positions_3L is None:
            return InputText(tokens_L, sequence, adapter, masked_L=masked_L)
        images = () if number else request.options.images
        features = [(placed.start, request.image_features.get(placed.image.digest)) for placed in images]
        read = tuple((start, features_EFD) for start, features_EFD in features if features_EFD is not None)
        return InputText(tokens_L, sequence, adapter, TextImages(request.mrope_positions_3L, read), masked_L)

    def _pattern(self, request: ActiveRequest, length: int) -> AttentionPattern:
        """Attention of a request's text; requests with the same settings share one."""
        settings = request.settings
        if settings.has_independent_blocks:
            assert settings.config.block_length is not None
            is_prompt_1L = torch.arange(length)[None] < int(request.masked_positions[0])
            return PromptAndOwnBlock(settings.config.block_length, is_prompt_1L)
        has_turns = len(request.segments.starts) > 1 and not settings.has_noisy_blocks
        if settings.block_causal_length is not None and has_turns:
            segments_1L = torch.from_numpy(request.segments.numbers(length))[None]
            return BlockCausal(settings.block_causal_length, segments_BL=segments_1L)
        pattern = self._get_pattern(settings)
        return DenseBias(pattern.bias[..., :length, :length]) if isinstance(pattern, DenseBias) else pattern


def _order_inputs(text: InputText, item: ScheduledRequest) -> InputText:
    """The same inputs, those of a noisy block in the order in which its keys are visible: with ``visible_first`` its
    tokens precede its masks, each with its own position id (WeDLM)."""
    if item.request.settings.model.noisy_attention != "visible_first":
        return text
    sequence, middle = text.sequence, item.noisy_start
    assert sequence.outputs is not None and middle is not None
    order_L = np.arange(item.end)
    order_L[middle:] = middle + item.request.is_masked_L[middle : item.end].argsort(kind="stable")
    outputs, ids = order_L.argsort()[sequence.outputs], order_L[sequence.start :]
    masked_L = None if text.masked_L is None else text.masked_L[order_L]
    sequence = replace(sequence, outputs=outputs, position_ids=ids)
    return replace(text, tokens_L=text.tokens_L[order_L], masked_L=masked_L, sequence=sequence)


def build_pattern(settings: DecodingSettings) -> AttentionPattern:
    """Attention of texts of any length, without noisy blocks: that of an attention bias is for the longest one."""
    if settings.config.attention_bias is not None:
        return DenseBias(read_attention_bias(settings.config.attention_bias, settings.model))
    if settings.block_causal_length is None:
        return Bidirectional()
    return BlockCausal(1 if settings.has_noisy_blocks else settings.block_causal_length)


def _unconditional_canvas(request: ActiveRequest) -> NDArray[np.int64]:
    """The canvas with everything that was given replaced by placeholders."""
    canvas_L = np.full_like(request.tokens_L, request.placeholder_id)
    canvas_L[request.masked_positions] = request.tokens_L[request.masked_positions]
    return canvas_L


def prepare_for_tiles(model: Transformer) -> Transformer:
    """A model for `FixedShapeRunner`, which shares the weights of another one.

    Raises:
        ValueError: the model is not on a CPU in float32 or float64.
    """
    weight = model.lm_head.weight
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"deterministic = True needs a model on the CPU in float32 or float64, and it is on {weight.device} in "
            f"{str(weight.dtype).removeprefix('torch.')}: load it so, or leave it out"
        )
    shared = share_weights(model)
    for module in shared.modules():
        if isinstance(module, MoE):
            module.max_dense_tokens = TILE_ROWS
    return shared


class FixedShapeRunner(ModelRunner):
    """Runs the model on tiles."""

    def compute_logits(self, texts: Sequence[InputText]) -> Tensor:
        outputs: list[list[Tensor]] = [[] for _ in texts]
        for tile in pack_tiles(texts):
            logits_QV = self._forward(list(tile.input_texts()), copies_keys=True).flatten(0, -2)
            for slot, (index, block) in tile.blocks.items():
                outputs[index].append(logits_QV[slot * tile.block_length + block.sequence.output_offsets])
        for text, logits in zip(texts, outputs, strict=True):
            if not _has_tiles(text):
                logits.append(self._forward([text], copies_keys=True))
        return torch.cat([rows for logits in outputs for rows in logits])


@dataclass
class InputTile:
    """Inputs of one forward: blocks of texts that have the same adapter and block length."""

    adapter: ModelAdapter | None
    block_length: int
    num_slots: int
    blocks: dict[int, tuple[int, InputText]] = field(default_factory=dict)
    """Slot -> index of a text and a block of it. A tile begins with slot 0, and each one has room for a block."""

    def input_texts(self) -> Iterator[InputText]:
        """All texts of the forward: blocks and what fills the gaps."""
        has_outputs = any(len(block.sequence.output_offsets) for _, block in self.blocks.values())
        outputs = None if has_outputs else np.zeros(0, np.int64)
        for slot in range(self.num_slots):
            num_filled = 0
            if slot in self.blocks:
                _, block = self.blocks[slot]
                num_filled = block.sequence.num_inputs
                yield replace(block, sequence=replace(block.sequence, outputs=outputs))
            if gap := self.block_length - num_filled:
                sequence = SequenceSlice(0, gap, gap, Bidirectional(), outputs=outputs)
                yield InputText(np.zeros(gap, np.int64), sequence, self.adapter)


def _has_tiles(text: InputText) -> bool:
    return text.sequence.pages is not None and isinstance(text.sequence.pattern, BlockCausal)


def pack_tiles(texts: Sequence[InputText]) -> list[InputTile]:
    """Tiles of the blocks of all texts, in an order in which they can be computed: a block of a text is not before the
    block to its left."""
    tiles: dict[tuple[ModelAdapter | None, int], list[InputTile]] = {}
    for index, text in enumerate(texts):
        if not _has_tiles(text):
            continue
        assert isinstance(text.sequence.pattern, BlockCausal)
        block_length = text.sequence.pattern.block_length
        num_slots = max(1, TILE_ROWS // block_length)
        own = tiles.setdefault((text.adapter, block_length), [])
        number = 0
        for block in _split_into_blocks(text):
            slot = block.sequence.start // block_length % num_slots
            number = next((later for later in range(number, len(own)) if slot not in own[later].blocks), len(own))
            if number == len(own):
                own.append(InputTile(text.adapter, block_length, num_slots))
            own[number].blocks[slot] = index, block
    return [tile for group in tiles.values() for tile in group]


def _split_into_blocks(text: InputText) -> Iterator[InputText]:
    """The whole blocks that contain the inputs of a text, from the left, each with its outputs."""
    sequence = text.sequence
    assert isinstance(sequence.pattern, BlockCausal) and sequence.outputs is not None
    limits = sequence.pattern.key_limit(torch.arange(sequence.num_visible)[None])[0].numpy()
    limits = np.minimum(limits, sequence.num_visible)
    start = int(np.searchsorted(limits, limits[sequence.start]))
    while start < sequence.end:
        end = int(limits[start])
        outputs = sequence.outputs[(sequence.outputs >= start) & (sequence.outputs < end)]
        block = replace(sequence, start=start, end=end, num_visible=end, outputs=outputs)
        yield replace(text, sequence=block)
        start = end
