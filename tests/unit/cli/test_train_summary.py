"""The command that a training run suggests at its end."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from cli.infer import main
from cli.train import suggest_next_command
from config.infer import InferConfig
from config.load import load_config


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("A line\nand a 'quoted' \\n", "--prompt"),
        ("--dashes", "--prompt"),
        ("-[MASK:1]", "--infill"),
    ],
)
def test_the_next_command_reads_its_text_back(
    text: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(suggest_next_command(Path("runs/a b"), text))
    assert words[:5] == ["uv", "run", "diffusionlm-infer", "--model", "runs/a b"]
    assert words[5].partition("=")[0] == option
    with pytest.raises(SystemExit) as caught:
        main([*words[3:], "--print-config"])
    assert not caught.value.code
    path = tmp_path / "infer.toml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    config = load_config(InferConfig, path)
    assert (config.input.infills if option == "--infill" else config.input.prompts) == (text,)
