"""Read rows as a training run does, and count their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from config.data import DataConfig
from config.train import TrainConfig
from diffusionlm.checkpoints.model_files import load_tokenizer
from diffusionlm.data.packing import Row, fill_to_longest
from diffusionlm.data.pipeline import (
    MixtureComponent,
    build_pair_reader,
    build_row_reader,
    count_skipped,
    describe_skipped,
    open_components,
)
from diffusionlm.data.reader import Split
from files.terminal_text import print_message
from tokenizer import Tokenizer

ROWS_PER_READ = 64


@dataclass(frozen=True)
class RowSettings:
    """What decides the rows of a run."""

    data: DataConfig
    components: list[MixtureComponent]
    tokenizer: Tokenizer
    row_length: int
    block_length: int | None
    """The longest block; None: bidirectional."""
    seed: int = 0
    has_pairs: bool = False
    """Rows are preferences: the chosen conversation, then the rejected one."""
    fill_batch_size: int | None = None
    """Rows of a step, which are filled up to the longest of them. None: rows do not depend on the step."""
    validated_run: TrainConfig | None = None
    """The rows are those of this run's validations. None: those of an epoch."""


@dataclass
class RowCounts:
    """Numbers of the rows that were read."""

    is_complete: bool
    """All rows of the epoch, or of the validation, were read."""
    rows: int = 0
    documents: int = 0
    answers: int = 0
    """Segments: of text, the documents."""
    positions: int = 0
    tokens: int = 0
    """Positions without padding."""
    targets: int = 0
    """With fill."""
    fill: int = 0
    document_lengths: list[int] = field(default_factory=list)
    answer_lengths: list[int] = field(default_factory=list)
    """Targets of each segment, without fill."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Records left out or repaired, by reason."""

    def add(self, row: Row) -> None:
        """Add the tokens of a row."""
        is_token_L = row.document_ids_L >= 0
        segment_ids_L = row.document_ids_L if row.segment_ids_L is None else row.segment_ids_L
        is_fill_L = np.zeros_like(is_token_L) if row.is_fill_L is None else row.is_fill_L
        self.rows += 1
        self.positions += len(row.tokens_L)
        self.tokens += int(is_token_L.sum())
        self.targets += int(row.loss_mask_L.sum())
        self.fill += int(is_fill_L.sum())
        self.document_lengths += np.bincount(row.document_ids_L[is_token_L]).tolist()
        is_answer_L = row.loss_mask_L & ~is_fill_L
        num_segments = int(segment_ids_L.max()) + 1
        self.answer_lengths += np.bincount(segment_ids_L[is_answer_L], minlength=num_segments).tolist()
        self.documents, self.answers = len(self.document_lengths), len(self.answer_lengths)

    def to_json(self) -> dict[str, Any]:
        """The numbers as a JSON value, with quantiles in place of the lengths."""
        values = {key: value for key, value in vars(self).items() if not key.endswith("_lengths")}
        lengths = {
            "document_length": quantiles(self.document_lengths),
            "answer_length": quantiles(self.answer_lengths),
        }
        return values | {"padding_share": 1.0 - self.tokens / max(1, self.positions)} | lengths


QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)


def quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """Shortest, longest and other quantiles, by percent; empty without lengths."""
    if not lengths:
        return {}
    values = np.quantile(lengths, QUANTILES, method="nearest")
    return {f"{share:.0%}": int(value) for share, value in zip(QUANTILES, values, strict=True)}


def settings_of_config(config: TrainConfig, split: Split) -> RowSettings:
    """The settings of a training run, with the tokenizer of its directory, if there is one.

    Raises:
        ValueError: the sources, the tokenizer or the chat template cannot be read.
    """
    from diffusionlm.training.setup import find_tokenizer

    components = open_components(config.data, split)
    directory = config.run.directory / "tokenizer"
    tokenizer = (
        load_tokenizer(directory)
        if directory.is_dir()
        else find_tokenizer(
            config.tokenizer, config.model.init_from, open_components(config.data, "train"), print_message
        )
    )
    block_length = config.objective.longest_block_length
    has_pairs = config.objective.kind == "preference" and split == "train"  # validation is on chosen answers
    return RowSettings(
        config.data,
        components,
        tokenizer,
        config.row_length,
        block_length,
        config.run.seed,
        has_pairs,
        config.training.batch_size if config.data.fills_to_longest else None,
        config if split == "validation" else None,
    )


def settings_of_data(
    data: DataConfig, tokenizer: str, row_length: int, block_length: int | None, split: Split
) -> RowSettings:
    """The settings of a run with this section and this tokenizer.

    Raises:
        ValueError: the files or the tokenizer cannot be read.
    """
    return RowSettings(data, open_components(data, split), load_tokenizer(tokenizer), row_length, block_length)


def read_rows(settings: RowSettings) -> Iterator[Row]:
    """Iterate over the rows of an epoch in the order of training, or over those of a run's validations.

    Raises:
        ValueError: there are none.
    """
    if settings.validated_run is not None:
        from diffusionlm.evaluation.validation import read_validation_rows

        yield from read_validation_rows(settings.validated_run, settings.tokenizer, settings.components)
        return
    build_reader = build_pair_reader if settings.has_pairs else build_row_reader
    reader = build_reader(
        settings.components,
        settings.data,
        settings.tokenizer,
        settings.row_length,
        settings.seed,
        block_length=settings.block_length,
    )
    position, is_empty = None, True
    while True:
        rows, position = reader.read(0, position, settings.fill_batch_size or ROWS_PER_READ)
        yield from fill_to_longest(rows) if rows and settings.fill_batch_size else rows
        is_empty = is_empty and not rows
        if position is None:
            break
    if is_empty:
        raise ValueError(f"[data]: the sources have no documents{describe_skipped(settings.components)}")


def count_rows(rows: Iterator[Row], settings: RowSettings, num_kept: int, max_rows: int) -> tuple[list[Row], RowCounts]:
    """Count the rows, up to a number, and keep the first ones."""
    counts, kept = RowCounts(is_complete=True), list[Row]()
    for row in rows:
        if counts.rows == max_rows:
            counts.is_complete = False
            break
        counts.add(row)
        if len(kept) < num_kept:
            kept.append(row)
    counts.skipped = count_skipped(settings.components)
    return kept, counts
