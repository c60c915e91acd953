"""The ``--set key=a,b`` arguments of a sweep: lists and ranges of values, their points and the configs of these.

All errors are raised as GridError before a run starts.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.sweep.commands import SweepCommand
from config.base import Section
from config.load import ConfigError, load_config

_NAME_LENGTH = 96
_UNSAFE = re.compile(r"[^A-Za-z0-9_.+-]+")
_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
_RANGE = re.compile(rf"(log:)?{_NUMBER}\.\.{_NUMBER}(?::{_NUMBER})?")
_RANGE_FORMS = "expected LOW..HIGH, LOW..HIGH:STEP or log:LOW..HIGH"


class GridError(ValueError):
    """The sweep cannot be run; the message may have several lines."""


@dataclass(frozen=True)
class ValueRange:
    """The numbers from ``low`` to ``high``; integers if its ends and its step are written without a point."""

    low: float
    high: float
    step: float | None
    is_log: bool
    is_integer: bool


@dataclass(frozen=True)
class Setting:
    """The key and values of one ``--set`` argument."""

    key: str
    values: tuple[str, ...]
    """Values as written, each the right side of an override of a config; of a range its two ends."""
    range: ValueRange | None = None

    @property
    def is_axis(self) -> bool:
        return len(self.values) > 1


@dataclass(frozen=True)
class GridPoint:
    """A valid combination of values."""

    values: Mapping[str, str]
    """Its value of each axis, as written."""
    config: Section
    digest: str
    """Equal for equal runs: the hash of the config without the paths of its files."""


def format_values(values: Mapping[str, str]) -> str:
    """Format values as ``optimizer.learning_rate=1e-3, training.batch_size=16``."""
    return ", ".join(f"{key}={value}" for key, value in values.items())


def split_values(text: str) -> list[str]:
    """Split at commas, except those inside quotes, brackets and braces.

    Raises:
        GridError: a bracket or a quote is not closed, or a value is empty.
    """
    values: list[str] = []
    closers: list[str] = []
    start, quote, opens, skips = 0, "", True, False
    for position, letter in enumerate(text):
        if quote:
            if letter == quote and not skips:
                quote = ""
            skips = letter == "\\" and quote == '"' and not skips
        elif letter in "\"'" and opens:
            quote = letter
        elif letter in "[{":
            closers.append("]" if letter == "[" else "}")
        elif closers and letter == closers[-1]:
            closers.pop()
        elif letter == "," and not closers:
            values.append(text[start:position].strip())
            start = position + 1
        if not letter.isspace():
            opens = letter in ",[{=" and not quote  # a quote within a word is an apostrophe
    if quote or closers:
        raise GridError(f"{text}: {quote or closers[-1]} is missing at the end")
    values.append(text[start:].strip())
    if len(values) > 1 and "" in values:
        raise GridError(f'{text}: a value between the commas is empty; write "" for an empty string')
    return values


def parse_range(text: str) -> ValueRange | None:
    """Parse ``LOW..HIGH``, ``LOW..HIGH:STEP`` or ``log:LOW..HIGH``; None: other text, which is a value.

    Raises:
        GridError: the ends or the step are not those of a range.
    """
    parts = _RANGE.fullmatch(text.strip())
    if parts is None:
        if text.startswith("log:") and ".." in text:
            raise GridError(f"{text}: {_RANGE_FORMS}, in numbers")
        return None
    is_log, numbers = parts[1] is not None, [number for number in parts.groups()[1:] if number is not None]
    low, high, *steps = map(float, numbers)
    step = steps[0] if steps else None
    if low >= high:
        raise GridError(f"{text}: the lower end comes first: {_RANGE_FORMS}")
    if is_log and (low <= 0 or step is not None):
        raise GridError(f"{text}: a logarithmic range begins above 0 and has no step")
    if step is not None and not 0 < step <= high - low:
        raise GridError(f"{text}: the step must be greater than 0 and at most {high - low:g}")
    if step is not None:
        high = low + step * math.floor((high - low) / step + 1e-9)
    return ValueRange(low, high, step, is_log, all(re.fullmatch(r"[-+]?\d+", number) for number in numbers))


def read_settings(texts: Sequence[str], sweep_command: SweepCommand) -> list[Setting]:
    """Parse the ``--set`` arguments of a sweep.

    Raises:
        GridError: an argument is malformed, a key is set twice or managed by the sweep, or no key has several values.
    """
    settings: dict[str, Setting] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        key = name.strip()
        if not equals or not key:
            raise GridError(f"--set {text}: expected section.key=value or section.key=value,value")
        if any(key == name or (name.endswith(".") and key.startswith(name)) for name in sweep_command.managed_keys):
            raise GridError(f"--set {text}: the sweep sets the paths of its runs; use --directory")
        if key in settings:
            raise GridError(f"--set {text}: {key} is set twice; write its values with commas: {key}=a,b")
        try:
            values = split_values(value)
            value_range = parse_range(value)
        except GridError as error:
            raise GridError(f"--set {key}={error}") from None
        if value_range is not None:
            values = [format_number(value_range, end) for end in (value_range.low, value_range.high)]
        settings[key] = Setting(key, tuple(values), value_range)
    if not any(setting.is_axis for setting in settings.values()):
        raise GridError("nothing to sweep: give a key several values, as in --set optimizer.learning_rate=1e-3,3e-3")
    return list(settings.values())


def format_number(value_range: ValueRange, value: float) -> str:
    """Format a number of a range; one without a step with four digits, but within the range."""
    if value_range.is_integer:
        return str(int(value))
    if value_range.step is None and value not in (value_range.low, value_range.high):
        value = min(max(float(f"{value:.4g}"), value_range.low), value_range.high)
    return repr(float(f"{value:.12g}"))


def iterate_grid(settings: Sequence[Setting]) -> Iterator[dict[str, str]]:
    """Yield the values of each point by axis, of ranges the ends; the last axis changes fastest."""
    axes = [setting for setting in settings if setting.is_axis]
    for values in itertools.product(*(axis.values for axis in axes)):
        yield dict(zip((axis.key for axis in axes), values, strict=True))


@dataclass(frozen=True)
class PointLoader:
    """Loads the config of a point: the config file that all share, the shared settings, then its own values."""

    sweep_command: SweepCommand
    path: Path | None
    """The config file; None: the defaults."""
    settings: Sequence[Setting]

    def __call__(self, values: Mapping[str, str], directory: Path = Path("run")) -> GridPoint:
        """Load and validate the point of these values, whose files are in ``directory``.

        Raises:
            ConfigError: the config is invalid, or cannot be swept.
        """
        fixed = [f"{setting.key}={setting.values[0]}" for setting in self.settings if not setting.is_axis]
        own = [f"{key}={value}" for key, value in values.items()]
        paths = self.sweep_command.overrides(directory)
        config = load_config(self.sweep_command.config, self.path, [*fixed, *own, *paths])
        problem = self.sweep_command.find_problem(config)
        if problem is not None:
            raise ConfigError(problem)
        return GridPoint(values, config, self._digest(config))

    def load_all(self) -> list[GridPoint]:
        """Load and validate all points of the grid, of ranges their ends.

        Raises:
            GridError: configs are invalid (names each point and its problem), or two points are equal.
        """
        grid = list(iterate_grid(self.settings))
        points: dict[str, GridPoint] = {}
        problems: dict[str, list[str]] = {}
        for values in grid:
            try:
                point = self(values)
            except ConfigError as error:
                lines = str(error).splitlines()
                problems.setdefault("\n  ".join(lines[1:] or lines), []).append(format_values(values))
                continue
            equal = points.setdefault(point.digest, point)
            if equal is not point:
                labels = f"{format_values(equal.values)} and {format_values(values)}"
                raise GridError(f"{labels} are the same run; remove one of them")
        if problems:
            raise GridError(_format_problems(problems, len(grid)))
        return list(points.values())

    def _digest(self, config: Section) -> str:
        values = {name: _non_default_values(getattr(config, name)) for name in _non_default_names(config)}
        for name in self.sweep_command.managed_keys:
            section, _, key = name.partition(".")
            if key:
                values.get(section, {}).pop(key, None)
            else:
                values.pop(section, None)
        return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def _non_default_values(value: Any) -> Any:
    """Return the values of a config that are not defaults, so that a new key with a default changes no digest.

    Sections name their class: a key such as ``kind`` selects it, also by its default.
    """
    if isinstance(value, (tuple, list)):
        return [*map(_non_default_values, value)]
    if not isinstance(value, Section):
        return value
    values = {name: _non_default_values(getattr(value, name)) for name in _non_default_names(value)}
    return {"": type(value).__name__, **values}


def _non_default_names(section: Section) -> list[str]:
    fields = type(section).model_fields.items()
    return [name for name, field in fields if getattr(section, name) != field.get_default(call_default_factory=True)]


def _format_problems(problems: Mapping[str, list[str]], count: int) -> str:
    lines = []
    for problem, labels in problems.items():
        suffix = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        where = "every run" if len(labels) == count else f"{labels[0]}{suffix}"
        lines.append(f"{where}:\n  {problem}")
    invalid = sum(map(len, problems.values()))
    return "\n".join([f"{invalid} of {count} runs have an invalid config; nothing was started", *lines])


def name_run(values: Mapping[str, str], existing: Collection[str]) -> str:
    """Build a name of shortened keys and their values, with characters that every file system supports."""
    short = short_keys(values)
    full_name = "_".join(f"{_sanitize(short[key])}-{_sanitize(value)}" for key, value in values.items())
    if len(full_name) <= _NAME_LENGTH and full_name.lower() not in {name.lower() for name in existing}:
        return full_name
    return f"{full_name[:_NAME_LENGTH]}-{hashlib.sha256(format_values(values).encode()).hexdigest()[:6]}"


def short_keys(keys: Collection[str]) -> dict[str, str]:
    """Shorten dotted keys to the fewest last parts that are unambiguous."""
    short = {}
    for key in keys:
        parts = key.split(".")
        ends = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        others = [f".{other}" for other in keys if other != key]
        short[key] = next((end for end in ends if not any(other.endswith(f".{end}") for other in others)), key)
    return short


def _sanitize(text: str) -> str:
    sign = "-" if re.match(r"-[\d.]", text) else ""
    return sign + (_UNSAFE.sub("-", text).strip("-.") or "empty")


def parse_numbers(texts: Sequence[str]) -> list[float] | None:
    """Return values as numbers; None: one is something else."""
    try:
        return [float(text) for text in texts]
    except ValueError:
        return None


def is_logarithmic(numbers: Sequence[float]) -> bool:
    """Return whether numbers are better spread on a logarithmic scale: they are positive, and differ by a decade."""
    return min(numbers) > 0 and max(numbers) >= 10 * min(numbers)
