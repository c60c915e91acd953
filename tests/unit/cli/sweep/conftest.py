"""A config that grids are laid over, and runs that need no torch."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cli.sweep import runner
from tests.tiny_run import REQUIRED_SECTIONS
from tests.unit.cli.sweep.small_runs import RUN


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A valid one, ``base.toml``; nothing is trained by it."""
    path = tmp_path / "base.toml"
    path.write_text(REQUIRED_SECTIONS)
    return path


@pytest.fixture
def small_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The runs of a sweep are the program of `small_runs`, in a fresh working directory."""
    program = tmp_path / "program.py"
    program.write_text(RUN)

    def build_command(module: str, config: Path, overrides: Sequence[str] = ()) -> list[str]:
        return [sys.executable, "-I", "-S", str(program), str(config), *overrides]

    monkeypatch.setattr(runner, "build_command", build_command)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(runner, "usable_cores", lambda: 8)
    monkeypatch.setattr(runner, "visible_gpus", lambda: [])
    monkeypatch.delenv("MENDED", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) == handler
