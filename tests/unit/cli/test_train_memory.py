"""The warning and the error of a run that does not fit in memory."""

from __future__ import annotations

from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from cli import train
from config.train import TrainConfig
from ddp import launch
from diffusionlm.training import loop
from profiling.machine import Memory

TRAIN = Path(__file__).parents[3] / "config/resources/train.toml"


def allocate_too_much(*_: Any) -> None:
    torch.empty(1 << 55)


def test_missing_memory_ends_training_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loop, "train", allocate_too_much)
    with pytest.raises(SystemExit) as caught:
        train.main(["--config", str(TRAIN), "--set", f"run.directory={tmp_path / 'run'}"])
    error = capsys.readouterr().err
    assert caught.value.code == 1
    assert error.startswith("diffusionlm-train: error: out of memory, ") and error.count("\n") == 1
    assert "lower training.micro_batch_size" in error


def test_missing_memory_of_a_rank_is_one_line_and_no_reason_against_a_restart(
    tmp_path: Path, train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "train", allocate_too_much)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("os.setsid", lambda: None)
    exit_code = get_context("spawn").Value("i", launch.EXIT_CODE_UNKNOWN)
    with pytest.raises(SystemExit):
        launch.run_rank(partial(train.train_as_rank, train_config), exit_code, str(tmp_path), "run")
    (failure,) = launch.read_failures(tmp_path)
    assert failure.text.startswith("out of memory, ") and "lower training.micro_batch_size" in failure.text
    assert exit_code.value == launch.EXIT_CODE_UNKNOWN, "only errors that the user must mend prevent restarts"


def test_a_run_larger_than_the_memory_is_announced(
    train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "drivers", list)
    monkeypatch.setattr(train, "read_memory", lambda: Memory(1 << 40, 1 << 40))
    train.check_memory(train_config)
    assert not capsys.readouterr().err
    monkeypatch.setattr(train, "read_memory", lambda: Memory(1 << 40, 1 << 10))
    train.check_memory(train_config)
    assert "training.micro_batch_size" in capsys.readouterr().err
    monkeypatch.setattr(train, "drivers", lambda: ["580, GPU"])
    run = train_config.run.model_copy(update={"device": "auto"})
    train.check_memory(train_config.model_copy(update={"run": run}))
    assert not capsys.readouterr().err, "the GPU has memory of its own"


def test_a_run_that_needs_many_times_the_memory_is_refused(
    train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "drivers", list)
    monkeypatch.setattr(train, "read_memory", lambda: Memory(1 << 34, 1 << 33))
    train.check_memory(train_config)
    training = train_config.training.model_copy(update={"batch_size": 100_000_000, "micro_batch_size": None})
    with pytest.raises(ValueError, match=r"this machine has 16\.0 GiB: lower training\.micro_batch_size"):
        train.check_memory(train_config.model_copy(update={"training": training}))
