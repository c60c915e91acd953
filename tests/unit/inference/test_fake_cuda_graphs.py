"""Recorded forwards on a GPU that computes nothing: nothing in them waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from config.generation import GenerationConfig
from config.model import ModelConfig
from diffusionlm.inference import decoder as decoder_module
from diffusionlm.inference import sampling
from diffusionlm.inference.generate import generate
from diffusionlm.inference.graphs import graphed_forward
from diffusionlm.models.transformer import Transformer
from tests.fake_cuda import LaunchRecord, fake_cuda


def decode_on_fake_gpu(config: ModelConfig) -> tuple[LaunchRecord, list[FakeGraph], int]:
    """Decode two prompts of different lengths; the launches, the graphs and the number of rounds."""
    graphs: list[FakeGraph] = []
    num_rounds = 0
    with fake_cuda() as record:
        with torch.device("cuda"):
            model = Transformer(config)

        def make_graph() -> FakeGraph:
            graphs.append(FakeGraph(record))
            return graphs[-1]

        def read_predictions(tensors: Sequence[torch.Tensor]) -> list[Any]:
            nonlocal num_rounds
            num_rounds += 1
            return [np.full(tensor.shape, 3.0) for tensor in tensors]

        record.clear()
        generation = GenerationConfig(max_new_tokens=8, block_length=4, steps=8, attention="block_causal")
        with (
            patch.object(graphed_forward, "MIN_USES", 0),
            patch.object(decoder_module, "select_graph_factory", lambda model: make_graph),
            patch.object(sampling, "_to_arrays", read_predictions),
        ):
            generate(model, [[1, 2, 3], [1, 2, 3, 4, 5]], generation)
    return record, graphs, num_rounds


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_recorded_forward_never_waits_for_the_gpu(make_config: Callable[..., ModelConfig]) -> None:
    """Nothing in it comes from the host. Beside it a round launches as much, however many layers there are."""
    num_launches = []
    for depth in (2, 3):
        record, graphs, num_rounds = decode_on_fake_gpu(make_config(num_hidden_layers=depth))
        assert len(graphs) > 1 and not record.waits
        assert sum(graph.num_replays for graph in graphs) == num_rounds
        num_allocations = 2 * depth  # of the cache, once
        num_recorded = sum(graph.num_launches for graph in graphs)
        num_launches.append((len(record.launches) - num_allocations - num_recorded) / num_rounds)
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
    with (
        fake_cuda(),
    ):
        with torch.device("cuda"):
            model, other = Transformer(make_config()), Transformer(make_config(), attention_backend="flex")
            experts = Transformer(make_config(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8))
        assert graphed_forward.select_graph_factory(model) is None, "they are off unless a model is loaded to decode"
        on_cpu = Transformer(make_config())
        for each in (model, other, experts, on_cpu):
            each.uses_cuda_graphs = True
        assert graphed_forward.select_graph_factory(model) is not None
        assert [graphed_forward.select_graph_factory(each) for each in (other, experts, on_cpu)] == [None] * 3
