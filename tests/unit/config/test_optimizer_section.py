"""Optimizers' tables: those of older files, groups of their own, and what is answered to mistakes."""

from __future__ import annotations

from pathlib import Path

from config.dump import to_toml
from config.load import load_config
from config.train import TrainConfig
from config.training.optimizer import (
    AdamWConfig,
    LionConfig,
    LRScheduleConfig,
    MuonConfig,
    ParameterGroup,
)
from tests.tiny_run import REQUIRED_SECTIONS


def load(tmp_path: Path, text: str, *overrides: str) -> TrainConfig:
    path = tmp_path / "train.toml"
    path.write_text(REQUIRED_SECTIONS + text, encoding="utf-8")
    config = load_config(TrainConfig, path, overrides)
    path.write_text(to_toml(config), encoding="utf-8")
    assert load_config(TrainConfig, path) == config
    return config


def test_tables_of_older_runs_mean_the_same(tmp_path: Path) -> None:
    """What a run directory had before groups had tables; a run only goes on if it is equal to the present config."""
    text = """
[optimizer]
kind = "muon"
adjust_lr = "match_rms_adamw"
learning_rate = 0.01
momentum = 0.95
weight_decay = 0.1
[optimizer.rest]
kind = "adamw"
learning_rate = 0.006
betas = [0.9, 0.98]
eps = 1e-08
weight_decay = 0.0
[schedule]
kind = "linear"
warmup_fraction = 0.05
final_factor = 0.0
"""
    config = load(tmp_path, text)
    assert (
        config.optimizer == MuonConfig(rest=AdamWConfig(learning_rate=6e-3, weight_decay=0.0))
        and config.schedule == LRScheduleConfig()
    )
    old = '[optimizer]\nkind = "adamw"\nlearning_rate = 1e-5\nbetas = [0.9, 0.98]\neps = 1e-8\nweight_decay = 0.1\n'
    assert load(tmp_path, old).optimizer == AdamWConfig(learning_rate=1e-5)


def test_groups_have_tables_of_their_own(tmp_path: Path) -> None:
    text = "[optimizer.router]\nlearning_rate = 1e-4\n"
    optimizer = load(tmp_path, text, "optimizer.head.weight_decay=0.5").optimizer
    assert optimizer == MuonConfig(router=ParameterGroup(learning_rate=1e-4), head=ParameterGroup(weight_decay=0.5))
    optimizer = load(tmp_path, '[optimizer]\nkind = "lion"\n[optimizer.embed]\nweight_decay = 2.0\n').optimizer
    assert optimizer == LionConfig(embed=ParameterGroup(weight_decay=2.0))
    optimizer = load(tmp_path, '[optimizer]\nkind = "adamw8bit"\nfallback = true\n').optimizer
    assert optimizer == AdamWConfig(kind="adamw8bit", fallback=True)
