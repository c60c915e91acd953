"""What a sweep does, from its command line, and where its files are. No Optuna."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cli.sweep.commands import SweepCommand
from cli.sweep.grid import GridError, GridPoint, PointLoader, Setting
from config.train import TrainConfig
from files.lock import LOCK_FILE

Sampler = Literal["grid", "random", "tpe"]
Status = Literal["waiting", "running", "done", "pruned", "failed", "interrupted"]

STUDY_FILE = "study.db"
SWEEPS = Path("runs/sweeps")
_COMPARED_BY_BYTES = ("tokenizer.", "model.init_from")


@dataclass(frozen=True)
class SweepPlan:
    """The validated command line of a sweep.

    Its directory has ``configs/``, ``runs/`` and ``logs/`` with a file or a directory for each run, ``processes/`` with
    the locks of active sweeps, and the results.
    """

    load_point: PointLoader
    directory: Path
    sampler: Sampler
    num_trials: int | None
    """Runs in total, of `random` and `tpe`."""
    prune: bool = False
    jobs: int = 1
    storage: str = ""
    """URL of the study; "": `STUDY_FILE` in the directory."""

    @property
    def sweep_command(self) -> SweepCommand:
        return self.load_point.sweep_command

    @property
    def axes(self) -> list[Setting]:
        return [setting for setting in self.load_point.settings if setting.is_axis]

    @property
    def study_name(self) -> str:
        """Sweeps that share a database are told apart by the names of their directories."""
        return self.directory.resolve().name if self.storage else "sweep"

    @property
    def processes_path(self) -> Path:
        return self.directory / "processes"

    def run_path(self, name: str) -> Path:
        return self.directory / "runs" / name

    def log_path(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"

    def config_path(self, name: str) -> Path:
        return self.directory / "configs" / f"{name}.toml"

    def has_begun(self) -> bool:
        """Return whether the directory is that of a sweep, and not new.

        Raises:
            GridError: it contains something else.
        """
        if self.processes_path.is_dir():
            return True
        if self.directory.exists() and not self.directory.is_dir():
            raise GridError(f"{self.directory} is a file; choose another --directory")
        files = sorted(child.name for child in self.directory.iterdir()) if self.directory.is_dir() else []
        if [name for name in files if name != LOCK_FILE]:
            raise GridError(f"{self.directory} is not a sweep: it contains {files[:5]}; choose another --directory")
        return False

    def check(self, points: Sequence[GridPoint]) -> None:
        """Check what the arguments require of each other and of the configs.

        Raises:
            GridError: the message names the argument or the key, and the remedy.
        """
        if self.sampler == "grid":
            for axis in self.axes:
                if axis.range is not None:
                    raise GridError(f"--set {axis.key}: a grid has no ranges; list values, or use --sampler tpe")
        elif self.sweep_command.name != "train":
            raise GridError(f"--sampler {self.sampler} needs validation bounds: inference is swept by grids of values")
        elif self.num_trials is None:
            raise GridError(f"--trials is missing: how many runs --sampler {self.sampler} makes, as in --trials 20")
        if self.num_trials is not None and self.sampler == "grid":
            raise GridError("--trials: a grid runs all its points; use --sampler random or tpe")
        if not self.prune:
            return
        for point in points:
            if not isinstance(point.config, TrainConfig):
                raise GridError("--prune needs validations during the run: use --command train")
            if not 0 < point.config.validation.every_steps < (point.config.training.max_steps or 2**63):
                every_steps = point.config.validation.every_steps
                raise GridError(f"validation.every_steps = {every_steps}: --prune needs validations during the run")


@dataclass(frozen=True)
class SweepRun:
    """A run and its status."""

    name: str
    values: Mapping[str, str]
    """Its value of each axis, as written."""
    status: Status
    digest: str = ""
    """Of its `GridPoint`."""
    seconds: float = 0.0
    """Wall-clock time of all processes of the run."""
    error: Sequence[str] = ()
    """The last lines of the log of a failed run."""
    jobs: int = 1
    """Concurrent runs of its sweep process, itself included."""
    value: float | None = None
    """The objective, of a training run that is done or pruned."""
    number: int = 0
    """Its place in the order of starts."""


def objective(keys: Sequence[str]) -> str:
    """Return the measurement that ranks the runs: the bound, or bits per byte if the keys change the tokenizer."""
    return "bits_per_byte" if any(key.startswith(_COMPARED_BY_BYTES) for key in keys) else "bound"
