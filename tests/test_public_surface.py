"""What users rely on: a change here is a change for them, and belongs into CHANGELOG.md."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import diffusionlm
from cli import commands
from config.train import TrainConfig
from diffusionlm.checkpoints.huggingface import save_model_directory
from tests.conftest import MakeModel
from tokenizer import train_bpe

ROOT = Path(__file__).parents[1]


def test_names() -> None:
    assert set(diffusionlm.__all__) == {
        "Bidirectional",
        "BlockCausal",
        "Causal",
        "ConstraintCompiler",
        "Engine",
        "Generation",
        "GenerationConfig",
        "HealedText",
        "LikelihoodEstimate",
        "ModelConfig",
        "NelboReport",
        "RequestOptions",
        "SamplerReport",
        "TokenConstraint",
        "TokenHealer",
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
        "read_adapter",
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
    ]


def test_commands() -> None:
    """Each is a program of its own and a word behind ``diffusionlm``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    programs = {
        name: getattr(commands, target.removeprefix("cli.commands:")) for name, target in project["scripts"].items()
    }
    assert set(programs) == {
        "diffusionlm",
        "diffusionlm-train",
        "diffusionlm-train-ddp",
        "diffusionlm-infer",
        "diffusionlm-serve",
        "diffusionlm-eval",
        "diffusionlm-lm-eval",
        "diffusionlm-train-tokenizer",
        "diffusionlm-make-data",
        "diffusionlm-data",
        "diffusionlm-convert",
        "diffusionlm-analyze",
        "diffusionlm-report",
        "diffusionlm-sweep",
        "diffusionlm-pipeline",
        "diffusionlm-doctor",
        "diffusionlm-bench-infer",
        "diffusionlm-bench-serve",
        "diffusionlm-bench-train",
        "diffusionlm-bench-tokenizer",
    }
    assert programs.pop("diffusionlm") == commands.main
    assert programs == {command.program: command for command in commands.COMMANDS.values()}
    for command in programs.values():
        assert callable(getattr(importlib.import_module(command.module), command.function))


def test_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert diffusionlm.__version__ == project["version"]


def test_sections_of_a_training_config() -> None:
    assert set(TrainConfig.model_fields) == {
        "run",
        "model",
        "data",
        "training",
        "tokenizer",
        "lora",
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
        "evaluation",
    }


def test_importing_the_package_does_not_import_torch() -> None:
    code = (
        "import sys, diffusionlm; diffusionlm.GenerationConfig, diffusionlm.__version__; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_example_of_the_readme(
    tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs, and its evaluation has the rows that a standard error needs."""
    monkeypatch.chdir(ROOT)
    tokenizer = train_bpe(["if x is not None:\n    return x\n"], vocab_size=270)
    ids = {"mask_token_id": tokenizer.mask_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = tiny_model(vocab_size=tokenizer.vocab_size, pad_token_id=None, max_position_embeddings=128, **ids)
    save_model_directory(model, tokenizer, tmp_path / "model")
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## From Python")[2]
    (example,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(example.replace("runs/quickstart", str(tmp_path / "model")), {})
    assert re.search(r"\n\d+\.\d+ \+- \d+\.\d+\n$", capsys.readouterr().out)
