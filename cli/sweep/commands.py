"""What can be swept: training runs and calls of ``diffusionlm-infer``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.arguments import toml_string
from config.base import Section
from config.infer import InferConfig
from config.train import KEY_HINTS, TrainConfig


@dataclass(frozen=True)
class SweepCommand:
    """One of the commands that a sweep can start."""

    name: str
    config: type[Section]
    key_hints: Mapping[str, str]
    managed_keys: tuple[str, ...]
    """Keys that the sweep sets itself; a name that ends in a dot stands for a whole section."""
    threads_key: str
    overrides: Callable[[Path], list[str]]
    """What puts a run's files into its directory."""
    problem: Callable[[Any], str | None]
    """What is in the way of sweeping a valid config, and the remedy."""
    module: Callable[[Any], str]
    """What Python runs for it."""


def _train_overrides(directory: Path) -> list[str]:
    return [f"run.directory={toml_string(str(directory))}"]


def _train_problem(config: TrainConfig) -> str | None:
    if config.checkpoint.resume == "never":
        return 'checkpoint.resume = "never": an interrupted run of a sweep goes on from its checkpoint; leave it "auto"'
    return None


def _train_module(config: TrainConfig) -> str:
    return "cli.train" if config.parallel.strategy == "single" else "cli.train_ddp"


def _infer_overrides(directory: Path) -> list[str]:
    answers, page = toml_string(str(directory / ANSWERS_FILE)), toml_string(str(directory / REPLAY_FILE))
    return [f"output.file={answers}", f"output.html={page}"]


def _infer_problem(config: InferConfig) -> str | None:
    asked, path = config.input, config.model.path
    if path is None:
        return "no model given: add --set model.path=DIR, or path to [model] of the config"
    if not path.exists():
        return f'model.path = "{path}": there is no such directory'
    if asked.prompts_file is not None and str(asked.prompts_file) == "-":
        return 'input.prompts_file = "-": the runs share no standard input; name a file'
    if asked.prompts_file is not None and not asked.prompts_file.is_file():
        return f'input.prompts_file = "{asked.prompts_file}": there is no such file'
    if not (asked.prompts or asked.chats or asked.infills or asked.prompts_file):
        return "[input] has no prompts, prompts_file, chats or infills: add some"
    return None


ANSWERS_FILE = "answers.jsonl"
REPLAY_FILE = "replay.html"

SWEEP_COMMANDS = {
    "train": SweepCommand(
        name="train",
        config=TrainConfig,
        key_hints=KEY_HINTS,
        managed_keys=("run.directory",),
        threads_key="run.threads",
        overrides=_train_overrides,
        problem=_train_problem,
        module=_train_module,
    ),
    "infer": SweepCommand(
        name="infer",
        config=InferConfig,
        key_hints={},
        managed_keys=("output.",),
        threads_key="model.threads",
        overrides=_infer_overrides,
        problem=_infer_problem,
        module=lambda config: "cli.infer",
    ),
}
"""By the value of ``--command``."""
