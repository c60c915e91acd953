"""The update of a deep model needs few launches on a GPU, however many parameters there are. No GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from config.model import ModelConfig
from config.training.optimizer import AdamWConfig, LionConfig, MuonConfig
from diffusionlm.models.transformer import Transformer
from diffusionlm.optim.build import build_optimizers
from diffusionlm.optim.ema import WeightAverage
from diffusionlm.optim.master_weights import MasterWeights, select_block_matrices
from tests.conftest import MakeConfig
from tests.fake_cuda import LaunchRecord, fake_cuda
from tests.live_memory import PeakMemory

NUM_LAYERS = 14


def count_update(config: ModelConfig, optimizer: Any, *, has_master_weights: bool) -> tuple[int, LaunchRecord]:
    """Number of parameters, and the launches of an update that the device may skip: gradients of two micro-batches,
    optimizer and averages."""
    with fake_cuda() as record:
        with torch.device("cuda"):
            model = Transformer(config)
            skip = torch.zeros((), dtype=torch.bool)
        master_weights = MasterWeights(select_block_matrices(model) if has_master_weights else {})
        optimizers = build_optimizers(optimizer, dict(model.named_parameters()))
        with master_weights.as_float32():
            average = WeightAverage(model, 0.9)
        for is_first in (True, False):  # the first one creates the state
            gradients = [[torch.empty_like(parameter) for parameter in model.parameters()] for _ in range(2)]
            record.clear()
            for gradients_of_batch in gradients:
                for parameter, gradient in zip(model.parameters(), gradients_of_batch, strict=True):
                    parameter.grad = gradient
                master_weights.accumulate_gradients()
            with master_weights.as_float32():
                optimizers.step(1.0, skip)
                average.update(skip)
            assert is_first or not record.waits
    return len(list(model.parameters())), record


def test_master_weights_need_no_memory_but_that_of_a_chunk(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32 masters replace the bfloat16 weights and their other 16 bits, chunk by chunk."""
    with FakeTensorMode():
        with torch.device("cuda"):
            model = Transformer(make_config(num_hidden_layers=NUM_LAYERS))
        matrices = select_block_matrices(model)
        num_weights = sum(matrix.numel() for matrix in matrices.values())
        max_elements = num_weights // 10
        monkeypatch.setattr("diffusionlm.optim.master_weights.MAX_TOGETHER", 2 * max_elements)
        master_weights = MasterWeights(matrices)
        with PeakMemory(matrices.values()) as memory:
            for _ in range(2):
                with master_weights.as_float32():
                    pass
    # In the conversion of an element there are 12 bytes: old form, new form, and an intermediate result.
    assert 4 * num_weights < memory.peak <= 4.2 * num_weights + 12 * max_elements


@pytest.mark.parametrize(
    ("optimizer", "has_master_weights", "budget"),
    [(AdamWConfig(), False, 24), (LionConfig(), False, 48), (MuonConfig(), False, 160), (MuonConfig(), True, 180)],
    ids=["adamw", "lion", "muon", "muon with bfloat16 weights"],
)
def test_launches_of_an_update(optimizer: Any, has_master_weights: bool, budget: int, make_config: MakeConfig) -> None:
    num_parameters, record = count_update(
        make_config(num_hidden_layers=NUM_LAYERS), optimizer, has_master_weights=has_master_weights
    )
    assert num_parameters > 150
    assert len(record.launches) <= budget, record.count()
