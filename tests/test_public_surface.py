"""What users rely on: a change here is a change for them, and belongs into CHANGELOG.md."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import diffusionlm
from cli import commands
from config.train import TrainConfig
from diffusionlm.checkpoints.huggingface import save_model_directory
from tests.conftest import MakeModel
from tokenizer import train_bpe

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def list_surface() -> Iterator[str]:
    """A line for each name that users type: Python with its arguments, commands, sections of a training config."""
    for name in sorted(diffusionlm.__all__):
        value = getattr(diffusionlm, name)
        assert value.__doc__, name
        is_function = inspect.isfunction(value)
        yield f"diffusionlm.{name}" + (f"({', '.join(inspect.signature(value).parameters)})" if is_function else "")
    yield f"model({', '.join(list(inspect.signature(diffusionlm.Transformer.forward).parameters)[1:])})"
    yield from sorted(PROJECT["scripts"])
    yield from (f"[{section}]" for section in sorted(TrainConfig.model_fields))


def test_names(golden: Callable[[str, str], None]) -> None:
    golden("public_surface.txt", "".join(f"{line}\n" for line in list_surface()))
    with pytest.raises(AttributeError, match="has no 'sample'; it has Bidirectional"):
        _ = diffusionlm.sample


def test_commands() -> None:
    """Each is a program of its own and a word behind ``diffusionlm``."""
    programs = {
        name: getattr(commands, target.removeprefix("cli.commands:")) for name, target in PROJECT["scripts"].items()
    }
    assert programs.pop("diffusionlm") == commands.main
    assert programs == {command.program: command for command in commands.COMMANDS.values()}
    for command in programs.values():
        assert callable(getattr(importlib.import_module(command.module), command.function))


def test_version() -> None:
    assert diffusionlm.__version__ == PROJECT["version"]


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
