"""A pipeline whose stages need no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from cli.pipeline import runner
from tests.unit.cli.pipeline.small_stages import PROGRAM, build_pipeline


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """`build_pipeline` in a fresh working directory; its stages are the program of `small_stages`."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def build_command(name: str, config: Path) -> list[str]:
        return [sys.executable, "-I", "-S", str(program), str(config)]

    monkeypatch.setattr(runner, "build_command", build_command)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)
    return build_pipeline(tmp_path)
