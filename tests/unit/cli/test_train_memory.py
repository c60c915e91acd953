"""The warning and the error of a run that does not fit in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cli import train
from config.train import TrainConfig
from diffusionlm.training import loop
from profiling.machine import Memory
from tests.unit.cli.conftest import Fails

TRAIN = Path(__file__).parents[3] / "config/resources/train.toml"


def allocate_too_much(*_: Any) -> None:
    torch.empty(1 << 55)


def test_missing_memory_ends_training_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Fails
) -> None:
    monkeypatch.setattr(loop, "train", allocate_too_much)
    error = fails(train.main, "--config", TRAIN, "--set", f"run.directory={tmp_path / 'run'}", code=1)
    assert error.startswith("diffusionlm-train: error: out of memory, ") and error.count("\n") == 1
    assert "lower training.micro_batch_size" in error


def test_a_run_larger_than_the_memory_is_announced_or_refused(
    train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(total: int, free: int, **changes: Any) -> str:
        monkeypatch.setattr(train, "read_memory", lambda: Memory(total, free))
        train.check_memory(train_config.model_copy(update=changes))
        return capsys.readouterr().err

    monkeypatch.setattr(train, "drivers", list)
    assert not check(1 << 40, 1 << 40)
    assert "training.micro_batch_size" in check(1 << 40, 1 << 10)
    training = train_config.training.model_copy(update={"batch_size": 100_000_000, "micro_batch_size": None})
    with pytest.raises(ValueError, match=r"this machine has 16\.0 GiB: lower training\.micro_batch_size"):
        check(1 << 34, 1 << 33, training=training)
    monkeypatch.setattr(train, "drivers", lambda: ["580, GPU"])
    run = train_config.run.model_copy(update={"device": "auto"})
    assert not check(1 << 40, 1 << 10, run=run), "the GPU has memory of its own"
