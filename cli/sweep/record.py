"""What a sweep's directory holds: which runs there are, and what became of each.

``sweep.json`` is the record, ``configs/``, ``runs/`` and ``logs/`` have a file or a directory of each run, and
``sweep.md``, ``sweep.jsonl`` and ``sweep.html`` are the results.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from cli.sweep.commands import SweepCommand
from cli.sweep.grid import GridError, GridPoint, Setting, build_overrides, format_values, load_point
from config.dump import list_differences, to_toml
from config.load import ConfigError, load_config
from files.atomic import write_text_atomic
from files.lock import LOCK_FILE, DirectoryInUseError, lock_directory

Status = Literal["waiting", "running", "done", "failed", "interrupted"]


@dataclass
class SweepRun:
    """A run, and what became of it."""

    name: str
    values: dict[str, str]
    """What it has of each axis, as it was written."""
    status: Status = "waiting"
    seconds: float = 0.0
    """Of wall-clock time, over all parts of the run."""
    exit_code: int | None = None
    """Of its last part; negative: the number of the signal that ended it."""
    error: list[str] = field(default_factory=list)
    """The last lines that a failed run wrote."""
    jobs: int = 1
    """Runs that went on beside each other, itself included, in its last part."""


@dataclass
class SweepDirectory:
    """The place of a sweep."""

    path: Path
    sweep_command: SweepCommand
    runs: dict[str, SweepRun] = field(default_factory=dict)
    """By name, in the order of their making."""

    @property
    def runs_path(self) -> Path:
        """Where each run has its directory."""
        return self.path / "runs"

    def run_path(self, name: str) -> Path:
        """A run's files."""
        return self.runs_path / name

    def log_path(self, name: str) -> Path:
        """What a run wrote to its terminal."""
        return self.path / "logs" / f"{name}.log"

    def config_path(self, name: str) -> Path:
        """The whole config of a run."""
        return self.path / "configs" / f"{name}.toml"

    def reload_points(self, config: Path | None, settings: Sequence[Setting]) -> list[GridPoint]:
        """The runs of the record, as this command would make them.

        Raises:
            GridError: it would make another run of one of them; the differences are listed.
        """
        points = []
        for run in self.runs.values():
            before = self._read_config(run.name)
            try:
                now = load_point(
                    self.sweep_command, config, build_overrides(settings, run.values), self.run_path(run.name)
                )
            except ConfigError as error:
                raise self._other_config_error(run, str(error).splitlines()[-1:]) from None
            changed = [
                line for line in list_differences(before, now) if not line.startswith(self.sweep_command.managed_keys)
            ]
            if changed:
                raise self._other_config_error(run, changed)
            points.append(GridPoint(run.name, run.values, now))
        return points

    def _other_config_error(self, run: SweepRun, lines: Sequence[str]) -> GridError:
        listed = "\n  ".join(lines)
        return GridError(
            f"{self.path} holds a sweep of another config; its run {format_values(run.values)} would be another one:\n  "
            f"{listed}\nname another --directory; only values of --set may be added to a sweep"
        )

    def _read_config(self, name: str) -> Any:
        path = self.config_path(name)
        try:
            return load_config(self.sweep_command.config, path, key_hints=self.sweep_command.key_hints)
        except ConfigError as error:
            raise GridError(f"{error}\n{self.path} cannot be gone on with; name another --directory") from None

    def add(self, points: Sequence[GridPoint]) -> None:
        """Take the points up, and write down the config of each."""
        for name in ("configs", "logs", "runs"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        for point in points:
            self.runs.setdefault(point.name, SweepRun(point.name, dict(point.values)))
            write_text_atomic(self.config_path(point.name), to_toml(point.config))
        for run in self.runs.values():
            if run.status == "running":  # its sweep was killed
                run.status = "interrupted"
        self.save()

    def save(self) -> None:
        """Write the record, aside first."""
        record = {"command": self.sweep_command.name, "runs": [asdict(run) for run in self.runs.values()]}
        write_text_atomic(self.path / RECORD, json.dumps(record, indent=1) + "\n")

    def values_of_keys(self, name: str, keys: Sequence[str]) -> dict[str, str]:
        """What a run has of each of these keys; of one that it was not made with, what its config says."""
        own = self.runs[name].values
        missing = [key for key in keys if key not in own]
        if not missing:
            return {key: own[key] for key in keys}
        values = self._read_config(name).model_dump(mode="json")
        return {key: own[key] if key in own else _format_override_value(values, key) for key in keys}


RECORD = "sweep.json"


def read_record(path: Path, sweep_command: SweepCommand) -> SweepDirectory:
    """The sweep of a directory; a new one where there is none.

    Raises:
        GridError: the directory holds something else, or a sweep of the other command.
    """
    record = path / RECORD
    directory = SweepDirectory(path, sweep_command)
    if not record.is_file():
        foreign = sorted(each.name for each in path.iterdir()) if path.is_dir() else []
        foreign = [name for name in foreign if name != LOCK_FILE]
        if foreign or (path.exists() and not path.is_dir()):
            holds = f"it holds {', '.join(foreign[:5])}" if foreign else "it is a file"
            raise GridError(f"{path} is not empty and no sweep ({holds}); name another --directory")
        return directory
    try:
        values = json.loads(record.read_text(encoding="utf-8"))
        command = values["command"]
        directory.runs = {each["name"]: SweepRun(**each) for each in values["runs"]}
    except (ValueError, TypeError, KeyError) as error:
        raise GridError(f"{record} cannot be read ({error}); name another --directory, or remove this one") from None
    if command != sweep_command.name:
        raise GridError(
            f"{path} holds a sweep of --command {command}, not {sweep_command.name}; name another --directory"
        )
    return directory


@contextlib.contextmanager
def lock_sweep(path: Path) -> Iterator[None]:
    """Only one sweep works in a directory.

    Raises:
        GridError: another one does.
        OSError: the directory cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock_directory(path))
        except DirectoryInUseError as error:
            raise GridError(f"{path} is in use by another sweep; wait for it or stop it") from error
        yield


def _format_override_value(values: Mapping[str, Any], key: str) -> str:
    """The value of a dotted key as an override would have it."""
    node: Any = values
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    if node is None:
        return "none"
    return node if isinstance(node, str) else json.dumps(node)
