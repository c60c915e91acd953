"""[logging], and the keys that other projects have for it."""

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
    ("text", "advice"),
    [
        ('[wandb]\nproject = "p"', "[logging.wandb]"),
        ('[logging]\narchitecture = "x"', "is in the config"),
        ('[logging]\nbackend = "wandb"', "[logging.tensorboard]"),
        ("[logging]\nlog_weight_norms = true", "logging.norms_every_steps"),
        ("[logging.wandb]\nenabled = true", "whether [logging.wandb] is there"),
        ('[logging.wandb]\nartifacts = ["weights"]', "checkpoints"),
        ('[logging]\nconsole = "lines"', "json"),
    ],
)
def test_other_keys_are_answered(text: str, advice: str, load: Load) -> None:
    with pytest.raises(ConfigError) as raised:
        load(text)
    assert advice in str(raised.value)
