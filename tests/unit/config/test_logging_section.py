"""[logging]."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from config.load import ConfigError, load_config
from config.logging import LoggingConfig, WandbConfig
from config.train import KEY_HINTS, TrainConfig

REST = """
[run]
directory = "unused"
[model]
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 1
num_key_value_heads = 1
head_dim = 16
intermediate_size = 16
max_position_embeddings = 16
[data.source]
kind = "files"
paths = ["a.txt"]
[training]
batch_size = 4
max_steps = 8
"""


Load = Callable[[str], LoggingConfig]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load(text: str) -> LoggingConfig:
        path = tmp_path / "train.toml"
        path.write_text(REST + text, encoding="utf-8")
        return load_config(TrainConfig, path, key_hints=KEY_HINTS).logging

    return load


def test_weights_and_biases_is_on_where_its_table_is(load: Load) -> None:
    assert load("").wandb is None and not load("").tensorboard.enabled
    assert load("[logging.wandb]") == LoggingConfig(wandb=WandbConfig())
    wandb = load('[logging.wandb]\nproject = "p"\ntags = ["a"]\nartifacts = ["samples", "tokenizer"]').wandb
    assert wandb == WandbConfig(project="p", tags=("a",), artifacts=("samples", "tokenizer"))


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
