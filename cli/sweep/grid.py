"""The grid that ``--set key=a,b`` arguments span: its points, their configs and their names.

Raises GridError, a ValueError with all that is wrong, before anything is started.
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
    """A grid that cannot be run; the message is complete and may have several lines."""


@dataclass(frozen=True)
class Setting:
    """One ``--set``: a key, and what it is set to."""

    key: str
    values: tuple[str, ...]
    """As they were written; each is what follows ``=`` in an override of a config."""

    @property
    def is_axis(self) -> bool:
        """Whether it has several values."""
        return len(self.values) > 1


@dataclass(frozen=True)
class GridPoint:
    """A run of the grid."""

    name: str
    """Of its directory."""
    values: Mapping[str, str]
    """What it has of each axis, as it was written."""
    config: Section
    """All of it, with the place of its files."""

    @property
    def label(self) -> str:
        """For people."""
        return format_values(self.values)


def format_values(values: Mapping[str, str]) -> str:
    """``optimizer.learning_rate=1e-3, training.batch_size=16``."""
    return ", ".join(f"{key}={value}" for key, value in values.items())


def split_values(text: str) -> list[str]:
    """The values between the commas, those inside of quotes, brackets and braces left alone.

    Raises:
        GridError: a bracket or a quote is not closed, or a value is empty.
    """
    values: list[str] = []
    closers: list[str] = []
    start, quote, opens, skips = 0, "", True, False
    for place, letter in enumerate(text):
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
            values.append(text[start:place].strip())
            start = place + 1
        if not letter.isspace():
            opens = letter in ",[{=" and not quote  # a quote within a word is an apostrophe
    if quote or closers:
        raise GridError(f"{text}: {quote or closers[-1]} is missing at the end")
    values.append(text[start:].strip())
    if len(values) > 1 and "" in values:
        raise GridError(f'{text}: a value between the commas is empty (write "" for an empty text)')
    return values


def read_settings(texts: Sequence[str], sweep_command: SweepCommand) -> list[Setting]:
    """The ``--set`` arguments of a sweep.

    Raises:
        GridError: one cannot be read, a key comes twice, belongs to the sweep, or none has several values.
    """
    settings: dict[str, Setting] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        key = name.strip()
        if not equals or not key:
            raise GridError(f"--set {text}: expected section.key=value or section.key=value,value")
        if any(key == own or (own.endswith(".") and key.startswith(own)) for own in sweep_command.managed_keys):
            raise GridError(f"--set {text}: the sweep says where its runs are written; use --directory")
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
    """Every point's value of each axis; the last axis changes fastest."""
    axes = [setting for setting in settings if setting.is_axis]
    for values in itertools.product(*(axis.values for axis in axes)):
        yield dict(zip((axis.key for axis in axes), values, strict=True))


def build_overrides(settings: Sequence[Setting], values: Mapping[str, str]) -> list[str]:
    """As `load_config` takes them: what all points share, then what this one has."""
    shared = [f"{each.key}={each.values[0]}" for each in settings if not each.is_axis and each.key not in values]
    return [*shared, *(f"{key}={value}" for key, value in values.items())]


def load_point(sweep_command: SweepCommand, path: Path | None, overrides: Sequence[str], directory: Path) -> Section:
    """The config of a point whose files lie in ``directory``.

    Raises:
        ConfigError: it is not valid, or cannot be swept.
    """
    config = load_config(
        sweep_command.config, path, [*overrides, *sweep_command.overrides(directory)], key_hints=sweep_command.key_hints
    )
    problem = sweep_command.problem(config)
    if problem is not None:
        raise ConfigError(problem)
    return config


def load_points(
    sweep_command: SweepCommand,
    path: Path | None,
    settings: Sequence[Setting],
    directory: Path,
    known: Sequence[GridPoint] = (),
) -> list[GridPoint]:
    """All points, validated.

    Args:
        kind: what is swept.
        path: the config that all share; None: its defaults.
        settings: of `read_settings`.
        directory: in which each run has its own, of its name.
        known: runs that have a name already; a point with the same config is that run.

    Raises:
        GridError: names each point whose config is not valid and what is wrong with it, or two points that are equal.
    """
    wanted = list(iterate_grid(settings))
    names = name_points(wanted, {point.name: point.values for point in known})
    runs = {run_identity(sweep_command, point.config): point for point in known}
    points: dict[str, GridPoint] = {}
    problems: dict[str, list[str]] = {}
    for name, values in zip(names, wanted, strict=True):
        try:
            config = load_point(sweep_command, path, build_overrides(settings, values), directory / name)
        except ConfigError as error:
            lines = str(error).splitlines()
            problems.setdefault("\n  ".join(lines[1:] or lines), []).append(format_values(values))
            continue
        same = run_identity(sweep_command, config)
        if same in points:
            raise GridError(f"{points[same].label} and {format_values(values)} are the same run; remove one of them")
        points[same] = runs.get(same) or GridPoint(name, values, config)
    if problems:
        raise GridError(_format_problems(problems, len(wanted)))
    return list(points.values())


def run_identity(sweep_command: SweepCommand, config: Section) -> str:
    """What makes a run this one and no other: its config without the place of its files."""
    values: dict[str, Any] = config.model_dump(mode="json")
    for own in sweep_command.managed_keys:
        section, _, key = own.partition(".")
        if key:
            values[section].pop(key)
        else:
            values.pop(section)
    return json.dumps(values, sort_keys=True)


def _format_problems(problems: Mapping[str, list[str]], count: int) -> str:
    lines = []
    for problem, labels in problems.items():
        others = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        where = "every run" if len(labels) == count else f"{labels[0]}{others}"
        lines.append(f"{where}:\n  {problem}")
    bad = sum(map(len, problems.values()))
    return "\n".join([f"{bad} of {count} runs have no valid config; nothing was started", *lines])


def name_points(wanted: Sequence[Mapping[str, str]], known: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A name for each: the changed keys by their last parts and their values, in letters that every file system takes.

    Args:
        wanted: values by key.
        known: values of runs that keep their names.
    """
    keys = [*wanted[0]] if wanted else []
    short = short_keys(keys)
    names: list[str] = []
    taken = {name.lower() for name in known}
    for values in wanted:
        name = next((name for name, others in known.items() if dict(others) == dict(values)), None)
        if name is None:
            name = _unique_name(values, short, taken)
            taken.add(name.lower())
        names.append(name)
    return names


def short_keys(keys: Collection[str]) -> dict[str, str]:
    """As few of the last parts of each dotted key as tell it from the others."""
    short = {}
    for key in keys:
        parts = key.split(".")
        candidates = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        ends = [tuple(other.split(".")) for other in keys if other != key]
        short[key] = next(
            (
                each
                for each in candidates
                if not any(end[-len(each.split(".")) :] == tuple(each.split(".")) for end in ends)
            ),
            key,
        )
    return short


def _unique_name(values: Mapping[str, str], short: Mapping[str, str], taken: Collection[str]) -> str:
    whole = "_".join(f"{_sanitize(short[key])}-{_sanitize(_unquote(value))}" for key, value in values.items())
    parts = [f"{_sanitize(short[key])}-{_sanitize(_unquote(value))[:_VALUE_LENGTH]}" for key, value in values.items()]
    name = "_".join(parts)
    if name != whole or len(name) > _NAME_LENGTH or name.lower() in taken:
        mark = hashlib.sha256(format_values(values).encode()).hexdigest()[:6]
        name = f"{name[:_NAME_LENGTH]}-{mark}"
    return name


def _sanitize(text: str) -> str:
    sign = "-" if re.match(r"-[\d.]", text) else ""
    return sign + (_UNSAFE.sub("-", text).strip("-.") or "empty")


def _unquote(text: str) -> str:
    """A string of TOML without its quotes."""
    try:
        value = tomllib.loads(f"v={text}").get("v")
    except ValueError:
        return text
    return value if isinstance(value, str) else text
