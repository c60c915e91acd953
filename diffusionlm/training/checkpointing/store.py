"""Store the checkpoints of a run, so that a killed process, a full disk or a flipped bit loses none of the older ones,
and write them in a background thread, one at a time."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ddp.process_group import SINGLE_PROCESS, LostRankError, World
from diffusionlm.checkpoints.manifest import (
    WRITE_ERRORS,
    format_write_error,
    list_files,
    make_manifest_entries,
    publish_directory,
    verify_directory,
)
from diffusionlm.checkpoints.weights import read_weights
from diffusionlm.training.checkpointing.staging import (
    TASK_METRICS_KEY,
    VALIDATION_BOUND_KEY,
    SnapshotMemory,
    StagedCheckpoint,
)
from files.atomic import remove_path, remove_temporary_paths, replace_symlink, temporary_path
from files.json_files import read_json_object

if TYPE_CHECKING:
    from diffusionlm.training.checkpointing.tensor_files import StoredTensors

STATE_FILE, TENSOR_DIRECTORY = "state.json", "training_state"
LATEST_LINK, BEST_LINK = "latest", "best"
_STEP_DIRECTORY = re.compile(r"step-(\d+)")
Log = Callable[[str], None]


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A valid checkpoint. Its tensors are read on request."""

    path: Path
    state: dict[str, Any]
    tensors: StoredTensors
    """``optimizer.<parameter>.<key>``, and ``weights.<parameter>`` if model.safetensors has averaged weights."""

    @property
    def has_live_weights(self) -> bool:
        """True if the weights being trained are stored beside the averaged ones."""
        return any(key.startswith("weights.") for key in self.tensors.shapes)

    def weights(self) -> dict[str, Tensor]:
        return read_weights(self.path)

    def live_weights(self) -> dict[str, Tensor]:
        """Read the weights being trained, whole."""
        return self.tensors.read_whole("weights.") if self.has_live_weights else self.weights()


@dataclass(frozen=True)
class CheckpointStore:
    """The ``checkpoints`` folder of a run."""

    folder: Path
    keep_last: int
    keep_best: bool = True
    keep_every_steps: int = 0
    best_task: str | None = None
    """Task and rule whose accuracy selects the best checkpoint. None: the validation bound does."""

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        matches = (_STEP_DIRECTORY.fullmatch(path.name) for path in self.folder.glob("step-*") if path.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    def path(self, step: int) -> Path:
        """Directory of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def best_path(self) -> Path | None:
        """Directory of the best checkpoint. None: none is kept, or no step that was saved was validated."""
        link = self.folder / BEST_LINK
        return self.folder / os.readlink(link) if link.is_symlink() else None

    def save(self, checkpoint: StagedCheckpoint, world: World = SINGLE_PROCESS) -> Path:
        """Write a checkpoint, update the links ``latest`` and ``best``, and remove expired checkpoints.

        All ranks call this and write into the same folder; the first rank writes what is not sharded. The directory
        gets its final name after the files of all ranks are on the disk.

        Raises:
            ValueError: one or more ranks could not write; on all ranks. Older checkpoints are intact.
        """
        from diffusionlm.training.checkpointing.tensor_files import write_shards

        target, is_first = self.path(checkpoint.step), world.is_first

        def describe(error: Exception) -> str:
            return format_write_error(error, target)

        tmp_path = temporary_path(target)
        try:
            tmp_path = world.run_on_all(
                lambda: self._create_temporary_directory(tmp_path) if is_first else tmp_path, describe
            )[0]
            entries = write_shards(tmp_path / TENSOR_DIRECTORY, checkpoint.shards, world)

            def finish() -> None:
                checkpoint.write(tmp_path)
                missing = [name for name in entries if not (tmp_path / name).is_file()]
                if missing:
                    raise ValueError(f"the first rank does not see {missing[0]}: all ranks must share the file system")
                other_files = [path for path in list_files(tmp_path) if path.parent.name != TENSOR_DIRECTORY]
                publish_directory(tmp_path, target, entries | make_manifest_entries(tmp_path, other_files))

            world.run_on_all(finish if is_first else lambda: None, describe)
        except WRITE_ERRORS as error:  # of a single process; several ranks raise ValueError
            raise ValueError(f"{target} was not written: {describe(error)}") from error
        except (ValueError, LostRankError) as error:  # the run continues, and fails at its next collective
            raise ValueError(f"{target} was not written: {error}") from error
        finally:
            if is_first:
                shutil.rmtree(tmp_path, ignore_errors=True)
        try:
            world.run_on_all(lambda: self._update_links_and_expire(target) if is_first else None)
        except LostRankError as error:
            raise ValueError(f"{target} was written, and then {error}") from error
        return target

    def load_newest(self, log: Log, world: World = SINGLE_PROCESS) -> LoadedCheckpoint | None:
        """Load the newest valid checkpoint; corrupt ones are renamed to ``damaged-*`` and logged. None if there is
        none.

        The first rank selects it for all.

        Raises:
            ValueError: there are checkpoints but none is valid.
        """
        name = world.run_on_first(lambda: self._select_newest_valid(log))
        return None if name is None else world.all_agree(lambda: _open_checkpoint(self.folder / name, world))

    def _create_temporary_directory(self, tmp_path: Path) -> Path:
        remove_temporary_paths(self.folder)
        tmp_path.mkdir(parents=True)
        return tmp_path

    def _update_links_and_expire(self, target: Path) -> None:
        try:
            replace_symlink(self.folder / LATEST_LINK, target.name)
            self._update_best_link()
            links = (self.folder / name for name in (LATEST_LINK, BEST_LINK))
            linked_names = {os.readlink(link) for link in links if link.is_symlink()}
            linked = [step for step in self.steps() if self.path(step).name in linked_names]
            for step in select_expired(self.steps(), linked, self.keep_last, self.keep_every_steps):
                # Rename first: a process killed while removing must not leave half a checkpoint under a valid name.
                expired = self.path(step).with_name(f"{self.path(step).name}.tmp-old")
                os.rename(self.path(step), expired)
                remove_path(expired)
        except OSError as error:
            raise ValueError(f"{target} was written, but the folder around it could not be changed: {error}") from error

    def _select_newest_valid(self, log: Log) -> str | None:
        steps = self.steps()
        for step in reversed(steps):
            path = self.path(step)
            try:
                verify_directory(path, must_have_manifest=True)
                _open_checkpoint(path, SINGLE_PROCESS)
            except (ValueError, OSError) as error:
                log(f"checkpoint refused: {error}")
                continue
            try:
                self._quarantine_damaged([later for later in steps if later > step], path, log)
            except OSError as error:
                raise ValueError(f"{self.folder} cannot be changed: {error}") from error
            return path.name
        if steps:
            raise ValueError(f"no checkpoint in {self.folder} is valid; remove the folder to start anew")
        return None

    def _quarantine_damaged(self, damaged_steps: list[int], valid: Path, log: Log) -> None:
        for step in damaged_steps:
            quarantine = self.path(step).with_name(f"damaged-{self.path(step).name}")
            shutil.rmtree(quarantine, ignore_errors=True)
            os.rename(self.path(step), quarantine)
            log(f"kept the damaged checkpoint as {quarantine}; going on from {valid.name}")
        replace_symlink(self.folder / LATEST_LINK, valid.name)
        self._update_best_link()

    def _update_best_link(self) -> None:
        bounds = {
            step: bound
            for step in self.steps()
            if (bound := read_selection_value(self.path(step), self.best_task)) is not None and math.isfinite(bound)
        }
        # The later of equal ones.
        best = min(bounds, key=lambda step: (bounds[step], -step), default=None) if self.keep_best else None
        if best is not None:
            replace_symlink(self.folder / BEST_LINK, self.path(best).name)
        else:
            (self.folder / BEST_LINK).unlink(missing_ok=True)


class AsyncCheckpointer:
    """Writes staged checkpoints. `pop_failures` and `wait` report failures, not `start`.

    With several ranks, all make the same calls of `start`, `wait` and `close` and see the same failures. A process ends
    only after its thread, unless it is killed; then older checkpoints are intact.
    """

    def __init__(self, store: CheckpointStore, world: World = SINGLE_PROCESS, *, background: bool = True) -> None:
        """``world``: all ranks, with a group of their own (`World.with_own_group`)."""
        self.store = store
        self.world = world
        self.background = background
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._save: Future[Path] | None = None
        """The last one, unless its result was read."""
        self._unreported_failures: list[str] = []
        self._memory = SnapshotMemory()

    def reserve_memory(self) -> SnapshotMemory:
        """Wait for the previous checkpoint, whose copies are in this memory, and return it for the next one: there are
        never two snapshots in memory."""
        if self._save is not None:
            self._save.exception()
        return self._memory

    def start(self, checkpoint: StagedCheckpoint) -> None:
        """Wait for the previous checkpoint, then start to write this one; in the background if enabled."""
        self._store_failure()
        self._save = self._thread.submit(self.store.save, checkpoint, self.world)
        if not self.background:
            self._save.exception()

    def pop_failures(self) -> list[str]:
        """Return failures that were not reported yet; does not wait.

        Raises:
            Exception: any error other than a failure to write: a bug in this program.
        """
        if self._save is not None and self._save.done():
            self._store_failure()
        failures, self._unreported_failures = self._unreported_failures, []
        return failures

    def wait(self) -> None:
        """Wait for the last started checkpoint.

        Raises:
            ValueError: it could not be written; older checkpoints are intact. `pop_failures` reports earlier failures.
        """
        save, self._save = self._save, None
        if save is not None:
            save.result()

    def close(self) -> None:
        """Wait for the thread, free the memory and destroy the process group; `pop_failures` still reports failures."""
        self._thread.shutdown()
        self._memory.close()
        self.world.close_group()

    def _store_failure(self) -> None:
        """Wait for the last checkpoint, and keep its failure for `pop_failures`."""
        save, self._save = self._save, None
        error = None if save is None else save.exception()
        if isinstance(error, ValueError):
            self._unreported_failures.append(str(error))
        elif error is not None:
            raise error


def _open_checkpoint(path: Path, world: World) -> LoadedCheckpoint:
    """Open a checkpoint without reading its tensors."""
    from diffusionlm.training.checkpointing.tensor_files import StoredTensors

    state = read_json_object(path / STATE_FILE)
    return LoadedCheckpoint(path, state, StoredTensors.open(path / TENSOR_DIRECTORY, world))


def select_expired(
    steps: Collection[int], linked: Collection[int], keep_last: int, keep_every_steps: int = 0
) -> list[int]:
    """Steps whose checkpoints are removed, ascending: not the last ones, not those that a link names, and no multiple
    of ``keep_every_steps`` (0: multiples are not kept)."""
    last = sorted(steps)[-keep_last:]
    candidates = [step for step in sorted(steps) if step not in last and step not in linked]
    return [step for step in candidates if not keep_every_steps or step % keep_every_steps]


def read_selection_value(checkpoint: Path, task: str | None = None) -> float | None:
    """What the best checkpoint has the least of: the validation bound of its step in nats per token, or minus the
    accuracy on a task (``name/rule``). None: the step has none, or it cannot be read."""
    try:
        state = read_json_object(checkpoint / STATE_FILE)
        if task is not None:
            return -float(state[TASK_METRICS_KEY][task])
        bound = state.get(VALIDATION_BOUND_KEY)
        return None if bound is None else float(bound)
    except (ValueError, TypeError, KeyError):
        return None
