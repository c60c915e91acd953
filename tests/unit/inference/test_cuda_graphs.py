"""CUDA graphs: streams, memory and recording with functions in place of the driver's, and recorded forwards on a GPU
that computes nothing, in which nothing waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count
from typing import Any
from unittest.mock import Mock, call, patch

import numpy as np
import pytest
import torch

from config.generation import GenerationConfig
from config.model import ModelConfig
from diffusionlm.inference import cuda_graphs, sampling
from diffusionlm.inference import decoder as decoder_module
from diffusionlm.inference.cuda_graphs import CudaGraph, CudaGraphFactory
from diffusionlm.inference.generate import generate
from diffusionlm.models.transformer import Transformer
from tests.fake_cuda import LaunchRecord, fake_cuda


class FakeStream:
    """Streams of two devices, which are returned in turn."""

    num_calls = 0

    def __init__(self, device: torch.device) -> None:
        index = FakeStream.num_calls % cuda_graphs.NUM_STREAMS
        FakeStream.num_calls += 1
        self.device, self.cuda_stream = device, 1000 * (device.index + 1) + index


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", count(1).__next__)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Mock)


@pytest.mark.usefixtures("streams")
def test_decoders_never_share_a_stream() -> None:
    """Also if streams are taken elsewhere, and from the moment on when all graphs of a decoder are gone."""
    device, other_device = torch.device("cuda", 0), torch.device("cuda", 1)
    factories = [CudaGraphFactory(device) for _ in range(cuda_graphs.NUM_STREAMS)]
    made = []
    for number, factory in enumerate(factories):
        made.append([factory(), factory()])
        for _ in range(31 * (number % 2)):
            torch.cuda.Stream(device)
    pools = [graph._pool for graph, _ in made]
    assert [other._pool for _, other in made] == pools, "graphs of a decoder share memory"
    assert len({pool.stream.cuda_stream for pool in pools}) == cuda_graphs.NUM_STREAMS
    with pytest.raises(RuntimeError, match="32 streams of cuda:0 are used by graphs of other decoders"):
        CudaGraphFactory(device)()
    assert CudaGraphFactory(other_device)()._pool.stream.device == other_device
    handle, stream = pools[7].handle, pools[7].stream.cuda_stream
    del pools
    made[7].pop()
    with pytest.raises(RuntimeError, match="32 streams"):
        CudaGraphFactory(device)()
    made[7].clear()
    pool = factories[7]()._pool
    assert pool.stream.cuda_stream == stream
    assert pool.handle != handle, "torch accepts no pool whose graphs are gone"


def test_a_stream_is_free_only_when_the_graph_is_destroyed(streams: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, destroying it would free the workspace of the stream's next user."""
    used: list[set[int]] = []

    class Graph:
        def __del__(self) -> None:
            used.append(set(cuda_graphs._used_streams))

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    graph = CudaGraphFactory(torch.device("cuda", 0))()
    stream = graph._pool.stream.cuda_stream
    del graph
    assert [stream in streams for streams in used] == [True]
    assert stream not in cuda_graphs._used_streams


@pytest.mark.parametrize("fails", [False, True])
def test_a_cuda_graph_is_recorded_on_the_device_of_its_tensors(*, fails: bool) -> None:
    """Called as torch's functions allow, whose signatures the mocks have; without waiting, or emptying torch's cache.
    The recording also ends if the function fails."""
    pool = Mock(stream=Mock(device=torch.device("cuda:1")), handle=(0, 1))
    calls = Mock()

    def forward() -> None:
        calls.forward()
        if fails:
            raise torch.OutOfMemoryError("no memory")

    with (
        patch.object(torch.cuda, "CUDAGraph", autospec=True) as recorded,
        patch.object(torch.cuda, "stream", autospec=True) as stream,
        patch.object(torch.cuda, "device", autospec=True) as device,
        patch.object(torch.cuda, "synchronize") as synchronize,
        patch.object(torch.cuda, "empty_cache") as empty_cache,
    ):
        calls.attach_mock(recorded.return_value.capture_begin, "begin")
        calls.attach_mock(recorded.return_value.capture_end, "end")
        graph = CudaGraph(pool)
        with pytest.raises(torch.OutOfMemoryError) if fails else nullcontext():
            graph.capture(forward)
        graph.replay()
    begin = call.begin(pool=(0, 1), capture_error_mode="thread_local")
    assert calls.mock_calls == [begin, call.forward(), call.end()]
    stream.assert_called_once_with(pool.stream)
    recorded.return_value.replay.assert_called_once_with()
    assert [each.args for each in device.call_args_list] == [(pool.stream.device,)] * 2
    assert not synchronize.called and not empty_cache.called


def decode_on_fake_gpu(config: ModelConfig) -> tuple[LaunchRecord, list[FakeGraph], int]:
    """Decode two prompts of different lengths; the launches, the graphs and the number of rounds."""
    graphs: list[FakeGraph] = []
    num_decoder_steps = 0
    with fake_cuda() as record:
        with torch.device("cuda"):
            model = Transformer(config)

        def make_graph() -> FakeGraph:
            graphs.append(FakeGraph(record))
            return graphs[-1]

        def read_predictions(tensors: Sequence[torch.Tensor]) -> list[Any]:
            nonlocal num_decoder_steps
            num_decoder_steps += 1
            return [np.full(tensor.shape, 3.0) for tensor in tensors]

        record.clear()
        generation = GenerationConfig(max_new_tokens=8, block_length=4, steps=8, attention="block_causal")
        with (
            patch.object(cuda_graphs, "MIN_USES", 0),
            patch.object(decoder_module, "select_graph_factory", lambda model: make_graph),
            patch.object(sampling, "_to_arrays", read_predictions),
        ):
            generate(model, [[1, 2, 3], [1, 2, 3, 4, 5]], generation)
    return record, graphs, num_decoder_steps


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_recorded_forward_never_waits_for_the_gpu(make_config: Callable[..., ModelConfig]) -> None:
    """Nothing in it comes from the host. Beside it a step launches as much, however many layers there are."""
    num_launches = []
    for depth in (2, 3):
        record, graphs, num_decoder_steps = decode_on_fake_gpu(make_config(num_hidden_layers=depth))
        assert len(graphs) > 1 and not record.waits
        assert sum(graph.num_replays for graph in graphs) == num_decoder_steps
        num_allocations = 2 * depth  # of the cache, once
        num_recorded = sum(graph.num_launches for graph in graphs)
        num_launches.append((len(record.launches) - num_allocations - num_recorded) / num_decoder_steps)
    assert num_launches[0] == num_launches[1] <= 25


class FakeGraph:
    """A graph on a GPU that computes nothing."""

    def __init__(self, record: LaunchRecord) -> None:
        self._record = record
        self.num_launches = self.num_replays = 0

    def capture(self, forward: Callable[[], None]) -> None:
        first = len(self._record.launches)
        forward()
        launches = self._record.launches[first:]
        self.num_launches += len(launches)
        inputs = [tensor for launch in launches for tensor in launch.inputs]
        assert all(tensor.is_cuda for tensor in inputs), "a copy from the host would be repeated with old values"

    def replay(self) -> None:
        self.num_replays += 1


def test_which_models_have_graphs(make_config: Callable[..., ModelConfig]) -> None:
    with fake_cuda():
        with torch.device("cuda"):
            model, other = Transformer(make_config()), Transformer(make_config(), attention_backend="flex")
            experts = Transformer(make_config(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8))
        assert cuda_graphs.select_graph_factory(model) is None, "they are off unless a model is loaded to decode"
        on_cpu = Transformer(make_config())
        for each in (model, other, experts, on_cpu):
            each.uses_cuda_graphs = True
        assert cuda_graphs.select_graph_factory(model) is not None
        assert [cuda_graphs.select_graph_factory(each) for each in (other, experts, on_cpu)] == [None] * 3
