"""Forwards of decoding as CUDA graphs: all kernels of a forward are launched at once.

A forward of decoding has few rows, and a GPU computes its kernels faster than the host launches them. A graph records
the kernels of a forward once, with the addresses of all tensors, and launches them again. So shapes are rounded up to
buckets, inputs are copied to fixed places, and the region that is recorded reads nothing on the host.

Rounds have a graph if all texts have a cache, and read one or two blocks of block-causal attention each, or parts of
similar length with bidirectional attention. Others, such as those that read a prompt, are computed without one.

A decoder that is done leaves its graphs with the model, for the next one: `keep_graphs`, `take_graphs`.

Shapes: N outputs of all texts, V vocabulary; G, Q and S as in `static_batch`.
"""

from __future__ import annotations

import logging
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from diffusionlm.inference.graphs.cuda_graph import CudaGraphFactory
from diffusionlm.inference.graphs.static_batch import ReadText, StaticBatch, StaticShape
from diffusionlm.models.cache import PagedCache
from diffusionlm.models.layers import compute_dtype
from diffusionlm.models.moe import MoE
from diffusionlm.models.patterns import Bidirectional, BlockCausal, copy_to_device
from diffusionlm.models.ragged import SequenceSlice
from diffusionlm.models.transformer import Transformer

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
"""Graphs at a time; further shapes have none."""
PERIOD = 2048
"""Forwards with a shape after which uses are counted anew, so that rare shapes have no graph and are forgotten. If more
than half of them found the table full of other shapes, all graphs are dropped. Single ones must not be (`cuda_graph`).
"""
MAX_KEPT_BYTES = 2 << 30
"""Keys and values of the largest cache whose graphs are kept: it occupies memory until the model is gone."""


class ForwardGraph(Protocol):
    """The kernels of a forward, which can be launched again."""

    def capture(self, forward: Callable[[], None]) -> None:
        """Record the kernels of a function, which need not be computed now."""

    def replay(self) -> None:
        """Launch them, with what is in their tensors now."""


GraphFactory = Callable[[], ForwardGraph]


def select_graph_factory(model: Transformer) -> GraphFactory | None:
    """How graphs of a model's forwards are made; None: it has none, because they are off, it is not on a GPU, autocast
    is on, its attention backend has no cached form, or experts make the host wait."""
    device = model.lm_head.weight.device
    if device.type != "cuda" or not model.uses_cuda_graphs or torch.is_autocast_enabled(device.type):
        return None
    if model.attention_backend in ("tiled", "flex") or any(isinstance(module, MoE) for module in model.modules()):
        return None
    return CudaGraphFactory(device)


class GraphedForward:
    """Computes forwards of a model by graphs, where a forward has one."""

    def __init__(self, model: Transformer, cache: PagedCache, make_graph: GraphFactory) -> None:
        """``cache``: its last page is for what pads."""
        # A graph that is kept with its model must not keep the model.
        self._model = cast(Transformer, weakref.proxy(model))
        self.cache, self._make_graph = cache, make_graph
        self._recorded_model = _describe_model(model)
        self._graphs: dict[StaticShape, tuple[ForwardGraph, StaticBatch]] = {}
        self._num_uses: Counter[StaticShape] = Counter()
        """Forwards of each shape in this period."""
        self._num_forwards = 0
        """Forwards of all shapes in this period."""
        self._num_misses = 0
        """Those of them that found `MAX_GRAPHS` graphs of other shapes."""
        self._logits_QV: Tensor | None = None
        """Logits of all inputs of the last forward, for all graphs."""
        self._num_failures = 0

    def __call__(self, texts: Sequence[ReadText]) -> Tensor | None:
        """Logits of the outputs of all texts, [N, V]; None: the forward has no graph."""
        shape = find_shape([sequence for _, sequence in texts])
        if shape is None or self._num_failures == MAX_FAILURES:
            return None
        self._count(shape)
        if shape not in self._graphs and not (self._may_capture(shape) and self._capture(shape, texts)):
            return None
        graph, batch = self._graphs[shape]
        places_N = copy_to_device(torch.from_numpy(batch.load(texts)), self.cache.keys_KTH[0].device)
        graph.replay()
        assert self._logits_QV is not None
        return self._logits_QV[places_N]

    def may_be_kept(self) -> bool:
        """Whether another decoder may use the graphs, and is worth their memory."""
        num_bytes = sum(storage.nbytes for storage in (*self.cache.keys_KTH, *self.cache.values_KTH))
        return not self._num_failures and num_bytes <= MAX_KEPT_BYTES

    def fits(self, num_pages: int, page_size: int) -> bool:
        """Whether the cache has so many pages, and the model is the one whose kernels were recorded."""
        has_pages = self.cache.num_pages >= num_pages and self.cache.page_size == page_size
        return has_pages and self._recorded_model == _describe_model(self._model)

    def _count(self, shape: StaticShape) -> None:
        """Count a forward, and at the end of a period drop graphs of shapes that no longer come."""
        if self._num_forwards == PERIOD:
            if 2 * self._num_misses > PERIOD:
                self._graphs.clear()
            self._num_uses.clear()
            self._num_forwards = self._num_misses = 0
        self._num_forwards += 1
        self._num_uses[shape] += 1
        self._num_misses += shape not in self._graphs and len(self._graphs) == MAX_GRAPHS

    def _may_capture(self, shape: StaticShape) -> bool:
        """Whether a shape comes often enough for a graph, and there is room for one."""
        return self._num_uses[shape] > MIN_USES and len(self._graphs) < MAX_GRAPHS

    def _capture(self, shape: StaticShape, texts: Sequence[ReadText]) -> bool:
        """Record the forward of a shape. If that fails, the memory of all graphs is free again."""
        weight = self._model.lm_head.weight
        try:
            if self._num_failures:
                torch.cuda.empty_cache()
            if self._logits_QV is None:
                self._logits_QV = weight.new_empty(MAX_INPUTS, len(weight))
            logits_QV, graph = self._logits_QV[: shape.num_parts * shape.num_queries], self._make_graph()
            batch = StaticBatch(shape, self.cache, self.cache.num_pages - 1)
            batch.load(texts)
            graph.capture(lambda: _compute_logits(self._model, batch, logits_QV))
        except RuntimeError as error:
            self._num_failures += 1
            if not isinstance(error, torch.OutOfMemoryError):
                self._num_failures = MAX_FAILURES
            if self._num_failures == MAX_FAILURES:
                LOGGER.warning(
                    "decoding goes on without CUDA graphs, because recording one has failed: %s", repr(error)
                )
            self._graphs.clear()
            self._logits_QV = None
            return False
        self._graphs[shape] = graph, batch
        return True


_idle_graphs: weakref.WeakKeyDictionary[Transformer, GraphedForward] = weakref.WeakKeyDictionary()
"""Of each model those that no decoder uses now: graphs write to fixed places, so two decoders never have the same."""


def take_graphs(model: Transformer, num_pages: int, page_size: int, make_graph: GraphFactory) -> GraphedForward:
    """The graphs that are kept with a model, with their cache, if they fit; else new ones, without a graph so far.

    Args:
        num_pages: pages of the cache at least, besides the one for what pads.
    """
    graphs = _idle_graphs.pop(model, None)
    if graphs is not None and graphs.fits(num_pages + 1, page_size):
        return graphs
    del graphs  # its memory is free for the new cache
    weight = model.lm_head.weight
    cache = PagedCache(model.config, num_pages + 1, page_size, weight.device, compute_dtype(weight))
    return GraphedForward(model, cache, make_graph)


def keep_graphs(model: Transformer, graphed_forward: GraphedForward) -> None:
    """Keep graphs with their model until it is gone. All their forwards must have ended."""
    if graphed_forward.may_be_kept():
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


def _compute_logits(model: Transformer, batch: StaticBatch, logits_QV: Tensor) -> None:
    """Write the logits of all inputs: the region that a graph records."""
    logits_QV.copy_(model(batch.tokens_1Q, pattern=batch)[0])


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
    if any(sequence.pages is None for sequence in sequences):
        return None
    if all(isinstance(sequence.pattern, Bidirectional) for sequence in sequences):
        bucket = bisect_left(BUCKETS, max(sequence.num_inputs for sequence in sequences))
        return BUCKETS[bucket] if bucket < len(BUCKETS) else None
    block_lengths = {
        sequence.pattern.block_length if isinstance(sequence.pattern, BlockCausal) else None for sequence in sequences
    }
    return block_lengths.pop() if len(block_lengths) == 1 else None
