"""CUDA graphs: streams, memory and recording with functions in place of the driver's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from unittest.mock import Mock, call, patch

import pytest
import torch

from config.model import ModelConfig
from diffusionlm.inference import cuda_graphs
from diffusionlm.inference.cuda_graphs import CapturePool, CudaGraph
from diffusionlm.models.transformer import Transformer
from tests.fake_cuda import fake_cuda


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
    """Also if streams are taken elsewhere, and from the moment on when a pool and all its graphs are gone."""
    device, other_device = torch.device("cuda", 0), torch.device("cuda", 1)
    pools = []
    for number in range(cuda_graphs.NUM_STREAMS):
        pools.append(CapturePool(device))
        for _ in range(31 * (number % 2)):
            torch.cuda.Stream(device)
    assert len({pool.stream.cuda_stream for pool in pools}) == cuda_graphs.NUM_STREAMS
    with pytest.raises(RuntimeError, match="32 streams of cuda:0 are used by graphs of other decoders"):
        CapturePool(device)
    assert CapturePool(other_device).stream.device == other_device
    graph, stream = pools[7].make_graph(), pools.pop(7).stream.cuda_stream
    with pytest.raises(RuntimeError, match="32 streams"):
        CapturePool(device)
    del graph
    assert CapturePool(device).stream.cuda_stream == stream


def test_a_stream_is_free_only_when_the_graph_is_destroyed(streams: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, destroying it would free the workspace of the stream's next user."""
    used: list[set[int]] = []

    class Graph:
        def __del__(self) -> None:
            used.append(set(cuda_graphs._used_streams))

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    graph = CapturePool(torch.device("cuda", 0)).make_graph()
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


def test_which_models_have_graphs(make_config: Callable[..., ModelConfig]) -> None:
    with fake_cuda():
        with torch.device("cuda"):
            model, other = Transformer(make_config()), Transformer(make_config(), attention_backend="flex")
            experts = Transformer(make_config(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8))
        assert cuda_graphs.select_graph_pool(model) is None, "they are off unless a model is loaded to decode"
        on_cpu = Transformer(make_config())
        for each in (model, other, experts, on_cpu):
            each.uses_cuda_graphs = True
        assert cuda_graphs.select_graph_pool(model) is not None
        assert [cuda_graphs.select_graph_pool(each) for each in (other, experts, on_cpu)] == [None] * 3
