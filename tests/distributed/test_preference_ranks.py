"""Preference training on two ranks: the same numbers as of one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from diffusionlm.training import loop
from tests.conftest import MakeModel
from tests.distributed.test_training_ranks import STRATEGIES, check_equal, losses, train_on
from tests.preference_run import configure_preferences, write_preferences


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp, sharded"])
def test_two_ranks_match_a_single_process(strategy: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    """With micro-batches of one pair on each rank."""
    write_preferences(tmp_path, tiny_model)
    sections: dict[str, Any] = {"training": {"micro_batch_size": 1, "max_steps": 3}}
    one = configure_preferences(tmp_path, "one", **sections)
    loop.train(one)
    two = configure_preferences(tmp_path, "two", **sections, parallel=STRATEGIES[strategy])
    assert train_on(two, tmp_path) == [3, 3]
    check_equal(two, one, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp, sharded", "fsdp"])
def test_two_ranks_compare_an_adapter_with_its_start(strategy: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    """Its values are whole on each rank, also of a sharded model."""
    write_preferences(tmp_path, tiny_model)
    lora: dict[str, Any] = {"rank": 2, "trainable_tokens": [3]}
    sections: dict[str, Any] = {"training": {"micro_batch_size": 1, "max_steps": 3}, "lora": lora}
    first = configure_preferences(tmp_path, "first", **sections, optimizer={"learning_rate": 2e-2})
    loop.train(first)
    sections["lora"] = lora | {"init_from": str(first.run.directory)}
    one = configure_preferences(tmp_path, "one", **sections)
    loop.train(one)
    two = configure_preferences(tmp_path, "two", **sections, parallel=STRATEGIES[strategy])
    assert train_on(two, tmp_path) == [3, 3]
    assert losses(one)[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses(two) == pytest.approx(losses(one), rel=2e-5)
