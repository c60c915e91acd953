"""``[parallel]``: what it may say, and what it cannot be combined with."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.load import load_config
from config.train import DistributedTrainConfig, TrainConfig
from config.training.parallel import DDP, FSDP, SingleProcess

RESOURCES = Path(__file__).parents[3] / "config" / "resources"
TRAIN = RESOURCES / "train.toml"


def test_defaults_of_both_commands() -> None:
    assert load_config(TrainConfig, TRAIN).parallel == SingleProcess()
    config = load_config(DistributedTrainConfig, TRAIN, ["parallel.local_ranks=4"])
    assert config.parallel == DDP(local_ranks=4)
    to_train_config = config.to_train_config()
    assert type(to_train_config) is TrainConfig and to_train_config == load_config(
        TrainConfig, TRAIN, ["parallel.strategy=ddp", "parallel.local_ranks=4"]
    )
    assert load_config(DistributedTrainConfig, TRAIN, ["parallel.strategy=fsdp"]).parallel == FSDP()


def test_the_shipped_config_is_the_quickstart_on_ranks() -> None:
    single = dict(load_config(TrainConfig, TRAIN))
    several = dict(load_config(TrainConfig, RESOURCES / "train_ddp.toml"))
    assert {name for name, section in single.items() if several[name] != section} == {"run", "parallel"}
    assert several["run"].model_copy(update={"directory": single["run"].directory}) == single["run"]


def test_sequences_per_rank() -> None:
    config = load_config(TrainConfig, TRAIN)
    assert [config.sequences_per_rank(world_size) for world_size in (1, 2, 16)] == [16, 8, 1]
    with pytest.raises(ValueError, match=r"training\.batch_size = 16 .* multiple of 3"):
        config.sequences_per_rank(3)
    cut = load_config(TrainConfig, TRAIN, ["training.micro_batch_size=8"])
    with pytest.raises(ValueError, match=r"training\.micro_batch_size = 8: set a multiple of 32"):
        cut.sequences_per_rank(4)
