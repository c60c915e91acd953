"""Runs with ``runtime.weights = "bfloat16_with_master"``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from config.train import TrainConfig
from diffusionlm.checkpoints.huggingface import load_model
from diffusionlm.training.checkpointing.run_directory import open_run_directory
from diffusionlm.training.loop import train
from diffusionlm.training.run import build_run
from diffusionlm.training.run_checkpoint import save_checkpoint
from diffusionlm.training.signals import StopRequest
from diffusionlm.training.step import load_step_batch, train_step
from logger import LoggerGroup


def narrow(config: TrainConfig, directory: Path, weights: str = "bfloat16_with_master", **training: Any) -> TrainConfig:
    values: dict[str, Any] = config.model_dump(exclude_unset=True)
    values["runtime"] = {"weights": weights}
    values["training"] |= {"precision": "bfloat16", **training}
    values["run"] |= {"directory": directory}
    values["model"] |= {"num_hidden_layers": 2}
    values["checkpoint"] |= {"every_steps": 100}
    return TrainConfig.model_validate(values)


def losses(config: TrainConfig) -> list[float]:
    lines = (config.run.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["metrics"]["loss"] for line in lines if '"loss"' in line]


@pytest.mark.slow
def test_runs_resume_bit_for_bit_and_keep_float32(config: TrainConfig, tmp_path: Path) -> None:
    """The average starts from the master, too."""
    whole = narrow(config, tmp_path / "whole", micro_batch_size=2, ema_decay=0.9)
    train(whole)
    part = narrow(config, tmp_path / "part", micro_batch_size=2, ema_decay=0.9)
    with open_run_directory(part) as directory:
        run = build_run(part, directory)
        for step in range(4):
            batch = load_step_batch(run.loader, step, run.world, StopRequest())
            train_step(run.state, run.loader, batch, run.settings, run.monitor)
            run.progress.step += 1
        save_checkpoint(run, LoggerGroup(), must_succeed=True)
    train(part)
    assert losses(part) == losses(whole)[4:]
    models = [load_model(config.run.directory / "checkpoints/latest") for config in (whole, part)]
    first, second = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    weight = first["model.layers.0.mlp.up_proj.weight"]
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float())


@pytest.mark.slow
def test_numbers_are_near_those_of_float32_weights(config: TrainConfig, tmp_path: Path) -> None:
    """Autocast rounds float32 weights to the same bfloat16 numbers for its products, but for halves."""
    configs = [narrow(config, tmp_path / weights, weights) for weights in ("float32", "bfloat16_with_master")]
    for config_of_dtype in configs:
        train(config_of_dtype)
    assert losses(configs[1]) == pytest.approx(losses(configs[0]), rel=1e-3)


def test_other_products_are_refused(config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r'set training\.precision = "bfloat16", or runtime\.weights = "float32"'):
        narrow(config, tmp_path, precision="float32")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    narrow_config = narrow(config, tmp_path / "run", precision="auto")
    with (
        pytest.raises(ValueError, match=r'training\.precision = "auto" is float32 on this processor'),
        open_run_directory(narrow_config) as directory,
    ):
        build_run(narrow_config, directory)
