"""Training and validation on a GPU that computes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from config.train import TrainConfig
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.transformer import Transformer
from tests.fake_cuda import fake_cuda
from tests.tiny_run import build_changed_run

CUDA = torch.device("cuda")


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
def test_evaluation_has_the_precision_of_training(
    precision: torch.dtype, train_config: TrainConfig, tmp_path: Path
) -> None:
    run = build_changed_run(train_config, tmp_path / "run")
    run.settings = replace(run.settings, device=CUDA, precision=precision)
    with fake_cuda() as record, run.evaluation_mode(), CUDA:
        model = Transformer(run.state.model.config)
        model(torch.ones(2, 16, dtype=torch.int64), pattern=Bidirectional())
    assert record.product_dtypes() == {precision}
