"""What two ranks see of a step is what one sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from config.train import TrainConfig
from diffusionlm.training import loop
from tests.distributed.test_training_ranks import ADAMW, STRATEGIES, in_directory, train_on

SEEN = ("mask_ratio", "loss_by_masked_fraction/", "weight_norms/", "activation_norms/")


def read_norms(config: TrainConfig) -> list[dict[str, float]]:
    lines = (config.run.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record["metrics"] for record in map(json.loads, lines) if "loss" in record.get("metrics", {})]
    return [{key: value for key, value in step.items() if key.startswith(SEEN)} for step in steps]


@pytest.mark.parametrize("strategy", ["ddp, sharded", pytest.param("fsdp", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_sums_are_over_all_ranks(strategy: str, config: TrainConfig, tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "optimizer": ADAMW,
        "training": {"micro_batch_size": 1, "max_steps": 2},
        "logging": {"norms_every_steps": 2},
    }
    one = in_directory(config, tmp_path / "one", **sections)
    loop.train(one)
    two = in_directory(config, tmp_path / "two", **sections, parallel=STRATEGIES[strategy])
    train_on(two, tmp_path)
    first, second = read_norms(one), read_norms(two)
    assert [len(step) > 10 for step in first] == [False, True]
    for expected, actual in zip(first, second, strict=True):
        assert actual.keys() == expected.keys()
        assert actual == pytest.approx(expected, rel=2e-5)
