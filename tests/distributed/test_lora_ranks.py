"""Runs with [lora] on two ranks: the same numbers as of one process, whatever is sharded or recomputed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from config.load import load_config
from config.train import TrainConfig
from diffusionlm.training import loop
from tests.distributed.test_training_ranks import STRATEGIES, losses, train_on
from tests.tiny_run import write_train_config

WEIGHTS = "checkpoints/latest/adapter_model.safetensors"
SECTIONS: dict[str, dict[str, Any]] = {
    "training": {"max_steps": 4, "micro_batch_size": 1, "ema_decay": 0.5},
    "lora": {"rank": 3, "dropout": 0.25, "trainable_tokens": [3, 7], "lr_ratio_b": 2.0},
    # A large eps answers rounding with rounding: near zero, the sign of a gradient decides the step.
    "optimizer": {"kind": "adamw", "learning_rate": 1e-2, "eps": 1e-5},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a tiny model with two steps of training."""
    folder = tmp_path_factory.mktemp("base")
    model = {"num_hidden_layers": 2}
    loop.train(load_config(TrainConfig, write_train_config(folder, model=model, training={"max_steps": 2})))
    return folder / "run"


def configure(base: Path, folder: Path, name: str, **sections: dict[str, Any]) -> TrainConfig:
    changes = {section: dict(values) for section, values in SECTIONS.items()}
    changes |= {"run": {"directory": str(folder / name)}, "model": {"init_from": str(base), "num_hidden_layers": 2}}
    for section, values in sections.items():
        changes[section] = changes.get(section, {}) | values
    return load_config(TrainConfig, write_train_config(folder, name, **changes))


def check_equal(one: TrainConfig, other: TrainConfig, tolerance: float) -> None:
    assert losses(one) == pytest.approx(losses(other), rel=tolerance)
    first, second = (load_file(config.run.directory / WEIGHTS) for config in (one, other))
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    ("strategy", "lora"),
    [
        pytest.param("ddp", {}, marks=pytest.mark.slow),
        pytest.param("ddp, sharded", {}, marks=pytest.mark.slow),
        pytest.param("fsdp", {}),
        pytest.param("fsdp", {"init": "pissa", "dora": True, "dropout": 0.0}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_two_ranks_match_a_single_process(strategy: str, lora: dict[str, Any], base: Path, tmp_path: Path) -> None:
    one = configure(base, tmp_path, "one", lora=lora)
    loop.train(one)
    two = configure(base, tmp_path, "two", lora=lora, parallel=STRATEGIES[strategy])
    assert train_on(two, tmp_path) == [4, 4]
    check_equal(two, one, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp, sharded", "fsdp"])
def test_ranks_may_change_when_a_run_is_resumed(strategy: str, base: Path, tmp_path: Path) -> None:
    """Two steps by two ranks, then two by one process; with FSDP the other way round as well."""
    straight = configure(base, tmp_path, "straight")
    loop.train(straight)
    accept: dict[str, Any] = {"checkpoint": {"config_change": "accept"}}
    for name, first, second in (("down", STRATEGIES[strategy], None), ("up", None, STRATEGIES[strategy])):
        for steps, parallel in ((2, first), (4, second)):
            schedule = {"kind": "constant", "warmup_steps": 0}
            sections = accept | {"training": {"max_steps": steps}, "schedule": schedule}
            config = configure(base, tmp_path, name, **sections, **({} if parallel is None else {"parallel": parallel}))
            if parallel is None:
                loop.train(config)
            else:
                train_on(config, tmp_path)
    constant = configure(base, tmp_path, "constant", schedule={"kind": "constant", "warmup_steps": 0})
    loop.train(constant)
    for name in ("down", "up"):
        check_equal(configure(base, tmp_path, name), constant, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp, sharded", "fsdp"])
def test_two_ranks_train_with_a_base_in_bfloat16(strategy: str, base: Path, tmp_path: Path) -> None:
    config = configure(
        base,
        tmp_path,
        "narrow",
        training={"precision": "bfloat16"},
        lora={"base": "bfloat16"},
        parallel=STRATEGIES[strategy],
        validation={"every_steps": 3},
    )
    assert train_on(config, tmp_path) == [4, 4]
    assert all(tensor.dtype == torch.float32 for tensor in load_file(config.run.directory / WEIGHTS).values())


@pytest.mark.parametrize("mode", ["selective", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_activation_checkpointing_changes_nothing(mode: str, base: Path, tmp_path: Path) -> None:
    """Also with dropout, whose masks are drawn again."""
    configs = [
        configure(base, tmp_path, name, runtime={"activation_checkpointing": name}, training={"max_steps": 2})
        for name in ("none", mode)
    ]
    for config in configs:
        loop.train(config)
    assert losses(configs[0]) == losses(configs[1])
    first, second = (load_file(config.run.directory / WEIGHTS) for config in configs)
    assert all(torch.equal(first[name], second[name]) for name in first)
