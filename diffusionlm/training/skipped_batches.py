"""The batches of steps that were skipped, on disk: for a person to look at, and to repeat the step with.

``<run>/skipped/step-00000007-rank-0.json`` says what happened and shows the text of the first rows; beside it
``.safetensors`` has what the model read. `read_skipped` makes draws of them again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from diffusionlm.diffusion.noised_batch import Draw
from diffusionlm.models.patterns import (
    AttentionPattern,
    Bidirectional,
    BlockCausal,
    BlockDiffusion,
    Causal,
    PromptAndOwnBlock,
)
from diffusionlm.training.spike_guard import Numbers
from files.atomic import replace_bytes

MAX_RECORDS = 20
"""So many are kept of each rank, the newest."""

MAX_HELD = 16
"""So many batches are held at most until their numbers come: a few, as a GPU is only a few steps behind."""

SHOWN_ROWS = 4
"""Rows whose text is in the record."""

PATTERNS: tuple[type[AttentionPattern], ...] = (Bidirectional, BlockCausal, BlockDiffusion, Causal, PromptAndOwnBlock)
TENSORS = ("inputs_BS", "rows_R", "targets_R", "weights_R")


@dataclass(frozen=True)
class _Held:
    """A batch whose step is not judged yet, as far as this process knows."""

    draws: list[Draw]
    position: dict[str, Any] | None
    """Where the loader began to read it; None: at the start of the data."""


class SkippedBatches:
    """Holds the batches of the steps whose numbers are still to come, and records those of skipped steps."""

    def __init__(self, folder: Path, decode: Callable[[list[int]], str], seed: int, rank: int = 0) -> None:
        """``decode`` makes text of token ids; ``seed`` is the run's."""
        self.folder = folder
        self._decode, self._seed, self._rank = decode, seed, rank
        self._held: dict[int, _Held] = {}
        self._position: dict[str, Any] | None = None

    def start_at(self, position: dict[str, Any]) -> None:
        """The loader's state that a run goes on from; before the first step."""
        self._position = position

    def hold(self, step: int, draws: list[Draw], position: dict[str, Any]) -> None:
        """Keep the draws of a step (from 1) until it is judged; ``position`` is the loader's state behind it."""
        self._held[step] = _Held(draws, self._position)
        self._position = position
        if len(self._held) > MAX_HELD:
            del self._held[next(iter(self._held))]

    def release(self, step: int) -> None:
        """It was good."""
        self._held.pop(step, None)

    def record(self, numbers: Numbers) -> str:
        """Write the batch of a skipped step. Returns where it is; or why it is not, since no record is worth a run."""
        held = self._held.pop(numbers.step, None)
        if held is None:
            return "its batch is not held any more"
        path = self.folder / f"step-{numbers.step:08d}-rank-{self._rank}.json"
        try:
            self._write(path, numbers, held)
            self._remove_oldest()
        except OSError as error:
            return f"its batch could not be kept: {error}"
        return f"its batch is kept in {path}"

    def _write(self, path: Path, numbers: Numbers, held: _Held) -> None:
        tensors: dict[str, Tensor] = {}
        described = []
        for index, draw in enumerate(held.draws):
            fields = {name: getattr(draw, name) for name in TENSORS}
            fields |= {f"pattern.{name}": value for name, value in vars(draw.pattern).items()}
            kept = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
            tensors |= {f"{index}.{name}": value.detach().cpu().contiguous().clone() for name, value in kept.items()}
            described.append(
                {
                    "pattern": type(draw.pattern).__name__,
                    **{name: value for name, value in fields.items() if name not in kept},
                    "num_targets": draw.num_targets,
                    "denominator": draw.denominator,
                }
            )
        record = {
            "step": numbers.step,
            "seed": self._seed,
            "rank": self._rank,
            "reason": "spike" if numbers.is_finite else "not finite",
            "loss": _plain(numbers.loss),
            "grad_norm": _plain(numbers.grad_norm),
            "first_rows": self._shown(held.draws),
            "loader": held.position,
            "draws": described,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_bytes(path.with_suffix(".safetensors"), safetensors.torch.save(tensors))
        replace_bytes(path, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())

    def _shown(self, draws: Sequence[Draw]) -> list[dict[str, str]]:
        """What the model read in the first stream of the first rows, and all tokens that it should have said."""
        shown: list[dict[str, str]] = []
        for draw in draws:
            S = draw.inputs_BS.shape[1]
            L = S // draw.pattern.streams
            row_R = draw.rows_R.cpu() // S
            for row, read in enumerate(draw.inputs_BS[: SHOWN_ROWS - len(shown), :L].tolist()):
                wanted = draw.targets_R.cpu()[row_R == row].tolist()
                shown.append({"read": self._decode(read), "wanted": self._decode(wanted)})
        return shown

    def _remove_oldest(self) -> None:
        for path in sorted(self.folder.glob(f"step-*-rank-{self._rank}.json"))[:-MAX_RECORDS]:
            path.unlink()
            path.with_suffix(".safetensors").unlink(missing_ok=True)


def read_skipped(path: Path) -> tuple[dict[str, Any], list[Draw]]:
    """A record (its ``.json``) and the draws of its step, on the CPU.

    Raises:
        ValueError: it is not a record, or not whole; names the file.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        tensors = safetensors.torch.load(path.with_suffix(".safetensors").read_bytes())
        return record, [_draw(described, tensors, index) for index, described in enumerate(record["draws"])]
    except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} is not the whole record of a skipped step: {error}") from error


def _draw(described: dict[str, Any], tensors: dict[str, Tensor], index: int) -> Draw:
    kinds = {kind.__name__: kind for kind in PATTERNS}
    prefix = f"{index}."
    fields = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)} | described
    options = {name.removeprefix("pattern."): each for name, each in fields.items() if name.startswith("pattern.")}
    return Draw(
        inputs_BS=fields["inputs_BS"],
        pattern=kinds[described["pattern"]](**options),
        rows_R=fields["rows_R"],
        targets_R=fields["targets_R"],
        weights_R=fields["weights_R"],
        num_targets=described["num_targets"],
        denominator=described["denominator"],
    )


def _plain(value: float) -> float | str:
    """JSON has no infinity: it becomes a word."""
    return value if math.isfinite(value) else str(value)
