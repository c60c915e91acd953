"""Preference training on two ranks: the same numbers as of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diffusionlm.training import loop
from tests.conftest import MakeModel
from tests.distributed.test_training_ranks import STRATEGIES, check_equal, train_on
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
