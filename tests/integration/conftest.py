"""The tiny run that these tests train."""

from __future__ import annotations

import pytest

from config.train import TrainConfig


@pytest.fixture
def config(train_config: TrainConfig) -> TrainConfig:
    """A tiny run in a temporary directory."""
    return train_config
