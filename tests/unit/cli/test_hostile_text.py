"""Keys, paths and arguments with control characters: every command shows them as escapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.commands import COMMANDS
from tests.unit.cli.conftest import Fails

TITLE, CLEAR = "\x1b]0;x\x07", "\x1b[2J"


@pytest.mark.parametrize("name", ["train", "data", "pipeline"])
def test_keys_and_paths_of_configs(name: str, fails: Fails, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('"[red]\\u001b]0;x\\u0007" = 1', encoding="utf-8")
    for arguments, escaped in (
        (["--config", str(config)], r"[red]\x1b]0;x\x07"),
        (["--config", str(config), "--set", f"[red]{TITLE}=1"], r"[red]\x1b]0;x\x07"),
        (["--config", f"{CLEAR}.toml"], r"\x1b[2J.toml"),
        (["--config", str(config), f"--{CLEAR}"], r"--\x1b[2J"),
    ):
        error = fails(COMMANDS[name], *arguments)
        assert escaped in error and "\x1b" not in error and "\x07" not in error


def test_paths_of_models_and_runs(fails: Fails, tmp_path: Path) -> None:
    missing = str(tmp_path / f"run{CLEAR}")
    for name, arguments in (
        ("doctor", [missing]),
        ("report", [missing]),
        ("infer", ["--model", missing, "--prompt", "a"]),
        ("eval", ["--model", missing, "--data", missing]),
    ):
        error = fails(COMMANDS[name], *arguments)
        assert r"run\x1b[2J" in error and "\x1b" not in error, name
