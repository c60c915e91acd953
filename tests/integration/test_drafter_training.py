"""Runs that train an adapter of masked positions: drafts become better, and next tokens stay those of the base."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from config.convert import ConvertConfig
from config.load import ConfigError, load_config
from config.train import TrainConfig
from diffusionlm.checkpoints.convert import convert, prepare_conversion
from diffusionlm.checkpoints.huggingface import load_model
from diffusionlm.models.patterns import Causal
from diffusionlm.training.loop import train
from tests.tiny_run import MODEL, read_losses, write_train_config

WEIGHTS = "checkpoints/latest/adapter_model.safetensors"
OBJECTIVE: dict[str, Any] = {"kind": "block_diffusion", "block_length": 4, "clean_attention": "token"}
Configure = Callable[..., TrainConfig]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a model that predicts next tokens, and has learned nothing of masks."""
    folder = tmp_path_factory.mktemp("base")
    path = write_train_config(
        folder,
        model={**MODEL, "clean_alignment": "shifted"},
        objective=OBJECTIVE | {"next_token_weight": 1e4},
        training={"max_steps": 120},
        optimizer={"kind": "adamw", "learning_rate": 1e-2},
        checkpoint={"every_steps": 120},
    )
    train(load_config(TrainConfig, path))
    return folder / "run"


@pytest.fixture
def configure(base: Path, tmp_path: Path) -> Configure:
    """``configure(name, **sections)``: a run with an adapter of masked positions."""

    def make(name: str = "drafter", **sections: dict[str, Any]) -> TrainConfig:
        changes: dict[str, dict[str, Any]] = {
            "run": {"directory": str(tmp_path / name)},
            "model": {"init_from": str(base)},
            "objective": OBJECTIVE | {"estimator": {"kind": "all_masked"}},
            "lora": {"rank": 4, "alpha": 16.0, "positions": "masks"},
            "training": {"max_steps": 4},
            "optimizer": {"kind": "adamw", "learning_rate": 1e-2},
        }
        for section, values in sections.items():
            changes[section] = changes.get(section, {}) | values
        return load_config(TrainConfig, write_train_config(tmp_path, name, **changes))

    return make


def test_drafts_improve_and_next_tokens_stay(configure: Configure, base: Path, tmp_path: Path) -> None:
    config = configure(training={"max_steps": 60}, checkpoint={"every_steps": 60})
    summary, before = train(config).summary, json.loads((base / "summary.json").read_text(encoding="utf-8"))
    assert summary is not None
    evaluation, expected = summary.evaluation, before["evaluation"]
    assert evaluation.next_token_nats_per_token == expected["next_token_nats_per_token"]
    rates, old_rates = (
        [accepted for accepted, _ in own] for own in (evaluation.draft_acceptance, expected["draft_acceptance"])
    )
    assert all(rate > 1.1 * old for rate, old in zip(rates, old_rates, strict=True)), (rates, old_rates)
    run, tokens = config.run.directory, torch.arange(12)[None]
    assert json.loads((run / "checkpoints/latest/adapter_config.json").read_text())["positions"] == "masks"
    plain, adapted = load_model(base), load_model(run)
    with torch.no_grad():
        assert torch.equal(adapted(tokens, pattern=Causal()), plain(tokens, pattern=Causal()))
    with pytest.raises(ValueError, match="no merged weights"):
        convert(prepare_conversion(ConvertConfig(source=run, target=tmp_path / "merged")))
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_micro_batches_and_packed_rows_change_nothing(configure: Configure, checkpointing: str) -> None:
    """And a run that goes on ends as one that was never stopped."""
    one = configure("one", training={"micro_batch_size": 4})
    sections: dict[str, Any] = {
        "training": {"micro_batch_size": 1},
        "runtime": {"activation_checkpointing": checkpointing},
    }
    two = configure("two", **sections)
    for config in (one, two):
        train(config)
    assert read_losses(two) == pytest.approx(read_losses(one), rel=1e-5)
    expected = load_file(two.run.directory / WEIGHTS)
    checkpoints = two.run.directory / "checkpoints"
    shutil.rmtree(checkpoints / "step-00000004")
    (checkpoints / "latest").unlink()
    (two.run.directory / "summary.json").unlink()
    train(two)
    resumed = load_file(two.run.directory / WEIGHTS)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"objective": {"clean_attention": "block"}}, r'lora\.positions = "masks" trains the drafts .*clean_attention'),
        ({"objective": {"next_token_weight": 0.5}}, r"objective\.next_token_weight = 0\.5 trains .* set it to 0"),
        ({"lora": {"dora": True}}, r'positions = "masks" leaves all other positions as they are, and dora'),
        ({"parallel": {"strategy": "ddp", "context": 2}}, r'do not combine with lora\.positions = "masks"'),
    ],
)
def test_config_errors(sections: dict[str, Any], message: str, configure: Configure) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(**sections)
