"""CUDA graphs of one decoder: they share a stream on which they are recorded, and memory, and share it with no other.

torch keeps the workspaces of cuBLAS by stream. When it destroys a graph it frees those of the stream on which the graph
was recorded, also if another graph of that stream still writes to them (pytorch/pytorch#193402). So two decoders must
not record on the same stream, and the graphs of a decoder are dropped all at once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch

NUM_STREAMS = 32
"""Streams that torch has for a device: `torch.cuda.Stream` returns one after another, and then the first one again."""

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
        self.stream = _take_stream(device)
        # Without the lock, which this thread may hold when garbage is collected. The interpreter's lock is enough.
        weakref.finalize(self, _used_streams.discard, self.stream.cuda_stream).atexit = False
        self.handle = torch.cuda.graph_pool_handle()


def _take_stream(device: torch.device) -> torch.cuda.Stream:
    """Take a stream that no `CapturePool` has, and mark it as used."""
    with _lock:
        for _ in range(2 * NUM_STREAMS):  # other threads may take streams in between
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if stream.cuda_stream not in _used_streams:
                _used_streams.add(stream.cuda_stream)
                return stream
    raise RuntimeError(f"the {NUM_STREAMS} streams of {device} are used by graphs of other decoders")


class CudaGraph:
    """Kernels of a forward on a GPU, recorded once as a `torch.cuda.CUDAGraph` and launched together by `replay`."""

    def __init__(self, pool: CapturePool) -> None:
        """``pool``: nothing in its memory is read after a replay."""
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool  # after the graph, so that the stream is free only when the graph is destroyed

    def capture(self, forward: Callable[[], None]) -> None:
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


class CudaGraphFactory:
    """Makes the graphs of one decoder."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._find_pool: Callable[[], CapturePool | None] = lambda: None

    def __call__(self) -> CudaGraph:
        """A graph in the pool of those that exist, or in a new one: torch accepts no pool whose graphs are gone.

        Raises:
            RuntimeError: all streams of the device are used by other decoders.
        """
        pool = self._find_pool()
        if pool is None:
            pool = CapturePool(self._device)
            self._find_pool = weakref.ref(pool)
        return CudaGraph(pool)
