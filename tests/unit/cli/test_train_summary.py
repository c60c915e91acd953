"""The command that a training run suggests at its end."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from cli.infer import main
from cli.train import suggest_next_command
from config.infer import InferConfig
from config.load import load_config
from tests.unit.cli.conftest import Fails


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("A line\nand a 'quoted' \\n", "--prompt"),
        ("--dashes", "--prompt"),
        ("-[MASK:1]", "--infill"),
    ],
)
def test_the_next_command_reads_its_text_back(text: str, option: str, tmp_path: Path, fails: Fails) -> None:
    words = shlex.split(suggest_next_command(Path("runs/a b"), text))
    assert words[:5] == ["uv", "run", "diffusionlm-infer", "--model", "runs/a b"]
    assert words[5].partition("=")[0] == option
    path = tmp_path / "infer.toml"
    path.write_text(fails(main, *words[3:], "--print-config", code=0), encoding="utf-8")
    config = load_config(InferConfig, path)
    assert (config.input.infills if option == "--infill" else config.input.prompts) == (text,)
