"""What a sweep runs: its axes, its directory, and the config and the name of each of its runs.

Below are the arguments ``--set key=a,b``: lists and ranges of values.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from cli.arguments import toml_string
from config.dump import to_toml
from config.load import ConfigError, load_config
from config.train import TrainConfig
from files.usage_error import UsageError

Sampler = Literal["grid", "random", "tpe"]

STUDY_FILE = "study.db"
DIRECTORY_KEY = "run.directory"
_COMPARED_BY_BYTES = ("tokenizer.", "model.init_from")
_ANY_DIRECTORY = Path("run")
_NAME_LENGTH = 96
_UNSAFE = re.compile(r"[^a-z0-9_.+-]+", re.IGNORECASE)
_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
_RANGE = re.compile(rf"(log:)?{_NUMBER}\.\.{_NUMBER}(?::{_NUMBER})?")
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"|\'[^\']*\'')


@dataclass(frozen=True)
class Sweep:
    """The command line of a sweep.

    Its directory has ``configs/``, ``runs/`` and ``logs/`` with a file or a directory for each run, the study and the
    results.
    """

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
    def axes(self) -> list[Setting]:
        return [setting for setting in self.settings if setting.is_axis]

    @property
    def objective(self) -> str:
        """The measurement that ranks runs: the bound, or bits per byte if axes change the tokenizer."""
        return "bits_per_byte" if any(axis.key.startswith(_COMPARED_BY_BYTES) for axis in self.axes) else "bound"

    def run_path(self, name: str) -> Path:
        return self.directory / "runs" / name

    def log_path(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"

    def toml_path(self, name: str) -> Path:
        return self.directory / "configs" / f"{name}.toml"

    def load_config(self, values: Mapping[str, str], directory: Path = _ANY_DIRECTORY) -> TrainConfig:
        """Load the config of a run: the config file, the shared settings, its values and its directory.

        Raises:
            ConfigError: the config is invalid, or such a run cannot be resumed or pruned.
        """
        shared = [f"{setting.key}={setting.values[0]}" for setting in self.settings if not setting.is_axis]
        own = [f"{key}={value}" for key, value in values.items()]
        place = f"{DIRECTORY_KEY}={toml_string(str(directory))}"
        config = load_config(TrainConfig, self.config_path, [*shared, *own, place])
        if config.checkpoint.resume == "never":
            raise ConfigError(
                'checkpoint.resume = "never": a sweep resumes interrupted runs from their checkpoints; set it to "auto"'
            )
        every_steps = config.validation.every_steps
        if self.prune and not 0 < every_steps < (config.training.max_steps or 2**63):
            raise ConfigError(f"validation.every_steps = {every_steps}: --prune needs validations during the run")
        return config

    def load_points(self) -> dict[str, dict[str, str]]:
        """Load and validate all combinations of the axes' values, of ranges their ends; the last axis changes fastest.

        Returns:
            The values of each run, as written, by its name.

        Raises:
            UsageError: configs are invalid; names each problem and the first run that has it.
        """
        keys = [axis.key for axis in self.axes]
        grid = [dict(zip(keys, values, strict=True)) for values in itertools.product(*(a.values for a in self.axes))]
        problems: dict[str, list[str]] = {}
        runs: dict[str, dict[str, str]] = {}
        for values in grid:
            try:
                same = runs.setdefault(to_toml(self.load_config(values)), values)
                if same is not values:
                    raise ConfigError(f"\n{format_values(same)} is the same run; remove one of them")
            except ConfigError as error:
                lines = str(error).splitlines()
                problems.setdefault("\n  ".join(lines[1:] or lines), []).append(format_values(values))
        if problems:
            listed = [f"{labels[0]}, {len(labels)} in all:\n  {problem}" for problem, labels in problems.items()]
            count = sum(map(len, problems.values()))
            first = f"{count} of {len(grid)} runs have an invalid config; nothing was started"
            raise UsageError("\n".join([first, *listed]))
        return {name_run(values): values for values in grid}


@dataclass(frozen=True)
class Setting:
    """The key and values of one ``--set`` argument."""

    key: str
    values: tuple[str, ...]
    """Values as written, each the right side of an override of a config; of a range its two ends."""
    distribution: FloatDistribution | IntDistribution | CategoricalDistribution

    @property
    def is_axis(self) -> bool:
        return len(self.values) > 1

    def format(self, value: Any) -> str:
        """Format a value of the distribution; a number without a step with four digits, but within the range."""
        numbers = self.distribution
        if not isinstance(numbers, FloatDistribution):
            return str(value)
        if numbers.step is None:
            value = min(max(float(f"{value:.4g}"), numbers.low), numbers.high)
        return repr(float(f"{value:.12g}"))


def format_values(values: Mapping[str, str]) -> str:
    """Format values as ``optimizer.learning_rate=1e-3, training.batch_size=16``."""
    return ", ".join(f"{key}={value}" for key, value in values.items())


def read_settings(texts: Sequence[str]) -> list[Setting]:
    """Parse the ``--set`` arguments of a sweep.

    Raises:
        UsageError: an argument is malformed, a key is set twice or managed by the sweep, or no key has several values.
    """
    settings: dict[str, Setting] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        key = name.strip()
        if not equals or not key:
            raise UsageError(f"--set {text}: expected section.key=value or section.key=value,value")
        if key == DIRECTORY_KEY:
            raise UsageError(f"--set {text}: the sweep names the directories of its runs; use --directory")
        if key in settings:
            raise UsageError(f"--set {text}: {key} is set twice; write its values with commas: {key}=a,b")
        try:
            numbers = parse_range(value)
            values = tuple(split_values(value)) if numbers is None else (repr(numbers.low), repr(numbers.high))
        except ValueError as error:
            raise UsageError(f"--set {key}={error}") from None
        settings[key] = Setting(key, values, numbers or CategoricalDistribution(values))
    if not any(setting.is_axis for setting in settings.values()):
        raise UsageError("nothing to sweep: give a key several values, as in --set optimizer.learning_rate=1e-3,3e-3")
    return list(settings.values())


def split_values(text: str) -> list[str]:
    """Split at commas, except those inside quotes, brackets and braces.

    Raises:
        UsageError: a bracket or a quote is not closed, or a value is empty.
    """
    values: list[str] = []
    open_parts: list[str] = []
    for part in text.split(","):
        open_parts.append(part)
        value = ",".join(open_parts).strip()
        if _is_complete(value):
            values.append(value)
            open_parts = []
    if open_parts:
        raise UsageError(f"{text}: a quote or a bracket is not closed")
    if len(values) > 1 and "" in values:
        raise UsageError(f'{text}: a value between the commas is empty; write "" for an empty string')
    return values


def _is_complete(value: str) -> bool:
    """Return whether all quotes and brackets are closed; in a bare word they are ordinary letters."""
    if not value.startswith(('"', "'", "[", "{")):
        return True
    rest = _QUOTED.sub("", value)
    is_balanced = rest.count("[") == rest.count("]") and rest.count("{") == rest.count("}")
    return is_balanced and '"' not in rest and "'" not in rest


def parse_range(text: str) -> FloatDistribution | IntDistribution | None:
    """Parse ``LOW..HIGH``, ``LOW..HIGH:STEP`` or ``log:LOW..HIGH``; None: other text, which is a value.

    Raises:
        ValueError: the ends or the step are not those of a range.
    """
    parts = _RANGE.fullmatch(text.strip())
    if parts is None:
        return None
    is_log, numbers = parts[1] is not None, [number for number in parts.groups()[1:] if number is not None]
    is_integer = all(re.fullmatch(r"[-+]?\d+", number) for number in numbers)
    low, high, *steps = map(int if is_integer else float, numbers)
    try:
        if is_integer:
            return IntDistribution(int(low), int(high), log=is_log, step=int(steps[0]) if steps else 1)
        return FloatDistribution(low, high, log=is_log, step=steps[0] if steps else None)
    except ValueError as error:
        raise UsageError(f"{text}: {error}") from None


def name_run(values: Mapping[str, str]) -> str:
    """Build a name of shortened keys and their values, with characters that every file system supports."""
    short = short_keys(values)
    parts = [f"{short[key]}-{value}" for key, value in values.items()]
    name = "_".join(_UNSAFE.sub("-", part).rstrip("-.") for part in parts)
    if name == "_".join(parts) and name == name.lower() and len(name) <= _NAME_LENGTH:
        return name
    return f"{name[:_NAME_LENGTH]}-{hashlib.sha256(format_values(values).encode()).hexdigest()[:6]}"


def short_keys(keys: Collection[str]) -> dict[str, str]:
    """Shorten dotted keys to the fewest last parts that are unambiguous."""
    short = {}
    for key in keys:
        parts = key.split(".")
        ends = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        others = [f".{other}" for other in keys if other != key]
        short[key] = next((end for end in ends if not any(other.endswith(f".{end}") for other in others)), key)
    return short
