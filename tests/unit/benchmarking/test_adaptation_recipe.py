"""The recipe from an autoregressive model to diffusion, in small."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarking.finetune.adaptation import ARMS, NUM_VALIDATIONS, check_arguments, run_arms


@pytest.mark.slow
def test_adaptation_is_ahead_of_training_from_scratch(tmp_path: Path) -> None:
    """At every number of tokens, with all weights and with an adapter."""
    sizes = {"pretraining_steps": 30, "steps": 5, "hidden_size": 32, "layers": 1, "threads": 1}
    sizes |= {"vocab_size": 300, "validation_rows": 8}
    loss, bounds = run_arms(Namespace(objective="blocks", **sizes), tmp_path)
    assert loss.step == 30 and list(bounds) == [arm.name for arm in ARMS]
    scratch, *adapted = bounds.values()
    assert [bound.step for bound in scratch] == [1, 2, 3, 4, 5]
    for values in adapted:
        assert all(ours.nats < theirs.nats - 0.1 for ours, theirs in zip(values, scratch, strict=True))
        assert values[-1].nats < loss.nats + 0.5


@pytest.mark.parametrize(
    "change", [{"steps": NUM_VALIDATIONS - 1}, {"pretraining_steps": 0}, {"hidden_size": 40}, {"layers": 0}]
)
def test_arguments_out_of_range(change: dict[str, int]) -> None:
    options = {"pretraining_steps": 10, "steps": 10, "hidden_size": 64, "layers": 1}
    assert check_arguments(Namespace(**options)) is None
    assert check_arguments(Namespace(**options | change)) is not None
