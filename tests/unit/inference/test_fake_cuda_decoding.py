"""Decoding on a GPU that computes nothing: where the host waits for it, and how much is launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from config.generation import GenerationConfig
from config.model import ModelConfig
from diffusionlm.inference import cuda_graphs, decoder
from diffusionlm.inference.generate import generate
from diffusionlm.inference.sampling import distributions, token_sampler
from diffusionlm.models.transformer import Transformer
from tests.conftest import MakeConfig
from tests.fake_cuda import LaunchRecord, fake_cuda
from tests.recorded_graph import make_pools_of

pytestmark = pytest.mark.slow


PREDICTIONS = "diffusionlm/inference/sampling/token_sampler.py:sample_predictions"
ALLOWED_WAITS = {PREDICTIONS: "the strategy decides on the host which predictions are committed: once in a step"}
"""Places where the host waits for the GPU, and why. Whatever is not listed is a mistake."""
NUM_STEPS = 6


class FakeGraph:
    """A graph on a GPU that computes nothing."""

    def __init__(self, record: LaunchRecord, graphs: list[FakeGraph]) -> None:
        self._record = record
        self.num_launches = self.num_replays = 0
        graphs.append(self)

    def capture(self, forward: Callable[[], None]) -> None:
        first = len(self._record.launches)
        forward()
        launches = self._record.launches[first:]
        self.num_launches += len(launches)
        inputs = [tensor for launch in launches for tensor in launch.inputs]
        assert all(tensor.is_cuda for tensor in inputs), "a copy from the host would be repeated with old values"

    def replay(self) -> None:
        self.num_replays += 1


def record_decoding(
    config: ModelConfig, dtype: torch.dtype = torch.float32, graphs: list[FakeGraph] | None = None, **settings: Any
) -> LaunchRecord:
    """Decode two prompts of different lengths, a token in each step; with ``graphs`` by graphs."""
    with fake_cuda() as record:
        make_pool = None if graphs is None else make_pools_of(partial(FakeGraph, record, graphs))
        with torch.device("cuda"):
            model = Transformer(config)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)

        def read_predictions(tensors: Sequence[torch.Tensor], share: Any = None) -> list[Any]:
            record.add_wait()
            return [np.full(tensor.shape, 3.0) for tensor in tensors]

        record.clear()
        steps = {"block_length": 4, "steps": NUM_STEPS}
        generation = GenerationConfig(**{"max_new_tokens": NUM_STEPS, **steps, **settings})
        with (
            patch.object(cuda_graphs, "MIN_USES", 0),
            patch.object(decoder, "select_graph_pool", lambda model: make_pool),
            patch.object(token_sampler, "_to_arrays", read_predictions),
        ):
            generate(model, [[1, 2, 3], [1, 2, 3, 4, 5]], generation)
    return record


@pytest.mark.parametrize(
    "settings",
    [
        {"attention": "block_causal"},
        {"attention": "block_causal", "cache": "none"},
        {"attention": "bidirectional", "cache": "dual"},
        {"attention": "block_causal", "temperature": 1.0, "top_k": 5},
        {"attention": "block_causal", "temperature": 1.0, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_where_decoding_waits_for_the_gpu(settings: dict[str, Any], make_config: MakeConfig) -> None:
    vocab_size = distributions.NUM_TOP_P_CANDIDATES + 1
    record = record_decoding(make_config(vocab_size=vocab_size), **settings)
    assert set(record.waits) <= set(ALLOWED_WAITS)
    assert 0 < record.waits[PREDICTIONS] <= NUM_STEPS


def test_rejected_drafts_wait_for_the_gpu_once_in_a_forward(make_config: MakeConfig) -> None:
    """The distributions of drafts stay on the GPU until they are verified."""
    model = make_config(block_length=4, clean_alignment="shifted")
    keys: dict[str, Any] = {"speculation": "one_forward", "draft_length": 2, "block_length": None, "steps": None}
    record = record_decoding(model, acceptance="rejection", temperature=1.0, **keys)
    assert set(record.waits) == {PREDICTIONS} and record.waits[PREDICTIONS] <= NUM_STEPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_launches_of_a_step(dtype: torch.dtype, make_config: MakeConfig) -> None:
    """A budget for each layer of a step, which casts nothing, and for the rest of the step. Both prompts end their
    blocks in other steps, so shapes differ."""
    counts, casts = [], []
    for depth in (2, 3):
        record = record_decoding(make_config(num_hidden_layers=depth), dtype, attention="block_causal")
        counts.append(len(record.launches) / record.waits[PREDICTIONS])
        casts.append(record.count()["_to_copy"])
    per_layer = counts[1] - counts[0]
    assert per_layer <= 28.5 and counts[0] - 2 * per_layer <= 67
    assert casts[0] == casts[1]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_recorded_forward_never_waits_for_the_gpu(make_config: MakeConfig) -> None:
    """Nothing in it comes from the host. Beside it a step launches as much, however many layers there are."""
    num_launches = []
    for depth in (2, 3):
        graphs: list[FakeGraph] = []
        record = record_decoding(make_config(num_hidden_layers=depth), graphs=graphs, attention="block_causal")
        num_steps = record.waits[PREDICTIONS]
        assert len(graphs) > 1 and set(record.waits) == {PREDICTIONS}
        assert sum(graph.num_replays for graph in graphs) == num_steps
        num_allocations = 2 * depth  # of the cache, once
        num_recorded = sum(graph.num_launches for graph in graphs)
        num_launches.append((len(record.launches) - num_allocations - num_recorded) / num_steps)
    assert num_launches[0] == num_launches[1] <= 26
