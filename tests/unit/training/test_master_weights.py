"""Bfloat16 weights that lose nothing of float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from config.train import TrainConfig
from diffusionlm.checkpoints.huggingface import load_model
from diffusionlm.optim.master_weights import join_float32, split_float32
from diffusionlm.training.checkpointing.run_directory import open_run_directory
from diffusionlm.training.loop import train
from diffusionlm.training.run import Run, build_run
from diffusionlm.training.run_checkpoint import save_checkpoint
from diffusionlm.training.signals import StopRequest
from diffusionlm.training.step import load_step_batch, train_step
from logger import LoggerGroup


def test_splitting_loses_nothing() -> None:
    """All exponents and signs, the ends of all halves, infinities, NaNs and subnormals."""
    high = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    bits = (high[:, None] | low).flatten()
    rounded, rest = split_float32(bits.view(torch.float32))
    assert rounded.dtype == torch.bfloat16
    assert rest.dtype == torch.int16
    assert torch.equal(join_float32(rounded, rest).view(torch.int32), bits)


def test_the_larger_part_is_the_nearest_bfloat16() -> None:
    numbers = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 3
    is_half = numbers.view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(split_float32(numbers)[0][~is_half], numbers.bfloat16()[~is_half])
    half = torch.tensor([1.0 + 2**-8, -1.0 - 2**-8])  # between 1 and the next bfloat16
    assert torch.equal(split_float32(half)[0].float(), torch.tensor([1.0 + 2**-7, -1.0 - 2**-7]))


def narrow(config: TrainConfig, directory: Path, weights: str = "bfloat16_with_master", **training: Any) -> TrainConfig:
    values: dict[str, Any] = config.model_dump(exclude_unset=True)
    values["runtime"] = {"weights": weights}
    values["training"] |= {"precision": "bfloat16", **training}
    values["run"] |= {"directory": directory}
    values["model"] |= {"num_hidden_layers": 2}
    values["checkpoint"] |= {"every_steps": 100}
    return TrainConfig.model_validate(values)


def test_with_equal_gradients_the_master_is_a_float32_runs_weight(config: TrainConfig, tmp_path: Path) -> None:
    """Two micro-batches of made-up gradients, exact in bfloat16, for three steps."""
    runs: list[Run] = []
    for weights in ("float32", "bfloat16_with_master"):
        with open_run_directory(narrow(config, tmp_path / weights, weights)) as directory:
            runs.append(build_run(narrow(config, tmp_path / weights, weights), directory))
    rng = torch.Generator().manual_seed(0)
    for _ in range(3):
        for _ in range(2):
            gradients = [torch.randn(each.shape, generator=rng) for each in runs[0].state.model.parameters()]
            for run in runs:
                for parameter, gradient in zip(run.state.model.parameters(), gradients, strict=True):
                    gradient = gradient.bfloat16().to(parameter.dtype)
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
                run.state.master_weights.accumulate_gradients()
        for run in runs:
            with run.state.master_weights.as_float32():
                run.state.optimizers.step(1.0)
    first, second = (dict(run.state.model.named_parameters()) for run in runs)
    kinds = {name: each.dtype for name, each in second.items()}
    assert kinds["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16
    assert {kinds[name] for name in ("model.embed_tokens.weight", "model.norm.weight")} == {torch.float32}
    with runs[1].state.master_weights.as_float32():
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert kinds == {name: each.dtype for name, each in second.items()}
    assert all(each.dtype == torch.float32 for each in runs[1].state.optimizers.state_dict().values())


def losses(config: TrainConfig) -> list[float]:
    lines = (config.run.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["metrics"]["loss"] for line in lines if '"loss"' in line]


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
    models = [load_model(each.run.directory / "checkpoints/latest") for each in (whole, part)]
    first, second = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    weight = first["model.layers.0.mlp.up_proj.weight"]
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float())


def test_numbers_are_near_those_of_float32_weights(config: TrainConfig, tmp_path: Path) -> None:
    """Autocast rounds float32 weights to the same bfloat16 numbers for its products, but for halves."""
    configs = [narrow(config, tmp_path / weights, weights) for weights in ("float32", "bfloat16_with_master")]
    for each in configs:
        train(each)
    assert losses(configs[1]) == pytest.approx(losses(configs[0]), rel=1e-3)


def test_other_products_are_refused(config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r'set training\.precision = "bfloat16", or runtime\.weights = "float32"'):
        narrow(config, tmp_path, precision="float32")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    made = narrow(config, tmp_path / "run", precision="auto")
    with (
        pytest.raises(ValueError, match=r'training\.precision = "auto" is float32 on this processor'),
        open_run_directory(made) as directory,
    ):
        build_run(made, directory)
