"""The commands that a sweep can run: training and ``diffusionlm-infer``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.arguments import toml_string
from config.base import Section
from config.infer import InferConfig
from config.train import TrainConfig
from diffusionlm.families.model_directory import resolve_model_directory


@dataclass(frozen=True)
class SweepCommand:
    """A command that a sweep can run."""

    name: str
    config: type[Section]
    managed_keys: tuple[str, ...]
    """Keys that the sweep sets itself; a name that ends in a dot is a whole section."""
    threads_key: str
    overrides: Callable[[Path], list[str]]
    """Overrides that place the files of a run in its directory."""
    find_problem: Callable[[Any], str | None]
    """Returns why a valid config cannot be swept, and the remedy."""
    module: Callable[[Any], str]
    """The module that Python runs."""


def _train_overrides(directory: Path) -> list[str]:
    return [f"run.directory={toml_string(str(directory))}"]


def _train_problem(config: TrainConfig) -> str | None:
    if config.checkpoint.resume == "never":
        return 'checkpoint.resume = "never": a sweep resumes interrupted runs from their checkpoints; set it to "auto"'
    return None


def _train_module(config: TrainConfig) -> str:
    return "cli.train" if config.parallel.strategy == "single" else "cli.train_ddp"


def _infer_overrides(directory: Path) -> list[str]:
    answers, page = toml_string(str(directory / ANSWERS_FILE)), toml_string(str(directory / REPLAY_FILE))
    return [f"output.file={answers}", f"output.html={page}"]


def _infer_problem(config: InferConfig) -> str | None:
    inputs, path = config.input, config.model.path
    if path is None:
        return "no model given: add --set model.path=DIR, or path to [model] of the config"
    if inputs.prompts_file is not None and str(inputs.prompts_file) == "-":
        return 'input.prompts_file = "-": runs of a sweep have no standard input; name a file'
    if inputs.prompts_file is not None and not inputs.prompts_file.is_file():
        return f'input.prompts_file = "{inputs.prompts_file}": no such file'
    if not (inputs.prompts or inputs.chats or inputs.infills or inputs.prompts_file):
        return "[input] has no prompts, prompts_file, chats or infills: add some"
    try:
        resolve_model_directory(path, needs_weights=False)
    except ValueError as error:
        return f'model.path = "{path}": {error}'
    return None


ANSWERS_FILE = "answers.jsonl"
REPLAY_FILE = "replay.html"

SWEEP_COMMANDS = {
    "train": SweepCommand(
        name="train",
        config=TrainConfig,
        managed_keys=("run.directory",),
        threads_key="run.threads",
        overrides=_train_overrides,
        find_problem=_train_problem,
        module=_train_module,
    ),
    "infer": SweepCommand(
        name="infer",
        config=InferConfig,
        managed_keys=("output.",),
        threads_key="model.threads",
        overrides=_infer_overrides,
        find_problem=_infer_problem,
        module=lambda config: "cli.infer",
    ),
}
"""Value of ``--command`` -> command."""
