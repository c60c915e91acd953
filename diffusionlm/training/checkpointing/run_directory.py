"""The directory of a run: its files, its lock, and the check that it belongs to the same config."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from config.dump import list_differences, to_toml
from config.load import ConfigError, load_config
from config.train import TrainConfig
from ddp.process_group import SINGLE_PROCESS, World
from diffusionlm.training.checkpointing.store import CheckpointStore
from files.atomic import write_text_atomic
from files.lock import LOCK_FILE, DirectoryInUseError, lock_directory
from files.usage_error import UsageError

MUTABLE_SECTIONS = ("logging", "samples", "checkpoint", "profiler", "parallel")
"""Sections that may change when a run is resumed: they do not change its results, or only their rounding."""


@dataclass(frozen=True)
class RunDirectory:
    """``config.toml``, ``tokenizer/``, ``checkpoints/``, ``metrics.jsonl`` and ``summary.json``."""

    path: Path
    store: CheckpointStore

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def metrics(self) -> Path:
        """Metrics and events of the run, one JSON object per line."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"


@contextlib.contextmanager
def open_run_directory(config: TrainConfig, world: World = SINGLE_PROCESS) -> Iterator[RunDirectory]:
    """Create or open ``run.directory``; the first rank locks it.

    Raises:
        UsageError: it has a run with another config (the differences are listed) or other files.
        ValueError: it is in use or cannot be written.
    """
    path, section = config.run.directory, config.checkpoint
    store = CheckpointStore(
        path / "checkpoints",
        section.keep_last,
        section.keep_best and (config.rl is None or config.evaluation.best is not None),  # not by the bound
        section.keep_every_steps,
        config.evaluation.best,
    )
    run = RunDirectory(path, store)
    with contextlib.ExitStack() as stack:
        world.run_on_first(lambda: stack.enter_context(_lock_and_check(config, run)))
        yield run


@contextlib.contextmanager
def _lock_and_check(config: TrainConfig, run: RunDirectory) -> Iterator[None]:
    path = run.path
    if path.exists() and not path.is_dir():
        raise ValueError(f"run.directory = {path} is a file; name another directory")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock_directory(path))
        except DirectoryInUseError as error:
            raise ValueError(f"run.directory = {path} is in use by another process; wait for it or stop it") from error
        _check_existing_run(config, run)
        write_text_atomic(path / "config.toml", to_toml(config))
        yield


def _check_existing_run(config: TrainConfig, run: RunDirectory) -> None:
    saved = run.path / "config.toml"
    has_checkpoints = bool(run.store.steps())
    if has_checkpoints and config.checkpoint.resume == "never":
        raise UsageError(
            f'run.directory = {run.path} already holds a run, and checkpoint.resume = "never"; '
            'name another directory, or set checkpoint.resume = "auto" to go on with it'
        )
    if not saved.exists():
        foreign = sorted(path.name for path in run.path.iterdir() if path.name != LOCK_FILE)
        if foreign:
            raise UsageError(
                f"run.directory = {run.path} is not empty and not a run (it holds {', '.join(foreign[:5])}); "
                "name another"
            )
        return
    changes = _list_config_changes(saved, config)
    if not changes:
        return
    if not has_checkpoints:  # nothing was trained yet
        shutil.rmtree(run.tokenizer, ignore_errors=True)
        shutil.rmtree(run.path / "skipped", ignore_errors=True)
        run.metrics.unlink(missing_ok=True)
    elif config.checkpoint.config_change == "refuse":
        listed = "\n  ".join(changes)
        raise UsageError(
            f"run.directory = {run.path} already holds a run with another config:\n  {listed}\n"
            'name another directory, or set checkpoint.config_change = "accept" to go on with the new one'
        )


def _list_config_changes(saved: Path, config: TrainConfig) -> list[str]:
    """Differences between the stored config and this one, without those that are allowed."""
    try:
        before = load_config(TrainConfig, saved)
    except ConfigError as error:
        return [f"{saved} is not valid any more: {error}"]
    mutable = {name: getattr(config, name) for name in MUTABLE_SECTIONS}
    workers = {"workers": config.data.workers, "prefetch_steps": config.data.prefetch_steps}
    mutable["data"] = before.data.model_copy(update=workers)
    mutable["run"] = before.run.model_copy(update={"directory": config.run.directory, "threads": config.run.threads})
    mutable["runtime"] = config.runtime.model_copy(update={"weights": before.runtime.weights})
    return list_differences(before.model_copy(update=mutable), config)
