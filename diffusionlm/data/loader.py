"""Rows in, draws out: the loader of a training run, exactly resumable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from config.data import DataConfig
from diffusionlm.data.packing import Encoder, PackedRows, PaddedRows, Row, cut_at_random
from diffusionlm.data.shuffle import WindowShuffle
from diffusionlm.data.sources import DocumentSource, Position, Reader
from diffusionlm.diffusion.batch import Batch, Draw, DrawKey
from diffusionlm.diffusion.chance import Stream, generator
from diffusionlm.diffusion.objectives import Objective


def rows_of(source: DocumentSource, config: DataConfig, tokenizer: Encoder, row_length: int, seed: int) -> Reader[Row]:
    """The rows of a source: documents shuffled, cut into rows, rows shuffled."""
    documents: Reader[str] = source
    if config.document_shuffle_window > 1:
        documents = WindowShuffle(documents, config.document_shuffle_window, seed, Stream.DOCUMENT_ORDER)
    rows: Reader[Row]
    match config.rows:
        case "packed":
            rows = PackedRows(documents, tokenizer, row_length, config.begin_with_eos, config.end_with_eos)
        case "padded":
            rows = PaddedRows(documents, tokenizer, row_length, config.begin_with_eos, config.end_with_eos)
    if config.row_shuffle_window > 1:
        rows = WindowShuffle(rows, config.row_shuffle_window, seed, Stream.ROW_ORDER)
    return rows


def batch_of(rows: Sequence[Row]) -> Batch:
    """Rows, stacked."""
    return Batch(
        tokens_BL=torch.from_numpy(np.stack([row.tokens_L for row in rows])).long(),
        is_target_BL=torch.from_numpy(np.stack([row.is_target_L for row in rows])),
        document_BL=torch.from_numpy(np.stack([row.documents_L for row in rows])),
    )


def count_rows(rows: Reader[Row]) -> int:
    """Rows of one epoch, by reading it."""
    total, position = 0, None
    while True:
        some, position = rows.read(0, position, 1_024)
        total += len(some)
        if position is None:
            return total


@dataclass
class Loader:
    """The draws of each optimizer step, epoch after epoch."""

    rows: Reader[Row]
    objective: Objective
    batch_size: int
    micro_batch_size: int
    seed: int
    random_length_probability: float = 0.0
    """Of a step whose rows are cut at random places."""
    epoch: int = 0
    position: Position = None

    def next_step(self, step: int) -> list[Draw]:
        """The micro-batches of a step.

        Raises:
            ValueError: the source has no rows at all.
        """
        rows = self._next_rows()
        if generator(self.seed, Stream.RANDOM_LENGTH, step).random() < self.random_length_probability:
            chances = (generator(self.seed, Stream.RANDOM_LENGTH, step, row) for row in range(len(rows)))
            rows = [cut_at_random(row, chance) for row, chance in zip(rows, chances, strict=True)]
        draws = []
        for first in range(0, self.batch_size, self.micro_batch_size):
            key = DrawKey(self.seed, step, first, self.batch_size)
            draws.append(self.objective.draw(batch_of(rows[first : first + self.micro_batch_size]), key))
        return draws

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

    def state_dict(self) -> dict[str, Any]:
        """Where the next step reads; JSON."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.epoch, self.position = state["epoch"], state["position"]
