"""Checkpoints of a run: directories that a killed process, a full disk or a flipped bit cannot make worse."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ddp.process_group import SINGLE_PROCESS, World
from diffusionlm.checkpoints.manifest import (
    WRITE_ERRORS,
    format_write_error,
    list_files,
    make_manifest_entries,
    publish_directory,
    verify_directory,
)
from diffusionlm.checkpoints.weights import read_weights
from diffusionlm.training.checkpointing.retention import read_validation_bound, select_best, select_expired
from diffusionlm.training.checkpointing.save_coordinator import SINGLE_PROCESS_COORDINATOR, SaveCoordinator
from diffusionlm.training.checkpointing.staging import StagedCheckpoint
from files.atomic import remove_temporary_paths, replace_symlink, temporary_path

if TYPE_CHECKING:
    from diffusionlm.training.checkpointing.tensor_files import StoredTensors

STATE_FILE, TENSOR_DIRECTORY, OLD_OPTIMIZER_FILE = "state.json", "training_state", "optimizer.safetensors"
LATEST_LINK, BEST_LINK = "latest", "best"
_STEP_DIRECTORY = re.compile(r"step-(\d+)")
Log = Callable[[str], None]


class OlderFormatError(ValueError):
    """A checkpoint is whole, but of another layout."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that verified; its tensors are read when they are asked for."""

    path: Path
    state: dict[str, Any]
    tensors: StoredTensors
    """``optimizer.<parameter>.<key>``, and ``weights.<parameter>`` where model.safetensors has their average."""
    world: World = SINGLE_PROCESS

    @property
    def has_live_weights(self) -> bool:
        """Whether the weights being trained are beside those of the model directory."""
        return any(key.startswith("weights.") for key in self.tensors.shapes)

    def weights(self) -> dict[str, Tensor]:
        """Those of the model directory."""
        return read_weights(self.path)

    def live_weights(self) -> dict[str, Tensor]:
        """Those being trained, whole."""
        return self.tensors.read_whole("weights.") if self.has_live_weights else self.weights()

    def optimizer(self) -> dict[str, Tensor]:
        """``parameter.key`` -> tensor, whole."""
        return self.tensors.read_whole("optimizer.")

    def read_into(self, targets: Mapping[str, Any], prefix: str = "") -> None:
        """See `StoredTensors.read_into`, over the ranks that loaded this."""
        self.tensors.read_into(targets, prefix, self.world)


@dataclass(frozen=True)
class CheckpointStore:
    """The ``checkpoints`` folder of a run."""

    folder: Path
    keep_last: int
    keep_best: bool = True
    keep_every_steps: int = 0

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        found = (_STEP_DIRECTORY.fullmatch(path.name) for path in self.folder.glob("step-*") if path.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        """Directory of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def save(self, step: int, snapshot: StagedCheckpoint, world: SaveCoordinator = SINGLE_PROCESS_COORDINATOR) -> Path:
        """Write a checkpoint, point ``latest`` and ``best``, then drop those that need not be kept.

        All ranks call this and write into one folder, which they share; what is there once, the first writes. Names are
        given when everything of all ranks is on the disk.

        Raises:
            ValueError: it could not be written by one rank or several; on all ranks. Older checkpoints stand as they
                were.
        """
        from diffusionlm.training.checkpointing.tensor_files import write_shards

        assert step == snapshot.step
        target, is_first = self.path(step), world.world.is_first

        def describe(error: Exception) -> str:
            return format_write_error(error, target)

        tmp_path = temporary_path(target)
        try:
            tmp_path = world.gather_results(
                lambda: self._create_temporary_directory(tmp_path) if is_first else tmp_path, describe
            )[0]
            entries = write_shards(tmp_path / TENSOR_DIRECTORY, snapshot.shards, world)

            def finish() -> None:
                snapshot.write(tmp_path)
                unseen = [name for name in entries if not (tmp_path / name).is_file()]
                if unseen:
                    raise ValueError(f"the first rank does not see {unseen[0]}: all ranks must share the file system")
                others = [path for path in list_files(tmp_path) if path.parent.name != TENSOR_DIRECTORY]
                publish_directory(tmp_path, target, entries | make_manifest_entries(tmp_path, others))

            world.gather_results(finish if is_first else lambda: None, describe)
        except WRITE_ERRORS as error:  # of one alone: several are told by a ValueError
            raise ValueError(f"{target} was not written: {describe(error)}") from error
        except ValueError as error:
            raise ValueError(f"{target} was not written: {error}") from error
        finally:
            if is_first:
                shutil.rmtree(tmp_path, ignore_errors=True)
        world.gather_results(lambda: self._update_links_and_expire(target) if is_first else None)
        return target

    def load_newest(self, log: Log, world: World = SINGLE_PROCESS) -> LoadedCheckpoint | None:
        """The newest checkpoint that verifies; damaged ones are set aside, loudly. None: there is none at all.

        The first rank looks and decides, the others follow.

        Raises:
            ValueError: there are checkpoints, but not one is whole; or the newest was made by an older version.
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
            linked = {os.readlink(link) for link in links if link.is_symlink()}
            kept = [step for step in self.steps() if self.path(step).name in linked]
            for step in select_expired(self.steps(), kept, self.keep_last, self.keep_every_steps):
                # Renamed first: a process killed while removing must not leave half a checkpoint under its name.
                old = self.path(step).with_name(f"{self.path(step).name}.tmp-old")
                os.rename(self.path(step), old)
                shutil.rmtree(old)
        except OSError as error:
            raise ValueError(f"{target} was written, but the folder around it could not be changed: {error}") from error

    def _select_newest_valid(self, log: Log) -> str | None:
        steps = self.steps()
        for step in reversed(steps):
            path = self.path(step)
            try:
                verify_directory(path, must_have_manifest=True)
                _open_checkpoint(path, SINGLE_PROCESS)
            except OlderFormatError:
                raise
            except (ValueError, OSError) as error:
                log(f"checkpoint refused: {error}")
                continue
            try:
                self._quarantine_damaged([later for later in steps if later > step], path, log)
            except OSError as error:
                raise ValueError(f"{self.folder} cannot be changed: {error}") from error
            return path.name
        if steps:
            raise ValueError(f"no checkpoint in {self.folder} is whole; remove the folder to start anew")
        return None

    def _quarantine_damaged(self, damaged: list[int], whole: Path, log: Log) -> None:
        for step in damaged:
            tmp_path = self.path(step).with_name(f"damaged-{self.path(step).name}")
            shutil.rmtree(tmp_path, ignore_errors=True)
            os.rename(self.path(step), tmp_path)
            log(f"kept the damaged checkpoint as {tmp_path}; going on from {whole.name}")
        replace_symlink(self.folder / LATEST_LINK, whole.name)
        self._update_best_link()

    def _update_best_link(self) -> None:
        bounds = {step: bound for step in self.steps() if (bound := read_validation_bound(self.path(step))) is not None}
        best = select_best(bounds) if self.keep_best else None
        if best is not None:
            replace_symlink(self.folder / BEST_LINK, self.path(best).name)
        else:
            (self.folder / BEST_LINK).unlink(missing_ok=True)


def _open_checkpoint(path: Path, world: World) -> LoadedCheckpoint:
    """A checkpoint, its tensors not yet read.

    Raises:
        ValueError: it is not complete or damaged.
    """
    from diffusionlm.training.checkpointing.tensor_files import StoredTensors

    if (path / OLD_OPTIMIZER_FILE).exists() and not (path / TENSOR_DIRECTORY).exists():
        raise OlderFormatError(
            f"{path} was made by an older version, which kept the state of training in {OLD_OPTIMIZER_FILE}; this one keeps "
            f"it in {TENSOR_DIRECTORY}/ and cannot go on with it. Go on with the older version, or start a new run from "
            f'its weights: model.init_from = "{path}"'
        )
    try:
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path / STATE_FILE} cannot be read: {error}") from error
    return LoadedCheckpoint(path, state, StoredTensors.open(path / TENSOR_DIRECTORY), world)
