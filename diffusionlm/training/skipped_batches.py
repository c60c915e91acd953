"""The batches of steps that were skipped, on disk: for a person to look at, and to repeat the step with.

``<run>/skipped/step-00000007-rank-0.json`` says what happened and shows the text of the first rows; beside it
``.safetensors`` has what the model read. `load_skipped_step` makes draws of them again.
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

from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.models.patterns import (
    AttentionPattern,
    Bidirectional,
    BlockCausal,
    BlockDiffusion,
    Causal,
    PromptAndOwnBlock,
)
from diffusionlm.training.spike_guard import Numbers
from files.atomic import write_bytes_atomic

MAX_RECORDS = 20
"""So many are kept of each rank, the newest."""

MAX_PENDING_BATCHES = 16
"""So many batches are held at most until their numbers come: a few, as a GPU is only a few steps behind."""

NUM_SHOWN_ROWS = 4
"""Rows whose text is in the record."""

PATTERNS: tuple[type[AttentionPattern], ...] = (Bidirectional, BlockCausal, BlockDiffusion, Causal, PromptAndOwnBlock)
TENSORS = ("inputs_BS", "positions_N", "targets_N", "weights_N")


@dataclass(frozen=True)
class _PendingBatch:
    """A batch whose step is not judged yet, as far as this process knows."""

    noised_batches: list[NoisedBatch]
    position: dict[str, Any] | None
    """Where the loader began to read it; None: at the start of the data."""


class SkippedBatches:
    """Holds the batches of the steps whose numbers are still to come, and records those of skipped steps."""

    def __init__(self, folder: Path, decode: Callable[[list[int]], str], seed: int, rank: int = 0) -> None:
        """``decode`` makes text of token ids; ``seed`` is the run's."""
        self.folder = folder
        self._decode, self._seed, self._rank = decode, seed, rank
        self._pending: dict[int, _PendingBatch] = {}
        self._position: dict[str, Any] | None = None

    def resume_from(self, position: dict[str, Any]) -> None:
        """The loader's state that a run goes on from; before the first step."""
        self._position = position

    def hold(self, step: int, noised_batches: list[NoisedBatch], position: dict[str, Any]) -> None:
        """Keep the draws of a step (from 1) until it is judged; ``position`` is the loader's state behind it."""
        self._pending[step] = _PendingBatch(noised_batches, self._position)
        self._position = position
        if len(self._pending) > MAX_PENDING_BATCHES:
            del self._pending[next(iter(self._pending))]

    def release(self, step: int) -> None:
        """It was good."""
        self._pending.pop(step, None)

    def record(self, numbers: Numbers) -> str:
        """Write the batch of a skipped step. Returns where it is; or why it is not, since no record is worth a run."""
        held = self._pending.pop(numbers.step, None)
        if held is None:
            return "its batch is not held any more"
        path = self.folder / f"step-{numbers.step:08d}-rank-{self._rank}.json"
        try:
            self._write(path, numbers, held)
            self._remove_oldest()
        except OSError as error:
            return f"its batch could not be kept: {error}"
        return f"its batch is kept in {path}"

    def _write(self, path: Path, numbers: Numbers, held: _PendingBatch) -> None:
        tensors: dict[str, Tensor] = {}
        described = []
        for index, noised_batch in enumerate(held.noised_batches):
            fields = {name: getattr(noised_batch, name) for name in TENSORS}
            fields |= {f"pattern.{name}": value for name, value in vars(noised_batch.pattern).items()}
            kept = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
            tensors |= {f"{index}.{name}": value.detach().cpu().contiguous().clone() for name, value in kept.items()}
            described.append(
                {
                    "pattern": type(noised_batch.pattern).__name__,
                    **{name: value for name, value in fields.items() if name not in kept},
                    "num_targets": noised_batch.num_targets,
                    "denominator": noised_batch.denominator,
                }
            )
        record = {
            "step": numbers.step,
            "seed": self._seed,
            "rank": self._rank,
            "reason": "spike" if numbers.is_finite else "not finite",
            "loss": _to_json_number(numbers.loss),
            "grad_norm": _to_json_number(numbers.grad_norm),
            "first_rows": self._decode_first_rows(held.noised_batches),
            "loader": held.position,
            "draws": described,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_bytes_atomic(path.with_suffix(".safetensors"), safetensors.torch.save(tensors))
        write_bytes_atomic(path, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())

    def _decode_first_rows(self, noised_batches: Sequence[NoisedBatch]) -> list[dict[str, str]]:
        """What the model read in the first stream of the first rows, and all tokens that it should have said."""
        shown: list[dict[str, str]] = []
        for noised_batch in noised_batches:
            S = noised_batch.inputs_BS.shape[1]
            L = S // noised_batch.pattern.positions_per_token
            row_R = noised_batch.positions_N.cpu() // S
            for row, read in enumerate(noised_batch.inputs_BS[: NUM_SHOWN_ROWS - len(shown), :L].tolist()):
                wanted = noised_batch.targets_N.cpu()[row_R == row].tolist()
                shown.append({"read": self._decode(read), "wanted": self._decode(wanted)})
        return shown

    def _remove_oldest(self) -> None:
        for path in sorted(self.folder.glob(f"step-*-rank-{self._rank}.json"))[:-MAX_RECORDS]:
            path.unlink()
            path.with_suffix(".safetensors").unlink(missing_ok=True)


def load_skipped_step(path: Path) -> tuple[dict[str, Any], list[NoisedBatch]]:
    """A record (its ``.json``) and the draws of its step, on the CPU.

    Raises:
        ValueError: it is not a record, or not whole; names the file.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        tensors = safetensors.torch.load(path.with_suffix(".safetensors").read_bytes())
        return record, [
            _load_noised_batch(described, tensors, index) for index, described in enumerate(record["draws"])
        ]
    except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} is not the whole record of a skipped step: {error}") from error


def _load_noised_batch(described: dict[str, Any], tensors: dict[str, Tensor], index: int) -> NoisedBatch:
    kinds = {kind.__name__: kind for kind in PATTERNS}
    prefix = f"{index}."
    fields = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)} | described
    options = {name.removeprefix("pattern."): each for name, each in fields.items() if name.startswith("pattern.")}
    return NoisedBatch(
        inputs_BS=fields["inputs_BS"],
        pattern=kinds[described["pattern"]](**options),
        positions_N=fields["positions_N"],
        targets_N=fields["targets_N"],
        weights_N=fields["weights_N"],
        num_targets=described["num_targets"],
        denominator=described["denominator"],
    )


def _to_json_number(value: float) -> float | str:
    """JSON has no infinity: it becomes a word."""
    return value if math.isfinite(value) else str(value)
