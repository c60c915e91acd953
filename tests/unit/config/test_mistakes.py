"""Mistakes in the config of a training are answered with the key and the remedy, each as one problem."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.load import ConfigError, load_config
from config.train import TrainConfig
from tests.tiny_run import REQUIRED_SECTIONS

BLOCKS = ["model.max_position_embeddings=128", "objective.kind=block_diffusion"]
BERNOULLI = "objective.estimator.kind=bernoulli"
HUB = ["data.source.kind=hub", "data.source.dataset=a/b"]

MISTAKES: dict[str, list[tuple[list[str], list[str]]]] = {
    "objective": [
        (BLOCKS, ["objective", "set either block_length or stages"]),
        ([*BLOCKS, "objective.stages=[{from_step=1, block_length=4}]"], ["stages[0].from_step = 1 must be 0"]),
        (
            [*BLOCKS, "objective.stages=[{from_step=0, block_length=4}, {from_step=0, block_length=2}]"],
            ["stages: from_step 0 must come after 0"],
        ),
        (
            ["objective.estimator.kind=counts", "objective.estimator.draw_per=block"],
            ['estimator.draw_per = "block" needs blocks', 'kind = "block_diffusion"'],
        ),
        ([BERNOULLI, "objective.estimator.range=[0.5, 0.5]"], ["objective.estimator", "range = [0.5, 0.5]: "]),
        ([BERNOULLI, "objective.estimator.schedule=cosines"], ["objective.estimator.schedule", "clean_cosine"]),
        (
            [BERNOULLI, "objective.estimator={position_ratio=2.0, contiguous_probability=0.1, kind='bernoulli'}"],
            ["position_ratio = 2.0", "contiguous_probability = 0.1", "set position_ratio = 1"],
        ),
        (["objective.kind=next_token", "objective.loss=elbo"], ["unknown key", 'normalizer needs kind = "masked']),
        (["objective.kind=next_token"], ["predicts token i by output i - 1: set model.logit"]),
        (
            [*BLOCKS, "data.row_length=64", "objective.stages=[{from_step=0, block_length=65}]"],
            ["objective.stages: block_length = 65"],
        ),
        (
            [*BLOCKS, "objective.stages=[{from_step=0, block_length=64}, {from_step=10, block_length=4}]"],
            ["objective.stages: from_step = 10 must be less than training.max_steps = 10"],
        ),
    ],
    "optimizer": [
        (["optimizer.head.eps=1e-8"], ["was removed; set optimizer.eps, or with muon"]),
        (["optimizer.hidden.momentum=0.5"], ["was removed; set learning_rate, momentum"]),
        (["optimizer.adjust_lr=original"], ["was removed; scale optimizer.learning_rate"]),
        (["optimizer.rest.head.learning_rate=1e-6"], ["is not a table of muon: name it [optimizer.head]"]),
        (["optimizer.rest.betas=[0.9, 1.0]"], ["must lie in [0, 1)"]),
        (["optimizer.kind=adamw", "optimizer.fallback=true"], ["fallback needs a kind that ends in 8bit"]),
        (
            ["parallel.strategy=fsdp", "optimizer={kind='lion8bit', learning_rate=1e-4}"],
            ['optimizer.kind = "lion8bit"'],
        ),
        (["schedule.decay_shape=sqrt"], ['decay_shape needs kind = "warmup_stable_decay"']),
        (["schedule.decay_steps=5"], ["was removed; set schedule.decay_fraction"]),
        (["schedule.warmup_steps=99999"], ["must be less than training.max_steps"]),
    ],
    "parallel": [
        (["parallel.local_ranks=2"], ['local_ranks needs strategy = "ddp"']),
        (
            ["parallel.strategy=ddp", "parallel.backend=nccl", "run.device=cpu"],
            ['set parallel.backend = "auto" or "gloo"'],
        ),
        (
            ["parallel.strategy=fsdp", "runtime.weights=bfloat16_with_master", "training.precision=bfloat16"],
            ['set runtime.weights = "float32"'],
        ),
    ],
    "data": [
        (["data.source.kind=markov", "data.source.symbols=a"], ["give at least 2 symbols"]),
        (["data.source.kind=markov", "data.source.symbols=abca"], ["'a'"]),
        ([*HUB, "data.source.train_split=train:x"], ["train:1000"]),
        ([*HUB, "data.source.train_split=train[:10]"], ["'train[:10]'"]),
        ([*HUB, "data.source.validation_split=test:5"], ["'test:5'"]),
        ([*HUB, "data.source.train_split=train:5", "data.source.max_documents=5"], ["max_documents = 5"]),
        (["data.row_length=4096"], ["model.max_position_embeddings = 16"]),
    ],
    "training": [
        (["training.micro_batch_size=3"], ["must be a multiple of micro_batch_size = 3"]),
        (["training.epochs=2"], ["max_steps and epochs"]),
    ],
}


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        pytest.param(*row, id=f"{section}-{number}")
        for section, rows in MISTAKES.items()
        for number, row in enumerate(rows)
    ],
)
def test_mistakes_are_answered(overrides: list[str], parts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text(REQUIRED_SECTIONS, encoding="utf-8")
    with pytest.raises(ConfigError, match="1 problem\n") as caught:
        load_config(TrainConfig, path, overrides)
    for part in parts:
        assert part in str(caught.value)
