"""Rows in, draws out: the loader of a training run, exactly resumable."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from config.data import DataConfig
from config.model import ModelConfig
from config.objective import Objective as ObjectiveConfig
from diffusionlm.data.encoding import TextEncoder
from diffusionlm.data.packing import Row, split_row_randomly
from diffusionlm.data.pipeline import MixtureComponent, build_row_reader, open_components
from diffusionlm.data.reader import ReaderPosition, ResumableReader
from diffusionlm.diffusion.noised_batch import CleanBatch, NoisedBatch, NoiseKey
from diffusionlm.diffusion.objectives import Objective, build_objective
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from tokenizer import Tokenizer


def collate_rows(rows: Sequence[Row]) -> CleanBatch:
    """Rows, stacked."""
    return CleanBatch(
        tokens_BL=torch.from_numpy(np.stack([row.tokens_L for row in rows])).long(),
        loss_mask_BL=torch.from_numpy(np.stack([row.loss_mask_L for row in rows])),
        document_BL=torch.from_numpy(np.stack([row.document_ids_L for row in rows])),
    )


def count_rows(rows: ResumableReader[Row]) -> int:
    """Rows of one epoch, by reading it."""
    total, position = 0, None
    while True:
        some, position = rows.read(0, position, 1_024)
        total += len(some)
        if position is None:
            return total


@dataclass(frozen=True)
class LoaderMetrics:
    """How the loader is doing."""

    epoch: int
    padding_share: float
    """Share of the places of the rows so far that hold padding."""
    skipped: int
    """Documents that were left out by this process so far; a run that resumes reads some again."""
    tokens_per_second: float
    """Tokens of rows, padding not counted, by the time that reading, packing and drawing took."""
    wait_seconds: float
    """What the last step waited for its draws."""
    buffered_steps: int
    """Steps that workers had ready when the last one was asked for; 0 without workers."""


class StepLoader(Protocol):
    """Where a run's draws come from: this process or workers."""

    def next_step(self, step: int) -> list[NoisedBatch]:
        """The micro-batches of a step, in order."""

    def state_dict(self) -> dict[str, Any]:
        """Where the next step reads; JSON."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; before the first step."""

    def metrics(self) -> LoaderMetrics:
        """After a step."""

    def close(self) -> None:
        """No more steps are asked for."""


@dataclass
class Loader:
    """The draws of each optimizer step, epoch after epoch, made when they are asked for.

    All ranks read the same rows, and each keeps its part of every step: so rows and draws are the same for any number
    of ranks, and a state serves any number of them.
    """

    rows: ResumableReader[Row]
    objective: Objective
    batch_size: int
    """Rows of a step, over all ranks."""
    micro_batch_size: int
    """Rows of one forward."""
    seed: int
    random_length_probability: float = 0.0
    """Of a step whose rows are cut at random places."""
    rank: int = 0
    world_size: int = 1
    parts: Sequence[MixtureComponent] = ()
    """The sources behind the rows, for their counters."""

    def __post_init__(self) -> None:
        if self.batch_size % self.world_size:
            raise ValueError(
                f"training.batch_size = {self.batch_size} must be a multiple of the {self.world_size} ranks"
            )
        self.epoch = 0
        self.position: ReaderPosition = None
        self._num_positions = 0
        self._num_padding = 0
        self._num_timed_tokens = 0
        self._seconds = 0.0
        self._last_seconds = 0.0

    def next_step(self, step: int) -> list[NoisedBatch]:
        """The micro-batches of a step: this rank's.

        Raises:
            ValueError: the source has no rows at all.
        """
        started = time.perf_counter()
        own = self.batch_size // self.world_size
        first_own = self.rank * own
        rows = self._next_rows()
        self._count_positions(rows)
        rows = rows[first_own : first_own + own]
        if keyed_rng(self.seed, RngStream.RANDOM_LENGTH, step).random() < self.random_length_probability:
            chances = (keyed_rng(self.seed, RngStream.RANDOM_LENGTH, step, first_own + row) for row in range(own))
            rows = [split_row_randomly(row, rng) for row, rng in zip(rows, chances, strict=True)]
        noised_batches = []
        for first in range(0, own, self.micro_batch_size):
            key = NoiseKey(self.seed, step, first_own + first, self.batch_size)
            noised_batches.append(
                self.objective.build_noised_batch(collate_rows(rows[first : first + self.micro_batch_size]), key)
            )
        self._last_seconds = time.perf_counter() - started
        self._seconds += self._last_seconds
        return noised_batches

    def _next_rows(self) -> list[Row]:
        rows: list[Row] = []
        while len(rows) < self.batch_size:
            started = self.position is None
            some, self.position = self.rows.read(self.epoch, self.position, self.batch_size - len(rows))
            if started and not some:
                raise ValueError("data.source has no documents to train on")
            rows += some
            if self.position is None:
                self.epoch += 1
        return rows

    def _count_positions(self, rows: list[Row]) -> None:
        places = sum(len(row.document_ids_L) for row in rows)
        padding = sum(int((row.document_ids_L < 0).sum()) for row in rows)
        self._num_positions += places
        self._num_padding += padding
        self._num_timed_tokens += places - padding

    def metrics(self) -> LoaderMetrics:
        """Of the steps so far."""
        return LoaderMetrics(
            epoch=self.epoch,
            padding_share=self._num_padding / max(1, self._num_positions),
            skipped=sum(part.num_skipped for part in self.parts),
            tokens_per_second=self._num_timed_tokens / self._seconds if self._seconds else 0.0,
            wait_seconds=self._last_seconds,
            buffered_steps=0,
        )

    def state_dict(self) -> dict[str, Any]:
        """Where the next step reads; JSON."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "places": self._num_positions,
            "padding": self._num_padding,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.epoch, self.position = state["epoch"], state["position"]
        self._num_positions, self._num_padding = state["places"], state["padding"]

    def close(self) -> None:
        """Nothing to do."""


@dataclass(frozen=True)
class LoaderSpec:
    """Everything that a loader is made of; can be sent to another process."""

    data: DataConfig
    tokenizer: Tokenizer
    row_length: int
    objective: ObjectiveConfig
    model: ModelConfig
    batch_size: int
    micro_batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1

    def open(self, parts: list[MixtureComponent] | None = None, encoder: TextEncoder | None = None) -> Loader:
        """The loader.

        Args:
            parts: the sources, where they are open already.
            encoder: who tokenises; None: this process.

        Raises:
            ValueError: nothing to read, or rows that do not fit.
        """
        parts = open_components(self.data, "train") if parts is None else parts
        return Loader(
            build_row_reader(parts, self.data, self.tokenizer, self.row_length, self.seed, encoder=encoder),
            build_objective(self.objective, self.model),
            self.batch_size,
            self.micro_batch_size,
            self.seed,
            self.data.random_length_probability,
            self.rank,
            self.world_size,
            parts,
        )
