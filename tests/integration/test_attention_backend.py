"""The key attention_backend reaches the models of runs and commands. That backends agree: `unit/models`."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from config.generation import GenerationConfig
from config.infer import InferConfig
from config.train import TrainConfig
from diffusionlm.checkpoints.huggingface import load_configured_model, save_model
from diffusionlm.inference.generate import generate
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.loop import train
from diffusionlm.training.samples import Samples
from profiling import torch_setup
from tests.conftest import MakeModel
from tests.tiny_run import build_changed_run, change_config


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


def test_a_backend_that_cannot_run_is_an_error(config: TrainConfig, tiny_model: MakeModel) -> None:
    with pytest.raises(ValueError, match=r'"flex" has no backward on the CPU: use "tiled" or "auto"'):
        train(change_config(config, runtime={"attention_backend": "flex"}))
    model = tiny_model(backend="tiled", block_length=4)
    with pytest.raises(ValueError, match=r'"tiled" has no cached form: use "auto", "eager" or "sdpa"'):
        generate(model, [[1, 2]], GenerationConfig(max_new_tokens=4, cache="block"))
