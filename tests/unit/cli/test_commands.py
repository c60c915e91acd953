"""``diffusionlm COMMAND`` and ``--version``."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import diffusionlm
from cli.commands import COMMANDS, main

ROOT = Path(__file__).parents[3]


def output_of(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[object, str, str]:
    """Exit code, standard output and standard error."""
    with pytest.raises(SystemExit) as caught:
        main(argv)
    return caught.value.code, *capsys.readouterr()


def test_errors_and_exit_codes_are_those_of_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = (2, "", "diffusionlm-train: error: none.toml: cannot be read (No such file or directory)\n")
    assert output_of(capsys, "train", "--config", "none.toml") == expected
    monkeypatch.setattr("cli.doctor.main", lambda argv: len(argv))
    assert main(["doctor", "--quick", "--json"]) == 2
    monkeypatch.setattr("cli.eval.main", lambda argv: None)
    assert main(["eval"]) == 0


def test_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert output_of(capsys, "--version") == (0, f"diffusionlm {diffusionlm.__version__}\n", "")
    code, _, message = output_of(capsys, "trian")
    assert code == 2 and "'trian'" in message and "train-ddp" in message
    code, _, message = output_of(capsys)
    assert code == 2 and "COMMAND" in message


def test_sources_that_are_not_installed_have_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", fail)
    assert diffusionlm.__version__ == "unknown"


RUN_CALLS = """
import contextlib, io, json, sys
from cli.commands import COMMANDS, main
results = []
for arguments in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = ended.code
    results.append((code, output.getvalue(), errors.getvalue(), "torch" in sys.modules))
json.dump(results, sys.__stdout__)
"""
"""Runs commands in a new process, and says whether they have loaded torch."""

CONFIGS = {
    name: ROOT / "config" / "resources" / f"{name.replace('-', '_')}.toml"
    for name in COMMANDS
    if name not in ("report", "doctor", "sweep", "lm-eval", "data", "pipeline", "rl")
} | {"rl": ROOT / "config" / "resources" / "train.toml"}
"""Commands with a config of their own, and a config that is shipped."""


def test_help_and_config_errors_answer_at_once() -> None:
    """Without torch: help with an example, the schema, errors of a config, and a config that is printed."""
    calls = [["--help"], ["--version"], *([name, word] for name in COMMANDS for word in ("--help", "--version"))]
    for name, path in CONFIGS.items():
        config = ["--config", str(path)] if path.is_file() else []
        calls += [[name, "--schema"], [name, *config, "--set", "a.b=1"], [name, *config, "--print-config"]]
    result = subprocess.run(
        [sys.executable, "-c", RUN_CALLS], input=json.dumps(calls), capture_output=True, text=True, check=True, cwd=ROOT
    )
    for call, (code, output, errors, has_torch) in zip(calls, json.loads(result.stdout), strict=True):
        assert not has_torch, call
        if call[1:] == ["--help"]:
            assert code == 0 and output.startswith(f"usage: diffusionlm-{call[0]} [-h] [--version]"), call
            assert f"diffusionlm-{call[0]} " in output.partition("example:")[2], call
        elif call[1:] == ["--version"]:
            assert output == f"diffusionlm-{call[0]} {diffusionlm.__version__}\n", call
        elif "a.b=1" in call:
            assert code == 2 and "--set a.b=1: " in errors, (call, errors)
        elif call[-1] == "--schema":
            assert json.loads(output)["type"] == "object", call
        else:
            assert code == 0 and output, (call, errors)
