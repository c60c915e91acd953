"""The grid of ``--set key=a,b`` arguments: its points, their configs and their names.

All errors are raised as GridError before a run starts.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.sweep.commands import SweepCommand
from config.base import Section
from config.load import ConfigError, load_config

_VALUE_LENGTH = 24
_NAME_LENGTH = 96
_UNSAFE = re.compile(r"[^A-Za-z0-9_.+-]+")


class GridError(ValueError):
    """The grid cannot be run; the message may have several lines."""


@dataclass(frozen=True)
class Setting:
    """The key and values of one ``--set`` argument."""

    key: str
    values: tuple[str, ...]
    """Values as written; each is the right side of an override of a config."""

    @property
    def is_axis(self) -> bool:
        return len(self.values) > 1


@dataclass(frozen=True)
class GridPoint:
    """A run of the grid."""

    name: str
    """Name of its directory."""
    values: Mapping[str, str]
    """Its value of each axis, as written."""
    config: Section
    """The whole config, with the paths of its files."""

    @property
    def label(self) -> str:
        return format_values(self.values)


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
        except GridError as error:
            raise GridError(f"--set {key}={error}") from None
        settings[key] = Setting(key, tuple(values))
    if not any(setting.is_axis for setting in settings.values()):
        raise GridError("nothing to sweep: give a key several values, as in --set optimizer.learning_rate=1e-3,3e-3")
    return list(settings.values())


def iterate_grid(settings: Sequence[Setting]) -> Iterator[dict[str, str]]:
    """Yield the values of each point by axis; the last axis changes fastest."""
    axes = [setting for setting in settings if setting.is_axis]
    for values in itertools.product(*(axis.values for axis in axes)):
        yield dict(zip((axis.key for axis in axes), values, strict=True))


def build_overrides(settings: Sequence[Setting], values: Mapping[str, str]) -> list[str]:
    """Build the overrides of a point for `load_config`: the shared settings, then its own values."""
    shared = [
        f"{setting.key}={setting.values[0]}"
        for setting in settings
        if not setting.is_axis and setting.key not in values
    ]
    return [*shared, *(f"{key}={value}" for key, value in values.items())]


def load_point(sweep_command: SweepCommand, path: Path | None, overrides: Sequence[str], directory: Path) -> Section:
    """Load the config of a point whose files are in ``directory``.

    Raises:
        ConfigError: it is invalid, or cannot be swept.
    """
    config = load_config(
        sweep_command.config, path, [*overrides, *sweep_command.overrides(directory)], key_hints=sweep_command.key_hints
    )
    problem = sweep_command.find_problem(config)
    if problem is not None:
        raise ConfigError(problem)
    return config


def load_points(
    sweep_command: SweepCommand,
    path: Path | None,
    settings: Sequence[Setting],
    directory: Path,
    existing: Sequence[GridPoint] = (),
) -> list[GridPoint]:
    """Load and validate all points.

    Args:
        sweep_command: the command that runs.
        path: the config that all points share; None: the defaults.
        settings: the result of `read_settings`.
        directory: parent of the directories of the runs.
        existing: runs of the record, which keep their names; a point with the same config is that run.

    Raises:
        GridError: configs are invalid (names each point and its problem), or two points are equal.
    """
    grid = list(iterate_grid(settings))
    names = name_points(grid, {point.name: point.values for point in existing})
    runs = {run_identity(sweep_command, point.config): point for point in existing}
    points: dict[str, GridPoint] = {}
    problems: dict[str, list[str]] = {}
    for name, values in zip(names, grid, strict=True):
        try:
            config = load_point(sweep_command, path, build_overrides(settings, values), directory / name)
        except ConfigError as error:
            lines = str(error).splitlines()
            problems.setdefault("\n  ".join(lines[1:] or lines), []).append(format_values(values))
            continue
        identity = run_identity(sweep_command, config)
        if identity in points:
            raise GridError(
                f"{points[identity].label} and {format_values(values)} are the same run; remove one of them"
            )
        points[identity] = runs.get(identity) or GridPoint(name, values, config)
    if problems:
        raise GridError(_format_problems(problems, len(grid)))
    return list(points.values())


def run_identity(sweep_command: SweepCommand, config: Section) -> str:
    """Return a string that is equal for equal runs: the config without the paths of its files."""
    values: dict[str, Any] = config.model_dump(mode="json")
    for name in sweep_command.managed_keys:
        section, _, key = name.partition(".")
        if key:
            values[section].pop(key)
        else:
            values.pop(section)
    return json.dumps(values, sort_keys=True)


def _format_problems(problems: Mapping[str, list[str]], count: int) -> str:
    lines = []
    for problem, labels in problems.items():
        suffix = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        where = "every run" if len(labels) == count else f"{labels[0]}{suffix}"
        lines.append(f"{where}:\n  {problem}")
    invalid = sum(map(len, problems.values()))
    return "\n".join([f"{invalid} of {count} runs have an invalid config; nothing was started", *lines])


def name_points(grid: Sequence[Mapping[str, str]], existing: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Build names of shortened keys and their values, with characters that every file system supports.

    Args:
        grid: values of each point by key.
        existing: values of runs that keep their names.
    """
    keys = [*grid[0]] if grid else []
    short = short_keys(keys)
    names: list[str] = []
    used_names = {name.lower() for name in existing}
    for values in grid:
        name = next((name for name, run_values in existing.items() if dict(run_values) == dict(values)), None)
        if name is None:
            name = _unique_name(values, short, used_names)
            used_names.add(name.lower())
        names.append(name)
    return names


def short_keys(keys: Collection[str]) -> dict[str, str]:
    """Shorten dotted keys to the fewest last parts that are unambiguous."""
    short = {}
    for key in keys:
        parts = key.split(".")
        candidates = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        ends = [tuple(other_key.split(".")) for other_key in keys if other_key != key]
        short[key] = next(
            (
                candidate
                for candidate in candidates
                if not any(end[-len(candidate.split(".")) :] == tuple(candidate.split(".")) for end in ends)
            ),
            key,
        )
    return short


def _unique_name(values: Mapping[str, str], short: Mapping[str, str], used_names: Collection[str]) -> str:
    full_name = "_".join(f"{_sanitize(short[key])}-{_sanitize(_unquote(value))}" for key, value in values.items())
    parts = [f"{_sanitize(short[key])}-{_sanitize(_unquote(value))[:_VALUE_LENGTH]}" for key, value in values.items()]
    name = "_".join(parts)
    if name != full_name or len(name) > _NAME_LENGTH or name.lower() in used_names:
        suffix = hashlib.sha256(format_values(values).encode()).hexdigest()[:6]
        name = f"{name[:_NAME_LENGTH]}-{suffix}"
    return name


def _sanitize(text: str) -> str:
    sign = "-" if re.match(r"-[\d.]", text) else ""
    return sign + (_UNSAFE.sub("-", text).strip("-.") or "empty")


def _unquote(text: str) -> str:
    """Return the value of a TOML string; other text is returned as it is."""
    try:
        value = tomllib.loads(f"v={text}").get("v")
    except ValueError:
        return text
    return value if isinstance(value, str) else text
