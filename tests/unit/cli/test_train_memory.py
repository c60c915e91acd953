"""The warning of a run that does not fit in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cli import train
from config.train import TrainConfig
from profiling.machine import Memory


def test_a_run_larger_than_the_memory_is_announced(
    train_config: TrainConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = Memory(total=1 << 40, available=1 << 40, limit=None, used=None, shared_total=None, shared_free=None)
    monkeypatch.setattr(train, "drivers", list)
    monkeypatch.setattr(train, "read_memory", lambda root: memory)
    train.warn_about_memory(train_config)
    assert not capsys.readouterr().err
    monkeypatch.setattr(train, "read_memory", lambda root: replace(memory, available=1 << 10))
    train.warn_about_memory(train_config)
    assert "training.micro_batch_size" in capsys.readouterr().err
    monkeypatch.setattr(train, "drivers", lambda: ["580, GPU"])
    run = train_config.run.model_copy(update={"device": "auto"})
    train.warn_about_memory(train_config.model_copy(update={"run": run}))
    assert not capsys.readouterr().err, "the GPU has memory of its own"
