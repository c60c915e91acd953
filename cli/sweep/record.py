"""The directory and the record of a sweep.

``sweep.json`` lists the runs and their status; ``configs/``, ``runs/`` and ``logs/`` contain a file or a directory for
each run; ``sweep.md``, ``sweep.jsonl`` and ``sweep.html`` are the results.
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
    """A run and its status."""

    name: str
    values: dict[str, str]
    """Its value of each axis, as written."""
    status: Status = "waiting"
    seconds: float = 0.0
    """Wall-clock time of all processes of the run."""
    exit_code: int | None = None
    """Exit code of its last process; negative: the signal that ended it."""
    error: list[str] = field(default_factory=list)
    """The last lines of the log of a failed run."""
    jobs: int = 1
    """Concurrent runs during its last process, itself included."""


@dataclass
class SweepDirectory:
    """The files of a sweep."""

    path: Path
    sweep_command: SweepCommand
    runs: dict[str, SweepRun] = field(default_factory=dict)
    """Runs by name, in the order of their creation."""

    @property
    def runs_path(self) -> Path:
        return self.path / "runs"

    def run_path(self, name: str) -> Path:
        return self.runs_path / name

    def log_path(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def config_path(self, name: str) -> Path:
        return self.path / "configs" / f"{name}.toml"

    def reload_points(self, config: Path | None, settings: Sequence[Setting]) -> list[GridPoint]:
        """Load the runs of the record with the config and the settings of this command.

        Raises:
            GridError: the config of a run would change; lists the differences.
        """
        points = []
        for run in self.runs.values():
            recorded = self._read_config(run.name)
            try:
                config_now = load_point(
                    self.sweep_command, config, build_overrides(settings, run.values), self.run_path(run.name)
                )
            except ConfigError as error:
                raise self._other_config_error(run, str(error).splitlines()[-1:]) from None
            differences = [
                line
                for line in list_differences(recorded, config_now)
                if not line.startswith(self.sweep_command.managed_keys)
            ]
            if differences:
                raise self._other_config_error(run, differences)
            points.append(GridPoint(run.name, run.values, config_now))
        return points

    def _other_config_error(self, run: SweepRun, lines: Sequence[str]) -> GridError:
        listed = "\n  ".join(lines)
        return GridError(
            f"{self.path} contains a sweep of another config; its run {format_values(run.values)} would change:\n  "
            f"{listed}\nchoose another --directory; a sweep can only be extended by values of --set"
        )

    def _read_config(self, name: str) -> Any:
        path = self.config_path(name)
        try:
            return load_config(self.sweep_command.config, path, key_hints=self.sweep_command.key_hints)
        except ConfigError as error:
            raise GridError(
                f"{error}\nthe sweep in {self.path} cannot be continued; choose another --directory"
            ) from None

    def add(self, points: Sequence[GridPoint]) -> None:
        """Add points to the record and write their configs."""
        for name in ("configs", "logs", "runs"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        for point in points:
            self.runs.setdefault(point.name, SweepRun(point.name, dict(point.values)))
            write_text_atomic(self.config_path(point.name), to_toml(point.config))
        for run in self.runs.values():
            if run.status == "running":  # the sweep was killed
                run.status = "interrupted"
        self.save()

    def save(self) -> None:
        record = {"command": self.sweep_command.name, "runs": [asdict(run) for run in self.runs.values()]}
        write_text_atomic(self.path / RECORD, json.dumps(record, indent=1) + "\n")

    def values_of_keys(self, name: str, keys: Sequence[str]) -> dict[str, str]:
        """Return the values of a run for these keys; those that it does not set come from its config."""
        own_values = self.runs[name].values
        if all(key in own_values for key in keys):
            return {key: own_values[key] for key in keys}
        config = self._read_config(name).model_dump(mode="json")
        return {key: own_values[key] if key in own_values else _format_override_value(config, key) for key in keys}


RECORD = "sweep.json"


def read_record(path: Path, sweep_command: SweepCommand) -> SweepDirectory:
    """Read the sweep of a directory, or create an empty record if there is none.

    Raises:
        GridError: the directory contains other files, or a sweep of the other command.
    """
    record = path / RECORD
    directory = SweepDirectory(path, sweep_command)
    if not record.is_file():
        foreign = sorted(child.name for child in path.iterdir() if child.name != LOCK_FILE) if path.is_dir() else []
        if foreign or (path.exists() and not path.is_dir()):
            contents = f"it contains {', '.join(foreign[:5])}" if foreign else "it is a file"
            raise GridError(f"{path} is not a sweep ({contents}); choose another --directory")
        return directory
    try:
        values = json.loads(record.read_text(encoding="utf-8"))
        command = values["command"]
        directory.runs = {run["name"]: SweepRun(**run) for run in values["runs"]}
    except (ValueError, TypeError, KeyError) as error:
        raise GridError(f"{record} cannot be read ({error}); choose another --directory, or remove this one") from None
    if command != sweep_command.name:
        raise GridError(
            f"{path} contains a sweep of --command {command}, not {sweep_command.name}; choose another --directory"
        )
    return directory


@contextlib.contextmanager
def lock_sweep(path: Path) -> Iterator[None]:
    """Lock the directory of a sweep.

    Raises:
        GridError: another sweep uses the directory.
        OSError: the directory cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock_directory(path))
        except DirectoryInUseError as error:
            raise GridError(f"{path} is in use by another sweep; wait for it or stop it") from error
        yield


def _format_override_value(values: Mapping[str, Any], key: str) -> str:
    """Format the value of a dotted key as an override."""
    node: Any = values
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    if node is None:
        return "none"
    return node if isinstance(node, str) else json.dumps(node)
