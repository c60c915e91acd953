"""Checkpoints of a run: directories that a killed process, a full disk or a flipped bit cannot make worse."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from diffusionlm.checkpoints.manifest import remove_leftovers, verify, write_directory
from diffusionlm.checkpoints.weights import read_weights

STATE, OPTIMIZER, LIVE_WEIGHTS = "state.json", "optimizer.safetensors", "live_weights.safetensors"
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds beside the model directory."""

    path: Path
    state: dict[str, Any]
    optimizer: dict[str, Tensor]
    live_weights: dict[str, Tensor] | None
    """The weights being trained, where model.safetensors has their average."""

    def weights(self) -> dict[str, Tensor]:
        """Those of the model directory."""
        return read_weights(self.path)


@dataclass(frozen=True)
class CheckpointStore:
    """The ``checkpoints`` folder of a run."""

    folder: Path
    keep_last: int

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        found = (_NAME.fullmatch(path.name) for path in self.folder.glob("step-*") if path.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        """Directory of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def save(
        self,
        step: int,
        write_model: Callable[[Path], None],
        state: dict[str, Any],
        optimizer: dict[str, Tensor],
        live_weights: dict[str, Tensor] | None,
    ) -> Path:
        """Write a checkpoint, point ``latest`` at it, then drop the oldest.

        Raises:
            ValueError: it could not be written; older checkpoints stand as they were.
        """
        target = self.path(step)

        def write(folder: Path) -> None:
            write_model(folder)
            (folder / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
            save_file({name: tensor.contiguous().cpu() for name, tensor in optimizer.items()}, folder / OPTIMIZER)
            if live_weights is not None:
                save_file({n: t.detach().contiguous().cpu() for n, t in live_weights.items()}, folder / LIVE_WEIGHTS)

        remove_leftovers(self.folder)
        write_directory(target, write)
        try:
            self._point_latest(target)
            for old in self.steps()[: -self.keep_last]:
                # Renamed first: a process killed while removing must not leave half a checkpoint under its name.
                aside = self.path(old).with_name(f"{self.path(old).name}.tmp-old")
                os.rename(self.path(old), aside)
                shutil.rmtree(aside)
        except OSError as error:
            raise ValueError(f"{target} was written, but the folder around it could not be changed: {error}") from error
        return target

    def load_newest(self, say: Callable[[str], None]) -> Saved | None:
        """The newest checkpoint that verifies; damaged ones are set aside, loudly. None: there is none at all.

        Raises:
            ValueError: there are checkpoints, but not one is whole.
        """
        steps = self.steps()
        for step in reversed(steps):
            path = self.path(step)
            try:
                verify(path, must_have_manifest=True)
                saved = _read(path)
            except (ValueError, OSError, SafetensorError) as error:
                say(f"checkpoint refused: {error}")
                continue
            for damaged in (later for later in steps if later > step):
                aside = self.path(damaged).with_name(f"damaged-{self.path(damaged).name}")
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(self.path(damaged), aside)
                say(f"kept the damaged checkpoint as {aside}; going on from {path.name}")
            self._point_latest(path)
            return saved
        if steps:
            raise ValueError(f"no checkpoint in {self.folder} is whole; remove the folder to start anew")
        return None

    def _point_latest(self, target: Path) -> None:
        link = self.folder / "latest"
        aside = self.folder / f"latest.tmp-{os.getpid()}"
        try:
            aside.unlink(missing_ok=True)
            aside.symlink_to(target.name)
            os.replace(aside, link)
        finally:
            aside.unlink(missing_ok=True)


def _read(path: Path) -> Saved:
    state = json.loads((path / STATE).read_text(encoding="utf-8"))
    live = path / LIVE_WEIGHTS
    return Saved(path, state, load_file(path / OPTIMIZER), load_file(live) if live.is_file() else None)


@torch.no_grad()
def restore_weights(parameters: dict[str, torch.nn.Parameter], weights: dict[str, Tensor]) -> None:
    """Copy weights into the parameters of their names.

    Raises:
        ValueError: names differ.
    """
    if parameters.keys() != weights.keys():
        raise ValueError(f"weights do not fit the model: {sorted(parameters.keys() ^ weights.keys())}")
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])
