"""[logging]."""

from __future__ import annotations

from pathlib import Path

from config.load import load_config
from config.train import TrainConfig
from config.training.logging import LoggingConfig
from logger.weights_and_biases import WandbConfig
from tests.tiny_run import REQUIRED_SECTIONS


def load(tmp_path: Path, text: str) -> LoggingConfig:
    path = tmp_path / "train.toml"
    path.write_text(REQUIRED_SECTIONS + text, encoding="utf-8")
    return load_config(TrainConfig, path).logging


def test_weights_and_biases_is_on_where_its_table_is(tmp_path: Path) -> None:
    assert load(tmp_path, "").model_dump()["wandb"] is None
    assert load(tmp_path, "[logging.wandb]").model_dump()["wandb"] == WandbConfig().model_dump()
    text = '[logging.wandb]\nproject = "p"\ntags = ["a"]\nartifacts = ["samples", "tokenizer"]'
    wandb = WandbConfig(project="p", tags=("a",), artifacts=("samples", "tokenizer"))
    assert load(tmp_path, text).model_dump()["wandb"] == wandb.model_dump()
