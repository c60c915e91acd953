"""Forwards of decoding as CUDA graphs: all kernels of a forward are launched at once.

A forward of decoding has few rows, and a GPU computes its kernels faster than the host launches them. A graph records
the kernels of a forward once, with the addresses of all tensors, and launches them again. So shapes are rounded up to
buckets, inputs are copied to fixed places, and the region that is recorded reads nothing on the host. Inputs that pad
read and write a page of their own, or the first key of their text, and nothing reads their outputs.

Steps have a graph if all texts have a cache, and read one or two blocks of block-causal attention each, or parts of
similar length with bidirectional attention. Others, such as those that read a prompt or an image, are computed without
one.

A decoder that is done leaves its graphs with the model, for the next one: `keep_graphs`, `take_graphs`. The graphs of a
decoder share memory and the stream on which they are recorded, with no other decoder's: torch keeps the workspaces of
cuBLAS by stream, and when it destroys a graph it frees those of its stream, also if another graph of that stream still
writes to them (pytorch/pytorch#193402). So the graphs of a decoder are dropped all at once.

Shapes: G parts of texts, Q inputs of a part, S keys of a part, P pages of a part, N outputs of all texts, V vocabulary;
in attention N query heads, K key-value heads, H width of a head.
"""

from __future__ import annotations

import logging
import threading
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.training.runtime import AttentionBackend
from diffusionlm.inference.images import TextImages
from diffusionlm.models.attention import PreparedAttention, PreparedBatch
from diffusionlm.models.cache import PagedCache
from diffusionlm.models.dense_attention import AttentionScale, without_cudnn_attention
from diffusionlm.models.layers import compute_dtype
from diffusionlm.models.moe import MoE
from diffusionlm.models.patterns import Bidirectional, BlockCausal
from diffusionlm.models.row_adapters import ModelAdapter
from diffusionlm.models.tensors import copy_to_device
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.varlen import CachedAttention, SequenceSlice, find_input_limits, find_key_slots, pad_pages

LOGGER = logging.getLogger(__name__)

MAX_INPUTS = 512
"""Inputs of the largest graph: beyond it the host launches kernels faster than a GPU computes them."""
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of parts, and with bidirectional attention of the inputs of a part, which are few more than the longest text
reads: with a cache for the prefix alone, each block of a text reads another number."""
MIN_INPUTS = 64
MAX_PADDED_INPUTS = 2
"""A graph has at most as many inputs for each that is read, or `MIN_INPUTS`."""
MIN_KEYS = 64
"""Keys of a graph are a multiple of this, and from 512 on of an eighth of the next power of two: each layer copies
them, so what pads costs time."""
MAX_PADDED_KEYS = 4
"""Keys of a forward at most, for each visible one: where one text is much longer than the others, no graph is used."""
MIN_USES = 8
"""Forwards of a shape that are computed without a graph before one is recorded, so that shapes that come a few times
are not. What a recording costs beside a forward has not been measured on a GPU."""
MAX_FAILURES = 2
"""Recordings without memory after which no more are tried. A recording cannot take what torch keeps for eager forwards,
so this is given back to the driver before the second one."""
MAX_GRAPHS = 128
"""Graphs at a time. When another shape is to have one, all are dropped, and uses are counted anew."""
MAX_KEPT_BYTES = 2 << 30
"""Keys and values of the largest cache whose graphs are kept: it occupies memory until the model is gone."""
NUM_STREAMS = 32
"""Streams that torch has for a device: `torch.cuda.Stream` returns one after another, and then the first one again."""


@dataclass(frozen=True)
class InputText:
    """A text in a forward."""

    tokens_L: NDArray[np.int64]
    sequence: SequenceSlice
    adapter: ModelAdapter | None = None
    images: TextImages | None = None
    """None: the text has no images, and its position ids are indices."""
    masked_L: NDArray[np.bool_] | None = None
    """True at masked positions, which an adapter may act on alone. None: there are none."""

    @property
    def reads_text_alone(self) -> bool:
        """Whether no input belongs to an image: then all position ids differ from the indices by `position_offset`."""
        return self.images is None or self.images.has_text_alone(self.sequence.start, self.sequence.end)

    @property
    def position_offset(self) -> int:
        """Position id of the first input, less its index: images before it take fewer positions than tokens."""
        start = self.sequence.start
        return 0 if self.images is None else int(self.images.positions_3L[0, start]) - start

    @property
    def input_tokens(self) -> NDArray[np.int64]:
        """Tokens that the forward reads, [Q]."""
        return self.tokens_L[self.sequence.start : self.sequence.end]

    @property
    def masked_inputs(self) -> NDArray[np.bool_]:
        """True at those of them that are masks, [Q]."""
        start, end = self.sequence.start, self.sequence.end
        return np.zeros(end - start, np.bool_) if self.masked_L is None else self.masked_L[start:end]


@dataclass(frozen=True)
class StaticShape:
    """Numbers of parts, inputs and keys to which a forward is padded; each shape has a graph of its own."""

    num_parts: int
    """G, parts into which the texts of a step are divided."""
    num_queries: int
    """Q, inputs of a part."""
    num_keys: int
    """S, keys that each part attends to."""


class StaticBatch(PreparedBatch):
    """The inputs of a forward of this shape on the device, which `load` replaces."""

    def __init__(self, shape: StaticShape, cache: PagedCache, scratch_page: int) -> None:
        """
        Args:
            scratch_page: page of the cache that no text has.
        """
        self._shape, self._cache, self._scratch_page = shape, cache, scratch_page
        G, Q = shape.num_parts, shape.num_queries
        self._num_pages = -(-shape.num_keys // cache.page_size)
        self.num_inputs = G * Q
        sizes = [5 * G * Q, G, G * self._num_pages]
        self._inputs = torch.zeros(sum(sizes), dtype=torch.int64, device=cache.keys_KTH[0].device)
        """All that `load` replaces, in one tensor; the others are views of it."""
        inputs, visible, tables = torch.split(self._inputs, sizes)
        tokens_GQ, self._positions_GQ, self._position_ids_GQ, slots_GQ, self._limits_GQ = inputs.view(5, G, Q).unbind()
        self.tokens_1Q, self._slots_Q = tokens_GQ.view(1, -1), slots_GQ.view(-1)
        self._num_visible_G1, self._tables_GP = visible.view(G, 1), tables.view(G, -1)

    def load(self, texts: Sequence[InputText]) -> NDArray[np.int64]:
        """Replace all inputs, with one copy to the device and without waiting for it.

        Returns:
            The place of each output of the texts among the G * Q inputs.
        """
        G, Q, size = self._shape.num_parts, self._shape.num_queries, self._cache.page_size
        sequences = [text.sequence for text in texts]
        num_parts = [-(-sequence.num_inputs // Q) for sequence in sequences]
        firsts = np.cumsum([0, *num_parts[:-1]])
        starts_G, ends_G, offsets_G = np.zeros((3, G), np.int64)
        num_visible_G, tables_GP = np.ones(G, np.int64), np.full((G, self._num_pages), self._scratch_page)
        for text, first, count in zip(texts, firsts.tolist(), num_parts, strict=True):
            sequence, parts = text.sequence, slice(first, first + count)
            starts_G[parts], offsets_G[parts] = np.arange(sequence.start, sequence.end, Q), text.position_offset
            ends_G[parts], num_visible_G[parts] = sequence.end, sequence.num_visible
            tables_GP[parts] = pad_pages(sequence, size, self._num_pages)
        tokens_GQ, positions_GQ, position_ids_GQ, slots_GQ, limits_GQ = inputs_5GQ = np.zeros((5, G, Q), np.int64)
        all_positions_GQ = starts_G[:, None] + np.arange(Q)
        is_input_GQ = all_positions_GQ < ends_G[:, None]
        positions_GQ[is_input_GQ] = all_positions_GQ[is_input_GQ]
        position_ids_GQ[:] = positions_GQ + offsets_G[:, None]
        tokens_GQ[is_input_GQ] = np.concatenate([text.input_tokens for text in texts])
        slots_GQ[:] = np.take_along_axis(tables_GP, positions_GQ // size, axis=1) * size + positions_GQ % size
        slots_GQ[~is_input_GQ] = self._scratch_page * size
        limits_GQ[:] = 1
        limits_GQ[is_input_GQ] = find_input_limits(sequences)
        places = [first * Q + part.output_offsets for first, part in zip(firsts.tolist(), sequences, strict=True)]
        values = torch.from_numpy(np.concatenate([inputs_5GQ.ravel(), num_visible_G, tables_GP.ravel()]))
        if self._inputs.is_cuda:
            values = values.pin_memory()  # a copy of pageable memory may wait for the device
        self._inputs.copy_(values, non_blocking=True)
        return np.concatenate(places)

    def prepare_attention(
        self, windows: Sequence[int | None], backend: AttentionBackend, scale_options: AttentionScale
    ) -> tuple[Sequence[PreparedAttention], Tensor]:
        """The attention of each layer, and the position id of each input, [1, G * Q]."""
        assert backend in ("auto", "eager", "sdpa"), "checked before"
        cache, num_keys = self._cache, self._shape.num_keys
        slots_GS = find_key_slots(self._tables_GP, self._num_visible_G1, cache.page_size, num_keys)
        attention_of_window = {
            window: CachedAttention(
                cache, slots_GS, num_keys, self._positions_GQ, self._limits_GQ,
                window=window, requested=backend, scale_options=scale_options,
            )
            for window in dict.fromkeys(windows)
        }  # fmt: skip
        attentions = [_StaticAttention(layer, self._slots_Q, attention_of_window[w]) for layer, w in enumerate(windows)]
        return attentions, self._position_ids_GQ.view(1, -1)


class _StaticAttention(PreparedAttention):
    """Attention of one layer: stores the keys and values of the inputs in the cache, and then reads it."""

    def __init__(self, layer: int, slots_Q: Tensor, attention: CachedAttention) -> None:
        self._layer, self._slots_Q, self._attention = layer, slots_Q, attention

    def __call__(self, q_1QNH: Tensor, k_1QKH: Tensor, v_1QKH: Tensor) -> Tensor:
        """Write keys and values of the inputs to their pages; attend, [1, G * Q, N, H]."""
        self._attention.cache.write(self._layer, self._slots_Q, k_1QKH[0], v_1QKH[0])
        q_GQNH = q_1QNH.view(*self._attention.positions_GQ.shape, *q_1QNH.shape[2:])
        with without_cudnn_attention():
            return self._attention.attend(self._layer, q_GQNH).flatten(0, 1)[None]


def select_graph_pool(model: Transformer) -> Callable[[], CapturePool] | None:
    """What makes the memory of a model's graphs; None: it has none, because they are off, it is not on a GPU, autocast
    is on, its attention backend has no cached form, its adapter acts on masks alone, or experts make the host wait."""
    device = model.lm_head.weight.device
    if device.type != "cuda" or not model.uses_cuda_graphs or torch.is_autocast_enabled(device.type):
        return None
    if model.masked_rows is not None or model.attention_backend in ("tiled", "flex"):
        return None
    if any(isinstance(module, MoE) for module in model.modules()):
        return None
    return partial(CapturePool, device)


class GraphedForward:
    """Computes forwards of a model by graphs, where a forward has one."""

    def __init__(self, model: Transformer, cache: PagedCache, make_pool: Callable[[], CapturePool]) -> None:
        """``cache``: its last page is for what pads."""
        # A graph that is kept with its model must not keep the model.
        self._model = cast(Transformer, weakref.proxy(model))
        self.cache, self._make_pool = cache, make_pool
        self.recorded_model = _describe_model(model)
        self._graphs: dict[StaticShape, tuple[CudaGraph, StaticBatch]] = {}
        self._pool: CapturePool | None = None
        """Of all graphs; torch accepts none whose graphs are gone."""
        self._num_uses: Counter[StaticShape] = Counter()
        """Forwards of each shape."""
        self._logits_QV: Tensor | None = None
        """Logits of all inputs of the last forward, for all graphs."""
        self.num_failures = 0

    def __call__(self, texts: Sequence[InputText]) -> Tensor | None:
        """Logits of the outputs of all texts, [N, V]; None: the forward has no graph."""
        if self.num_failures == MAX_FAILURES:
            return None
        if any(text.adapter is not None or not text.reads_text_alone for text in texts):
            return None
        shape = find_shape([text.sequence for text in texts])
        if shape is None:
            return None
        self._num_uses[shape] += 1
        if shape not in self._graphs:
            if self._num_uses[shape] <= MIN_USES:
                return None
            if len(self._graphs) == MAX_GRAPHS:
                self._drop_graphs()
                self._num_uses.clear()
            if not self._capture(shape, texts):
                return None
        graph, batch = self._graphs[shape]
        places_N = copy_to_device(torch.from_numpy(batch.load(texts)), self.cache.keys_KTH[0].device)
        graph.replay()
        assert self._logits_QV is not None
        return self._logits_QV[places_N]

    def _drop_graphs(self) -> None:
        self._graphs.clear()
        self._pool = None

    def _capture(self, shape: StaticShape, texts: Sequence[InputText]) -> bool:
        """Record the forward of a shape. If that fails, the memory of all graphs is free again."""
        weight = self._model.lm_head.weight
        try:
            if self.num_failures:
                torch.cuda.empty_cache()
            if self._logits_QV is None:
                self._logits_QV = weight.new_empty(MAX_INPUTS, len(weight))
            logits_QV = self._logits_QV[: shape.num_parts * shape.num_queries]
            self._pool = self._pool or self._make_pool()
            graph = self._pool.make_graph()
            batch = StaticBatch(shape, self.cache, self.cache.num_pages - 1)
            batch.load(texts)
            graph.capture(lambda: logits_QV.copy_(self._model(batch.tokens_1Q, pattern=batch)[0]))
        except RuntimeError as error:
            self.num_failures += 1
            if not isinstance(error, torch.OutOfMemoryError):
                self.num_failures = MAX_FAILURES
            if self.num_failures == MAX_FAILURES:
                LOGGER.warning(
                    "decoding goes on without CUDA graphs, because recording one has failed: %s", repr(error)
                )
            self._drop_graphs()
            self._logits_QV = None
            return False
        self._graphs[shape] = graph, batch
        return True


_idle_graphs: weakref.WeakKeyDictionary[Transformer, GraphedForward] = weakref.WeakKeyDictionary()
"""Of each model those that no decoder uses now: graphs write to fixed places, so two decoders never have the same."""


def take_graphs(
    model: Transformer, num_pages: int, page_size: int, make_pool: Callable[[], CapturePool]
) -> GraphedForward:
    """The graphs that are kept with a model, with their cache, if it has so many pages besides the one for what pads
    and the model is the one whose kernels were recorded; else new ones, without a graph so far."""
    graphs = _idle_graphs.pop(model, None)
    has_pages = graphs is not None and graphs.cache.num_pages > num_pages and graphs.cache.page_size == page_size
    if graphs is not None and has_pages and graphs.recorded_model == _describe_model(model):
        return graphs
    del graphs  # its memory is free for the new cache
    weight = model.lm_head.weight
    dtype, num_heads = compute_dtype(weight), model.num_key_value_heads
    cache = PagedCache(model.config, num_pages + 1, page_size, weight.device, dtype, num_heads)
    return GraphedForward(model, cache, make_pool)


def keep_graphs(model: Transformer, graphed_forward: GraphedForward) -> None:
    """Keep graphs with their model until it is gone, if they are worth the memory of their cache. All their forwards
    must have ended."""
    cache = graphed_forward.cache
    num_bytes = sum(storage.nbytes for storage in (*cache.keys_KTH, *cache.values_KTH))
    if not graphed_forward.num_failures and num_bytes <= MAX_KEPT_BYTES:
        _idle_graphs[model] = graphed_forward


def _describe_model(model: Transformer) -> list[object]:
    """What recorded kernels depend on: places of all tensors and options of all modules, but no values of tensors."""
    tensors = [(value.data_ptr(), value.dtype, value.shape) for value in (*model.parameters(), *model.buffers())]
    modules = []
    for module in model.modules():
        options = [(name, value) for name, value in vars(module).items() if isinstance(value, int | float | str)]
        hooks = (*module._forward_hooks, *module._forward_pre_hooks, id(vars(module).get("forward")))
        modules.append((type(module), options, hooks))
    return [tensors, modules, model.config, torch.get_float32_matmul_precision()]


def find_shape(sequences: Sequence[SequenceSlice]) -> StaticShape | None:
    """The bucket of a forward that reads these sequences; None: it has no graph."""
    num_queries = _find_num_queries(sequences)
    if num_queries is None:
        return None
    num_parts = [-(-sequence.num_inputs // num_queries) for sequence in sequences]
    bucket = bisect_left(BUCKETS, sum(num_parts))
    if max(num_parts) > 2 or bucket == len(BUCKETS):
        return None
    num_inputs = sum(sequence.num_inputs for sequence in sequences)
    if BUCKETS[bucket] * num_queries > min(MAX_INPUTS, max(MIN_INPUTS, MAX_PADDED_INPUTS * num_inputs)):
        return None
    longest = max(sequence.num_visible for sequence in sequences)
    step = max(MIN_KEYS, 1 << max(0, (longest - 1).bit_length() - 3))
    num_keys = -(-longest // step) * step
    num_visible = sum(count * sequence.num_visible for count, sequence in zip(num_parts, sequences, strict=True))
    if num_keys > MIN_KEYS and BUCKETS[bucket] * num_keys > MAX_PADDED_KEYS * num_visible:
        return None
    return StaticShape(BUCKETS[bucket], num_queries, num_keys)


def _find_num_queries(sequences: Sequence[SequenceSlice]) -> int | None:
    """Inputs of a part: a block of block-causal attention, and with bidirectional attention the bucket of what the
    longest text reads. None: the sequences have no graph."""
    if any(sequence.pages is None or sequence.position_ids is not None for sequence in sequences):
        return None
    if all(isinstance(sequence.pattern, Bidirectional) for sequence in sequences):
        bucket = bisect_left(BUCKETS, max(sequence.num_inputs for sequence in sequences))
        return BUCKETS[bucket] if bucket < len(BUCKETS) else None
    block_lengths = {
        sequence.pattern.block_length if isinstance(sequence.pattern, BlockCausal) else None for sequence in sequences
    }
    return block_lengths.pop() if len(block_lengths) == 1 else None


_lock = threading.Lock()
_used_streams: set[int] = set()
"""Handles of the streams of all pools that exist."""


class CapturePool:
    """A stream and memory for the graphs of one decoder. The stream is free again when nothing refers to the pool."""

    def __init__(self, device: torch.device) -> None:
        """
        Raises:
            RuntimeError: all streams of the device belong to other pools.
        """
        self.stream = self._take_stream(device)
        # Without the lock, which this thread may hold when garbage is collected. The interpreter's lock is enough.
        weakref.finalize(self, _used_streams.discard, self.stream.cuda_stream).atexit = False
        self.handle = torch.cuda.graph_pool_handle()

    def _take_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Take a stream that no other pool has, and mark it as used."""
        with _lock:
            for _ in range(2 * NUM_STREAMS):  # other threads may take streams in between
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                if stream.cuda_stream not in _used_streams:
                    _used_streams.add(stream.cuda_stream)
                    return stream
        raise RuntimeError(f"the {NUM_STREAMS} streams of {device} are used by graphs of other decoders")

    def make_graph(self) -> CudaGraph:
        """A graph whose memory is in this pool."""
        return CudaGraph(self)


class CudaGraph:
    """Kernels of a forward on a GPU, recorded once as a `torch.cuda.CUDAGraph` and launched together by `replay`."""

    def __init__(self, pool: CapturePool) -> None:
        """``pool``: nothing in its memory is read after a replay."""
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool  # after the graph, so that the stream is free only when the graph is destroyed

    def capture(self, forward: Callable[[], object]) -> None:
        """Record the kernels of a function.

        `torch.cuda.graph` would also wait for the device and give all cached memory back to the driver, from which the
        next eager forwards would have to ask for it again. Neither is needed for the recording: it runs no kernel, and
        it takes memory from a pool of its own.
        """
        stream = self._pool.stream
        # The thread may have another current device.
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            # "thread_local": other threads, such as those of a server, may use the device.
            self._graph.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")
            try:
                forward()
            finally:
                self._graph.capture_end()

    def replay(self) -> None:
        """Launch them on the current stream of the device."""
        with torch.cuda.device(self._pool.stream.device):
            self._graph.replay()
