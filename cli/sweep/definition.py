"""What a sweep runs: its command, its config and axes, its directory, and the config of each of its runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cli.arguments import toml_string
from cli.sweep.values import Setting, SweepError, format_values
from config.base import Section
from config.dump import to_toml
from config.infer import InferConfig
from config.load import ConfigError, load_config
from config.train import TrainConfig

Sampler = Literal["grid", "random", "tpe"]

ANSWERS_FILE, REPLAY_FILE, STUDY_FILE = "answers.jsonl", "replay.html", "study.db"
_COMPARED_BY_BYTES = ("tokenizer.", "model.init_from")
_ANY_DIRECTORY = Path("run")


@dataclass(frozen=True)
class SweepCommand:
    """A command that a sweep can run."""

    config: type[Section]
    outputs: Mapping[str, str]
    """Key of a path in the config -> name in the directory of a run; "" is that directory."""
    managed_keys: tuple[str, ...]
    """Keys that the sweep sets itself; a name that ends in a dot is a whole section."""
    threads_key: str


SWEEP_COMMANDS = {
    "train": SweepCommand(TrainConfig, {"run.directory": ""}, ("run.directory",), "run.threads"),
    "infer": SweepCommand(
        InferConfig,
        {"output.file": ANSWERS_FILE, "output.html": REPLAY_FILE},
        ("output.",),
        "model.threads",
    ),
}
"""Value of ``--command`` -> command."""


@dataclass(frozen=True)
class Sweep:
    """The command line of a sweep.

    Its directory has ``configs/``, ``runs/`` and ``logs/`` with a file or a directory for each run, the study and the
    results.
    """

    command_name: str
    config_path: Path | None
    """The config file that all runs share; None: the defaults."""
    settings: Sequence[Setting]
    directory: Path
    sampler: Sampler = "grid"
    num_trials: int | None = None
    """Runs in total, of `random` and `tpe`."""
    prune: bool = False
    jobs: int = 1
    storage: str = ""
    """URL of the study; "": `STUDY_FILE` in the directory."""

    @property
    def command(self) -> SweepCommand:
        return SWEEP_COMMANDS[self.command_name]

    @property
    def axes(self) -> list[Setting]:
        return [setting for setting in self.settings if setting.is_axis]

    @property
    def objective(self) -> str:
        """The measurement that ranks training runs: the bound, or bits per byte if axes change the tokenizer."""
        return "bits_per_byte" if any(axis.key.startswith(_COMPARED_BY_BYTES) for axis in self.axes) else "bound"

    def run_path(self, name: str) -> Path:
        return self.directory / "runs" / name

    def log_path(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"

    def toml_path(self, name: str) -> Path:
        return self.directory / "configs" / f"{name}.toml"

    def load_config(self, values: Mapping[str, str], directory: Path = _ANY_DIRECTORY) -> Any:
        """Load the config of a run: the config file, the shared settings, its values, and the paths of its files.

        Raises:
            ConfigError: the config is invalid, or cannot be resumed.
        """
        shared = [f"{setting.key}={setting.values[0]}" for setting in self.settings if not setting.is_axis]
        own = [f"{key}={value}" for key, value in values.items()]
        paths = [f"{key}={toml_string(str(directory / name))}" for key, name in self.command.outputs.items()]
        overrides = [*shared, *own, *paths]
        config = load_config(self.command.config, self.config_path, overrides)
        if isinstance(config, TrainConfig) and config.checkpoint.resume == "never":
            raise ConfigError(
                'checkpoint.resume = "never": a sweep resumes interrupted runs from their checkpoints; set it to "auto"'
            )
        return config

    def format_config(self, values: Mapping[str, str]) -> str:
        """Return the config of these values as TOML, the same for the same run: its paths are placeholders."""
        return to_toml(self.load_config(values))

    def load_points(self) -> dict[str, dict[str, str]]:
        """Load and validate all combinations of the axes' values, of ranges their ends; the last axis changes fastest.

        Returns:
            The values of each run, as written, by its `format_config`.

        Raises:
            SweepError: configs are invalid (names each and its problem), or two are the same.
        """
        keys = [axis.key for axis in self.axes]
        grid = [dict(zip(keys, values, strict=True)) for values in itertools.product(*(a.values for a in self.axes))]
        points: dict[str, dict[str, str]] = {}
        problems: dict[str, list[str]] = {}
        for values in grid:
            try:
                text = self.format_config(values)
            except ConfigError as error:
                lines = str(error).splitlines()
                problems.setdefault("\n  ".join(lines[1:] or lines), []).append(format_values(values))
                continue
            if text in points:
                labels = f"{format_values(points[text])} and {format_values(values)}"
                raise SweepError(f"{labels} are the same run; remove one of them")
            points[text] = values
        if problems:
            raise SweepError(_format_problems(problems, len(grid)))
        return points

    def check(self, points: Iterable[Mapping[str, str]]) -> None:
        """Check what the arguments require of each other and of the configs of these values.

        Raises:
            SweepError: the message names the argument or the key, and the remedy.
        """
        for argument, number in (("jobs", self.jobs), ("trials", self.num_trials)):
            if number is not None and number < 1:
                raise SweepError(f"--{argument} {number} must be at least 1")
        if self.sampler == "grid":
            for axis in self.axes:
                if axis.range is not None:
                    raise SweepError(f"--set {axis.key}: a grid has no ranges; list values, or use --sampler tpe")
            if self.num_trials is not None:
                raise SweepError("--trials: a grid runs all its points; use --sampler random or tpe")
        elif self.command_name != "train":
            raise SweepError(f"--sampler {self.sampler} needs validation bounds: inference is swept by grids of values")
        elif self.num_trials is None:
            raise SweepError(f"--trials is missing: how many runs --sampler {self.sampler} makes, as in --trials 20")
        if self.prune and self.command_name != "train":
            raise SweepError("--prune needs validations during the run: use --command train")
        for config in map(self.load_config, points if self.prune else ()):
            every_steps = config.validation.every_steps
            if not 0 < every_steps < (config.training.max_steps or 2**63):
                raise SweepError(f"validation.every_steps = {every_steps}: --prune needs validations during the run")


def _format_problems(problems: Mapping[str, list[str]], count: int) -> str:
    lines = []
    for problem, labels in problems.items():
        suffix = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        where = "every run" if len(labels) == count else f"{labels[0]}{suffix}"
        lines.append(f"{where}:\n  {problem}")
    invalid = sum(map(len, problems.values()))
    return "\n".join([f"{invalid} of {count} runs have an invalid config; nothing was started", *lines])
