"""What users rely on: a change here is a change for them, and belongs into CHANGELOG.md."""

from __future__ import annotations

import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import diffusionlm
from config.train import TrainConfig

ROOT = Path(__file__).parents[1]


def test_names() -> None:
    assert set(diffusionlm.__all__) == {
        "Bidirectional",
        "BlockCausal",
        "Causal",
        "Generation",
        "GenerationConfig",
        "LikelihoodEstimate",
        "ModelConfig",
        "NelboReport",
        "SamplerReport",
        "Transformer",
        "conditional_likelihood",
        "encode_chat",
        "generate",
        "infill",
        "init_weights",
        "load_chat_template",
        "load_model",
        "load_tokenizer",
        "nelbo",
        "render_chat",
        "sampler_likelihood",
        "save_model_directory",
        "stream",
    }
    for name in diffusionlm.__all__:
        assert getattr(diffusionlm, name).__doc__, name
    with pytest.raises(AttributeError, match="has no 'sample'; it has Bidirectional"):
        _ = diffusionlm.sample


def test_arguments() -> None:
    def names(call: object) -> list[str]:
        return list(inspect.signature(call).parameters)  # type: ignore[arg-type]

    assert names(diffusionlm.load_model)[:3] == ["path", "device", "dtype"]
    assert names(diffusionlm.generate)[:4] == ["model", "prompts", "config", "seeds"]
    assert names(diffusionlm.infill)[:4] == ["model", "canvases", "config", "seeds"]
    assert {"model", "tokens_BL", "loss_mask_BL", "num_mc_samples", "seed"} <= set(names(diffusionlm.nelbo))
    forward = names(diffusionlm.Transformer.forward)
    assert forward == [
        "self",
        "tokens_BL",
        "pattern",
        "positions",
        "inputs_embeds_BLD",
        "output_positions",
        "loss_inputs",
        "cache",
    ]


def test_commands() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {
        "diffusionlm-train": "cli.train:main",
        "diffusionlm-train-ddp": "cli.train_ddp:main",
        "diffusionlm-infer": "cli.infer:main",
        "diffusionlm-eval": "cli.eval:main",
        "diffusionlm-train-tokenizer": "cli.train_tokenizer:main",
        "diffusionlm-make-data": "cli.make_data:main",
        "diffusionlm-convert": "cli.convert:main",
        "diffusionlm-analyze": "cli.analyze:main",
        "diffusionlm-report": "cli.report:main",
        "diffusionlm-sweep": "cli.sweep:main",
        "diffusionlm-doctor": "cli.doctor:main",
        "diffusionlm-bench-infer": "cli.bench.infer:main",
        "diffusionlm-bench-train": "cli.bench.train:main",
        "diffusionlm-bench-tokenizer": "cli.bench.tokenizer:main",
    }


def test_sections_of_a_training_config() -> None:
    assert set(TrainConfig.model_fields) == {
        "run",
        "model",
        "data",
        "training",
        "tokenizer",
        "objective",
        "optimizer",
        "schedule",
        "validation",
        "samples",
        "checkpoint",
        "logging",
        "runtime",
        "parallel",
        "profiler",
    }


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, diffusionlm; diffusionlm.GenerationConfig; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
