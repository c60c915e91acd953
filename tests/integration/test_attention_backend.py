"""The key attention_backend: every backend computes the same loss, and samples are decoded with each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from config.bench.inference import BenchInferConfig
from config.infer import InferConfig
from config.train import TrainConfig
from diffusionlm.checkpoints.huggingface import load_configured_model, save_model
from diffusionlm.models.attention_backends import PatternAttention
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.run import Run
from diffusionlm.training.samples import Samples
from diffusionlm.training.signals import StopRequest
from diffusionlm.training.step import load_step_batch, train_step
from profiling import torch_setup
from tests.conftest import MakeModel
from tests.tiny_run import build_changed_run


def build(config: TrainConfig, tmp_path: Path, backend: str) -> Run:
    return build_changed_run(
        config,
        tmp_path / f"run_{backend}",
        runtime={"attention_backend": backend},
        objective={"kind": "block_diffusion", "block_length": 4},
    )


def first_loss(run: Run) -> float:
    batch = load_step_batch(run.loader, 0, run.world, StopRequest())
    return float(train_step(run.state, run.loader, batch, run.settings, run.monitor).loss)


def test_every_backend_gives_the_loss_of_auto(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = first_loss(build(config, tmp_path, "auto"))
    used: set[str] = set()
    backend_for = PatternAttention.backend_for

    def spy(self: PatternAttention, q_BQNH: torch.Tensor) -> Any:
        used.add(backend_for(self, q_BQNH))
        return backend_for(self, q_BQNH)

    monkeypatch.setattr(PatternAttention, "backend_for", spy)
    for backend in ("eager", "sdpa", "tiled"):
        used.clear()
        assert first_loss(build(config, tmp_path, backend)) == pytest.approx(expected, rel=1e-5)
        assert used == {backend}


def test_samples_need_no_cached_form_of_the_backend(config: TrainConfig, tmp_path: Path) -> None:
    """By default a model of blocks decodes with a cache, which tiled does not have."""
    run = build(config, tmp_path, "tiled")
    events: list[dict[str, Any]] = []

    class Logger:
        def event(self, step: int, kind: str, text: str, values: dict[str, Any]) -> None:
            events.append(values)

    samples = Samples.open(config, ["the cat [MASK:3] mat"], run.tokenizer, run.state.model)
    samples.log_samples(run.state.model.eval(), 0, Logger())  # type: ignore[arg-type]
    assert len(events) == 1 and events[0]["filled"]


def test_the_settings_of_a_command_reach_the_model(
    tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tiny_model(), tmp_path)

    def load(**section: str) -> Transformer:
        values = {"path": tmp_path, "device": "cpu", **section}
        return load_configured_model(InferConfig.model_validate({"model": values}).model)

    for backend in ("auto", "eager", "tiled", "flex"):
        assert load(attention_backend=backend).attention_backend == backend
    assert load().uses_cuda_graphs and not load(cuda_graphs="off").uses_cuda_graphs
    assert load().lm_head.weight.dtype == torch.float32
    assert load(dtype="bfloat16").lm_head.weight.dtype == torch.bfloat16
    for is_native, dtypes in ((True, ["float32", "bfloat16"]), (False, ["float32", "float32"])):
        monkeypatch.setattr(torch_setup, "has_native_bfloat16", lambda device, is_native=is_native: is_native)
        assert [torch_setup.select_dtype("auto", device) for device in ("cpu", "cuda")] == dtypes


def test_a_backend_that_cannot_run_is_an_error_of_the_config(config: TrainConfig, tmp_path: Path) -> None:
    values = config.model_dump()
    values["runtime"]["attention_backend"] = "flex"
    with pytest.raises(ValueError, match=r"runtime.attention_backend.*run.device"):
        TrainConfig.model_validate(values)
    for model in ({"attention_backend": "tiled"}, {"attention_backend": "flex"}):
        with pytest.raises(ValueError, match=r"model.attention_backend.*generation.cache"):
            InferConfig.model_validate({"model": model, "generation": {"cache": "block"}})
        policy = {"name": "a", "generation": {"attention": "block_causal"}}
        bench = {"model": {**model, "path": tmp_path}, "strategies": [policy], "grid": {"caches": ["none", "block"]}}
        with pytest.raises(ValueError, match=r"model.attention_backend.*grid.caches"):
            BenchInferConfig.model_validate(bench)
