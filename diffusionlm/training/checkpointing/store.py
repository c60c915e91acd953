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

from ddp.process_group import SINGLE, Ranks
from diffusionlm.checkpoints.manifest import (
    WRITE_ERRORS,
    entries_of,
    files_in,
    remove_leftovers,
    replace_link,
    seal,
    verify,
    with_room,
)
from diffusionlm.checkpoints.weights import read_weights
from diffusionlm.training.checkpointing.retention import best_of, bound_of, superfluous
from diffusionlm.training.checkpointing.save_coordinator import ALONE, SavingRanks
from diffusionlm.training.checkpointing.staging import Snapshot
from files.atomic import aside_of

if TYPE_CHECKING:
    from diffusionlm.training.checkpointing.tensor_files import TrainingState

STATE, TRAINING_STATE, OLD_OPTIMIZER = "state.json", "training_state", "optimizer.safetensors"
LATEST, BEST = "latest", "best"
_NAME = re.compile(r"step-(\d+)")
Say = Callable[[str], None]


class MadeByAnOlderVersion(ValueError):
    """A checkpoint is whole, but of another layout."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that verified; its tensors are read when they are asked for."""

    path: Path
    state: dict[str, Any]
    tensors: TrainingState
    """``optimizer.<parameter>.<key>``, and ``weights.<parameter>`` where model.safetensors has their average."""
    ranks: Ranks = SINGLE

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
        """See `TrainingState.read_into`, over the ranks that loaded this."""
        self.tensors.read_into(targets, prefix, self.ranks)


@dataclass(frozen=True)
class CheckpointStore:
    """The ``checkpoints`` folder of a run."""

    folder: Path
    keep_last: int
    keep_best: bool = True
    keep_every_steps: int = 0

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        found = (_NAME.fullmatch(path.name) for path in self.folder.glob("step-*") if path.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        """Directory of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def save(self, step: int, snapshot: Snapshot, ranks: SavingRanks = ALONE) -> Path:
        """Write a checkpoint, point ``latest`` and ``best``, then drop those that need not be kept.

        All ranks call this and write into one folder, which they share; what is there once, the first writes. Names are
        given when everything of all ranks is on the disk.

        Raises:
            ValueError: it could not be written by one rank or several; on all ranks. Older checkpoints stand as they
                were.
        """
        from diffusionlm.training.checkpointing.tensor_files import write_training_state

        assert step == snapshot.step
        target, is_first = self.path(step), ranks.ranks.is_first

        def describe(error: Exception) -> str:
            return with_room(error, target)

        aside = aside_of(target)
        try:
            aside = ranks.each(lambda: self._begin(aside) if is_first else aside, describe)[0]
            entries = write_training_state(aside / TRAINING_STATE, snapshot.parts, ranks)

            def finish() -> None:
                snapshot.write(aside)
                unseen = [name for name in entries if not (aside / name).is_file()]
                if unseen:
                    raise ValueError(f"the first rank does not see {unseen[0]}: all ranks must share the file system")
                others = [path for path in files_in(aside) if path.parent.name != TRAINING_STATE]
                seal(aside, target, entries | entries_of(aside, others))

            ranks.each(finish if is_first else lambda: None, describe)
        except WRITE_ERRORS as error:  # of one alone: several are told by a ValueError
            raise ValueError(f"{target} was not written: {describe(error)}") from error
        except ValueError as error:
            raise ValueError(f"{target} was not written: {error}") from error
        finally:
            if is_first:
                shutil.rmtree(aside, ignore_errors=True)
        ranks.each(lambda: self._tidy(target) if is_first else None)
        return target

    def load_newest(self, say: Say, ranks: Ranks = SINGLE) -> Saved | None:
        """The newest checkpoint that verifies; damaged ones are set aside, loudly. None: there is none at all.

        The first rank looks and decides, the others follow.

        Raises:
            ValueError: there are checkpoints, but not one is whole; or the newest was made by an older version.
        """
        name = ranks.from_first(lambda: self._choose(say))
        return None if name is None else ranks.agree(lambda: _open(self.folder / name, ranks))

    def _begin(self, aside: Path) -> Path:
        remove_leftovers(self.folder)
        aside.mkdir(parents=True)
        return aside

    def _tidy(self, target: Path) -> None:
        try:
            replace_link(self.folder / LATEST, target.name)
            self._point_best()
            links = (self.folder / name for name in (LATEST, BEST))
            linked = {os.readlink(link) for link in links if link.is_symlink()}
            kept = [step for step in self.steps() if self.path(step).name in linked]
            for step in superfluous(self.steps(), kept, self.keep_last, self.keep_every_steps):
                # Renamed first: a process killed while removing must not leave half a checkpoint under its name.
                old = self.path(step).with_name(f"{self.path(step).name}.tmp-old")
                os.rename(self.path(step), old)
                shutil.rmtree(old)
        except OSError as error:
            raise ValueError(f"{target} was written, but the folder around it could not be changed: {error}") from error

    def _choose(self, say: Say) -> str | None:
        steps = self.steps()
        for step in reversed(steps):
            path = self.path(step)
            try:
                verify(path, must_have_manifest=True)
                _open(path, SINGLE)
            except MadeByAnOlderVersion:
                raise
            except (ValueError, OSError) as error:
                say(f"checkpoint refused: {error}")
                continue
            try:
                self._set_aside([later for later in steps if later > step], path, say)
            except OSError as error:
                raise ValueError(f"{self.folder} cannot be changed: {error}") from error
            return path.name
        if steps:
            raise ValueError(f"no checkpoint in {self.folder} is whole; remove the folder to start anew")
        return None

    def _set_aside(self, damaged: list[int], whole: Path, say: Say) -> None:
        for step in damaged:
            aside = self.path(step).with_name(f"damaged-{self.path(step).name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(self.path(step), aside)
            say(f"kept the damaged checkpoint as {aside}; going on from {whole.name}")
        replace_link(self.folder / LATEST, whole.name)
        self._point_best()

    def _point_best(self) -> None:
        bounds = {step: bound for step in self.steps() if (bound := bound_of(self.path(step))) is not None}
        best = best_of(bounds) if self.keep_best else None
        if best is not None:
            replace_link(self.folder / BEST, self.path(best).name)
        else:
            (self.folder / BEST).unlink(missing_ok=True)


def _open(path: Path, ranks: Ranks) -> Saved:
    """A checkpoint, its tensors not yet read.

    Raises:
        ValueError: it is not complete or damaged.
    """
    from diffusionlm.training.checkpointing.tensor_files import TrainingState

    if (path / OLD_OPTIMIZER).exists() and not (path / TRAINING_STATE).exists():
        raise MadeByAnOlderVersion(
            f"{path} was made by an older version, which kept the state of training in {OLD_OPTIMIZER}; this one keeps "
            f"it in {TRAINING_STATE}/ and cannot go on with it. Go on with the older version, or start a new run from "
            f'its weights: model.init_from = "{path}"'
        )
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path / STATE} cannot be read: {error}") from error
    return Saved(path, state, TrainingState.open(path / TRAINING_STATE), ranks)
