"""[logging]."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from config.load import ConfigError, load_config
from config.train import TrainConfig
from config.training.logging import LoggingConfig
from logger.weights_and_biases import WandbConfig
from tests.tiny_run import REQUIRED_SECTIONS

Load = Callable[[str], LoggingConfig]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load(text: str) -> LoggingConfig:
        path = tmp_path / "train.toml"
        path.write_text(REQUIRED_SECTIONS + text, encoding="utf-8")
        return load_config(TrainConfig, path).logging

    return load


def test_weights_and_biases_is_on_where_its_table_is(load: Load) -> None:
    assert load("").model_dump()["wandb"] is None
    assert load("[logging.wandb]").model_dump()["wandb"] == WandbConfig().model_dump()
    text = '[logging.wandb]\nproject = "p"\ntags = ["a"]\nartifacts = ["samples", "tokenizer"]'
    wandb = WandbConfig(project="p", tags=("a",), artifacts=("samples", "tokenizer"))
    assert load(text).model_dump()["wandb"] == wandb.model_dump()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('[wandb]\nproject = "p"', ["[wandb]", "[logging.wandb]"]),
        ('[logging.wandb]\nartifacts = ["weights"]', ["logging.wandb.artifacts", "checkpoints"]),
        ('[logging]\nconsole = "lines"', ["logging.console", "json"]),
    ],
)
def test_bad_keys(text: str, parts: list[str], load: Load) -> None:
    with pytest.raises(ConfigError) as raised:
        load(text)
    assert all(part in str(raised.value) for part in parts)
