"""Tiny runs with [rl]."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from config.load import load_config
from config.train import TrainConfig
from ddp.process_group import SINGLE_PROCESS, World
from diffusionlm.evaluation.tasks.item_task import TaskItem
from diffusionlm.evaluation.tasks.results import Verdict
from diffusionlm.rl import run as policy_run
from diffusionlm.rl.graded import GradedTask
from diffusionlm.rl.loader import RolloutLoader
from diffusionlm.training.checkpointing.run_directory import open_run_directory
from diffusionlm.training.run import Run
from tests.tiny_run import write_train_config

Configure = Callable[..., TrainConfig]
QUESTIONS = ("ab", "abc", "hello", "x", "how?", "12345")
PATTERN = "[A-Za-z]"
"""What a random model writes into about half of its answers."""


def write_config(folder: Path, name: str, **sections: dict[str, Any]) -> TrainConfig:
    rl = sections.pop("rl", {})
    prompts = {
        "kind": "graded",
        "data": str(folder / "questions.jsonl"),
        "repeats": 4,
        "batch_size": 8,
        "generation": {"max_new_tokens": 6, "remasking_strategy": "entropy"},
        "rewards": [{"kind": "regex", "pattern": PATTERN}],
    } | rl.pop("prompts", {})
    changes: dict[str, dict[str, Any]] = {
        "run": {"directory": str(folder / name)},
        "model": {"init_from": str(folder / "base")},
        "data": {"row_length": 32},
        "objective": {"kind": "block_diffusion", "block_length": 4},
        "training": {"batch_size": 8, "micro_batch_size": 8, "max_steps": 4},
        "optimizer": {"kind": "adamw", "learning_rate": 1e-3, "eps": 1e-5, "weight_decay": 0.0},
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "validation": {"final_rows": 4},
        "samples": {"every_steps": 2},
        "rl": {"prompts": prompts, **rl},
    }
    for section, values in sections.items():
        changes[section] = changes.get(section, {}) | values
    return load_config(TrainConfig, write_train_config(folder, name, **changes))


def build(config: TrainConfig, world: World = SINGLE_PROCESS) -> tuple[Run, RolloutLoader]:
    """A run with rollouts, before its first step."""
    with open_run_directory(config, world) as directory:
        run = policy_run.build_policy_run(config, directory, world)
    assert isinstance(run.loader, RolloutLoader)
    return run, run.loader


def grade_by_length(self: GradedTask, item: TaskItem, text: str, steps: Any) -> tuple[Verdict, None]:
    """A reward that tells items apart; short questions cannot be graded."""
    if item.id == "x":
        raise ValueError("no reward")
    return Verdict({"reward": len(item.id) / 10.0 + sum(text.encode()) % 2}), None
