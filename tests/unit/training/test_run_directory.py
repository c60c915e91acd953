"""Run directories that belong to something else are refused as wrong input."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.train import TrainConfig
from config.training.checkpoint import CheckpointConfig
from diffusionlm.training.checkpointing.run_directory import open_run_directory
from files.usage_error import UsageError


@pytest.fixture
def used(config: TrainConfig) -> Path:
    """A run directory with a checkpoint."""
    with open_run_directory(config) as directory:
        directory.store.path(1).mkdir(parents=True)
    return config.run.directory


def refuses(config: TrainConfig, message: str) -> None:
    with pytest.raises(UsageError, match=message), open_run_directory(config):
        pass


def test_a_used_directory_is_a_usage_error(config: TrainConfig, used: Path) -> None:
    before = (used / "config.toml").read_bytes()
    changed = config.model_copy(update={"run": config.run.model_copy(update={"seed": config.run.seed + 1})})
    refuses(changed, r"another config:\n  run\.seed")
    refuses(config.model_copy(update={"checkpoint": CheckpointConfig(resume="never")}), r'checkpoint\.resume = "never"')
    assert (used / "config.toml").read_bytes() == before
    (used / "config.toml").unlink()
    refuses(config, r"not empty and not a run \(it holds checkpoints\)")
