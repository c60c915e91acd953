"""``just gpu-check``: its commands are valid, and what they print is kept."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from cli.commands import COMMANDS
from diffusionlm.checkpoints.huggingface import save_model
from tests.conftest import MakeModel

ROOT = Path(__file__).parents[3]
INTERPRETER = """#!/usr/bin/env bash
for word in "$@"; do printf '%s\\0' "$word"; done >> "$ARGUMENTS"
printf '\\n' >> "$ARGUMENTS"
echo "ran ${3-}"
[[ $3 != bench-infer ]]
"""


def list_commands(folder: Path) -> list[list[str]]:
    """Run the script with a stand-in of Python: the words of each command behind ``python -m``."""
    (folder / "python").write_text(INTERPRETER)
    (folder / "python").chmod(0o755)
    environment = {**os.environ, "PYTHON": str(folder / "python"), "ARGUMENTS": str(folder / "arguments")}
    script = ["bash", "scripts/gpu_check.sh", str(folder / "gpu.md")]
    done = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1, "a command has failed"
    lines = (folder / "arguments").read_text().splitlines()
    return [line.removesuffix("\0").split("\0")[1:] for line in lines]


def test_commands_are_valid_and_reported(tmp_path: Path, tiny_model: MakeModel) -> None:
    commands = list_commands(tmp_path)
    (tmp_path / "model").mkdir()
    save_model(tiny_model(), tmp_path / "model")
    names = []
    for module, *words in commands:
        names.append(words[0] if module == "cli" else module)
        if module == "pytest":
            paths = [ROOT / word for word in words if word.startswith("tests/")]
            assert paths and all(path.exists() for path in paths)
        elif module == "cli" and words[0] != "doctor":
            base = f"model={{init_from={json.dumps(str(tmp_path / 'model'))}}}"
            arguments = [base if word.startswith("model={") else word for word in words[1:]]
            with pytest.raises(SystemExit) as ended:
                COMMANDS[words[0]]([*arguments, "--print-config"])
            assert not ended.value.code
    assert {"doctor", "train", "train-ddp", "bench-infer", "bench-train", "pytest"} <= set(names)
    report = (tmp_path / "gpu.md").read_text()
    assert report.count("\n## ") == len(commands) and report.count("Exit code 1") == 2
    assert all(" ".join(words) in report for words in commands) and "    ran doctor" in report
