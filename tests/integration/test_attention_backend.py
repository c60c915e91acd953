"""The key attention_backend reaches the models of runs and commands. That backends agree: `unit/models`."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from config.bench.inference import BenchInferConfig
from config.infer import InferConfig
from config.train import TrainConfig
from diffusionlm.checkpoints.huggingface import load_configured_model, save_model
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.samples import Samples
from profiling import torch_setup
from tests.conftest import MakeModel
from tests.tiny_run import build_changed_run


def test_samples_need_no_cached_form_of_the_backend(config: TrainConfig, tmp_path: Path) -> None:
    """By default a model of blocks decodes with a cache, which tiled does not have."""
    objective = {"kind": "block_diffusion", "block_length": 4}
    run = build_changed_run(config, tmp_path / "run", runtime={"attention_backend": "tiled"}, objective=objective)
    assert run.state.model.attention_backend == "tiled"
    samples = Samples.open(config, ["the cat [MASK:3] mat"], run.tokenizer, run.state.model)
    logger = MagicMock()
    samples.log_samples(run.state.model.eval(), 0, logger)
    [event] = logger.event.call_args_list
    assert event.args[3]["filled"]


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
