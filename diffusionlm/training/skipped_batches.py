"""Record the batches of skipped steps, so that a person can inspect them and repeat the step.

``<run>/skipped/step-00000007-rank-0.json`` describes the step and shows the text of the first sequences. The ``.pt``
file beside it has the noised batches, which `load_skipped_step` reads.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.models.patterns import (
    Bidirectional,
    BlockCausal,
    BlockDiffusion,
    Causal,
    DenseBias,
    PromptAndOwnBlock,
)
from diffusionlm.models.vision.inputs import ImageInputs
from diffusionlm.training.metrics import StepMetrics
from files.atomic import write_bytes_atomic
from files.json_files import read_json_object

MAX_RECORDS = 20
"""Records kept per rank, the newest."""

NUM_SHOWN_SEQUENCES = 4
"""Sequences whose text is in the record."""

PATTERNS = (Bidirectional, BlockCausal, BlockDiffusion, Causal, DenseBias, PromptAndOwnBlock)
"""Attention patterns that a file of batches may contain, beside tensors; other objects are not loaded."""


class SkippedBatches:
    """Holds the batches of the last steps until their metrics are read, and records those of skipped steps."""

    def __init__(self, folder: Path, decode: Callable[[list[int]], str], seed: int, rank: int = 0) -> None:
        """``decode`` turns token ids into text; ``seed`` is the run's."""
        self.folder = folder
        self._decode, self._seed, self._rank = decode, seed, rank
        self._pending: dict[int, tuple[list[NoisedBatch], dict[str, Any] | None]] = {}

    def hold(self, step: int, noised_batches: list[NoisedBatch], loader_state: dict[str, Any] | None) -> None:
        """Hold the batch of a step (from 1) until `release` or `record`.

        Args:
            loader_state: state before the batch was read. None: at the start of the data.
        """
        self._pending[step] = noised_batches, loader_state

    def release(self, step: int) -> None:
        self._pending.pop(step, None)

    def record(self, metrics: StepMetrics) -> str:
        """Write the batch of a skipped step. Returns its path or why it was not written, as text; never raises OSError,
        since the run is worth more than a record."""
        noised_batches, loader_state = self._pending.pop(metrics.step)
        path = self.folder / f"step-{metrics.step:08d}-rank-{self._rank}.json"
        try:
            self._write(path, metrics, noised_batches, loader_state)
            self._remove_oldest()
        except OSError as error:
            return f"its batch could not be kept: {error}"
        return f"its batch is kept in {path}"

    def _write(
        self, path: Path, metrics: StepMetrics, noised_batches: list[NoisedBatch], loader_state: dict[str, Any] | None
    ) -> None:
        noised_batches = [noised_batch.on_host or noised_batch for noised_batch in noised_batches]
        content = io.BytesIO()
        torch.save(noised_batches, content)
        record = {
            "step": metrics.step,
            "seed": self._seed,
            "rank": self._rank,
            "reason": "spike" if metrics.is_finite else "not finite",
            "loss": _to_json_number(metrics.loss),
            "grad_norm": _to_json_number(metrics.grad_norm),
            "first_rows": self._decode_first_sequences(noised_batches),
            "loader": loader_state,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_bytes_atomic(path.with_suffix(".pt"), content.getvalue())
        write_bytes_atomic(path, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())

    def _decode_first_sequences(self, noised_batches: Sequence[NoisedBatch]) -> list[dict[str, str]]:
        """Text of the model's input (its noisy half if there are two) and of all targets, for the first sequences."""
        texts: list[dict[str, str]] = []
        for noised_batch in noised_batches:
            S = noised_batch.inputs_BS.shape[1]
            L = S // noised_batch.pattern.positions_per_token
            sequence_N = noised_batch.positions_N // S
            inputs = noised_batch.inputs_BS[: NUM_SHOWN_SEQUENCES - len(texts), :L].tolist()
            for index, token_ids in enumerate(inputs):
                target_ids = noised_batch.targets_N[sequence_N == index].tolist()
                texts.append({"input": self._decode(token_ids), "target": self._decode(target_ids)})
        return texts

    def _remove_oldest(self) -> None:
        for path in sorted(self.folder.glob(f"step-*-rank-{self._rank}.json"))[:-MAX_RECORDS]:
            for suffix in (".json", ".pt", ".safetensors"):  # .safetensors: of older versions
                path.with_suffix(suffix).unlink(missing_ok=True)


def load_skipped_step(path: Path) -> tuple[dict[str, Any], list[NoisedBatch]]:
    """Load a record (its ``.json``) and the noised batches of its step, on the CPU.

    Raises:
        ValueError: the file is no record, damaged, or of an older version.
    """
    try:
        with torch.serialization.safe_globals([NoisedBatch, ImageInputs, *PATTERNS]):
            return read_json_object(path), torch.load(path.with_suffix(".pt"), weights_only=True)
    except (OSError, ValueError, RuntimeError, EOFError, LookupError, AttributeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is not the whole record of a skipped step: {error}") from error


def _to_json_number(value: float) -> float | str:
    """JSON has no infinities or NaN: they become text."""
    return value if math.isfinite(value) else str(value)
