"""Read rows as a training run does, count their tokens, and format them for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from config.data import DataConfig
from config.train import TrainConfig
from diffusionlm.checkpoints.model_files import load_tokenizer
from diffusionlm.data.packing import Row, pad_to_longest
from diffusionlm.data.pipeline import (
    MixtureComponent,
    build_pair_reader,
    build_row_reader,
    count_skipped,
    describe_skipped,
    open_components,
)
from diffusionlm.data.reader import Split
from files.terminal_text import escape_control_characters, print_message
from logger.pages import Part, Table
from tokenizer import Tokenizer

if TYPE_CHECKING:
    from rich.text import Text

ROWS_PER_READ = 64
MAX_COUNTED_ROWS = 10_000
QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)

STYLES = {"context": "dim", "answer": "green", "stop": "bold reverse green", "eos_padding": "magenta", "block": "cyan"}
OPENING = {"context": "", "answer": "[[", "eos_padding": "{"}
CLOSING = {"": "", "context": "", "answer": "]]", "eos_padding": "}"}
LEGEND = "prompts as they are, [[learned tokens]], {EOS padding}, | begins a block"

MAX_SEGMENTS = 3
"""Segments of a shortened row."""
MAX_TOKENS = 160
"""Tokens of a shortened row, about."""


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
    padded_batch_size: int | None = None
    """Rows of a step, which are padded to the longest of them. None: rows do not depend on the step."""
    validated_run: TrainConfig | None = None
    """The rows are those of this run's validations. None: those of an epoch."""


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
        config.training.batch_size if config.data.pads_to_longest else None,
        config if split == "validation" else None,
    )


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
        rows, position = reader.read(0, position, settings.padded_batch_size or ROWS_PER_READ)
        yield from pad_to_longest(rows) if rows and settings.padded_batch_size else rows
        is_empty = is_empty and not rows
        if position is None:
            break
    if is_empty:
        raise ValueError(f"[data]: the sources have no documents{describe_skipped(settings.components)}")


def count_rows(rows: Iterator[Row], settings: RowSettings, num_kept: int) -> tuple[list[Row], dict[str, Any]]:
    """Count the first `MAX_COUNTED_ROWS` rows, and keep the first ones of them.

    Returns:
        The rows, and their numbers, as a JSON value. ``answers`` are segments (of text, the documents), ``targets``
        have the EOS padding, ``skipped`` are records left out or repaired, by reason; lengths are quantiles by percent.
    """
    kept, is_complete = list[Row](), True
    counts = dict.fromkeys(("rows", "positions", "tokens", "targets", "eos_padding"), 0)
    documents, answers = list[int](), list[int]()
    for row in rows:
        if counts["rows"] == MAX_COUNTED_ROWS:
            is_complete = False
            break
        if len(kept) < num_kept:
            kept.append(row)
        segment_ids_L, is_eos_padding_L = _segments_and_eos_padding(row)
        is_token_L = row.document_ids_L >= 0
        numbers = (1, len(is_token_L), is_token_L.sum(), row.loss_mask_L.sum(), is_eos_padding_L.sum())
        counts = {name: count + int(number) for (name, count), number in zip(counts.items(), numbers, strict=True)}
        documents += np.bincount(row.document_ids_L[is_token_L]).tolist()
        answer_ids = segment_ids_L[row.loss_mask_L & ~is_eos_padding_L]
        answers += np.bincount(answer_ids, minlength=int(segment_ids_L.max()) + 1).tolist()
    return kept, {
        "is_complete": is_complete,
        **counts,
        "documents": len(documents),
        "answers": len(answers),
        "skipped": count_skipped(settings.components),
        "padding_share": 1.0 - counts["tokens"] / max(1, counts["positions"]),
        "document_length": _quantiles(documents),
        "answer_length": _quantiles(answers),
    }


def _segments_and_eos_padding(row: Row) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Segment of each position, a document of text being one, and whether it is EOS padding."""
    segment_ids_L = row.document_ids_L if row.segment_ids_L is None else row.segment_ids_L
    is_eos_padding_L = (
        np.zeros(len(row.tokens_L), dtype=np.bool_) if row.is_eos_padding_L is None else row.is_eos_padding_L
    )
    return segment_ids_L, is_eos_padding_L


def _quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """Shortest, longest and other quantiles, by percent; empty without lengths."""
    if not lengths:
        return {}
    values = np.quantile(lengths, QUANTILES, method="nearest")
    return {f"{share:.0%}": int(value) for share, value in zip(QUANTILES, values, strict=True)}


@dataclass(frozen=True)
class _Segment:
    """A segment of a document in a row."""

    document: int
    number: int
    """Index within its document."""
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    is_eos_padding: NDArray[np.bool_]


def _split_row(row: Row) -> Iterator[_Segment]:
    """Iterate over the segments of a row; a document of text is one segment."""
    segment_ids_L, is_eos_padding_L = _segments_and_eos_padding(row)
    for document in range(int(row.document_ids_L.max()) + 1):
        numbers = np.unique(segment_ids_L[row.document_ids_L == document])
        for index, number in enumerate(numbers):
            part = (row.document_ids_L == document) & (segment_ids_L == number)
            yield _Segment(document, index, row.tokens_L[part], row.loss_mask_L[part], is_eos_padding_L[part])


def format_row(row: Row, number: int, settings: RowSettings, *, is_full: bool) -> list[Part | Text]:
    """Format the segments of a row, each below a line with its numbers; without ``is_full`` in some 20 lines."""
    from rich.text import Text

    num_tokens = int((row.document_ids_L >= 0).sum())
    parts: list[Part | Text] = []
    if number == 1:
        parts.append(f"{LEGEND}{'' if is_full else '; --full shows rows in full'}\n")
    parts.append(
        Text(
            f"row {number}: {num_tokens:,} of {len(row.tokens_L):,} positions, {row.loss_mask_L.sum():,} learned",
            "bold",
        )
    )
    segments = list(_split_row(row))
    first_segments = segments if is_full else segments[:MAX_SEGMENTS]
    for segment in first_segments:
        num_eos_padding = int(segment.is_eos_padding.sum())
        num_answer = int(segment.loss_mask.sum()) - num_eos_padding
        name = f"document {segment.document + 1}, segment {segment.number + 1}"
        num_context = len(segment.tokens) - num_answer - num_eos_padding
        numbers = f"{num_context:,} context, {num_answer:,} learned, {num_eos_padding:,} EOS padding"
        parts.append(Text(f"- {name}: {numbers}", "bold"))
        parts.append(_format_segment(segment, settings, None if is_full else MAX_TOKENS // len(first_segments)))
    if len(first_segments) < len(segments):
        parts.append(Text(f"- {len(segments) - len(first_segments):,} more segments", "bold"))
    return [*parts, ""]


def _format_segment(segment: _Segment, settings: RowSettings, max_tokens: int | None) -> Text:
    from rich.text import Text

    tokenizer, text = settings.tokenizer, Text()
    kinds = [
        "eos_padding" if is_eos_padding else "answer" if is_target else "context"
        for is_target, is_eos_padding in zip(segment.loss_mask, segment.is_eos_padding, strict=True)
    ]
    hidden = set[int]() if max_tokens is None else _find_hidden(kinds, max_tokens)
    length = len(kinds) if settings.block_length in (None, 1) else settings.block_length
    previous_kind = ""
    for (kind, is_hidden, _), group in groupby(
        range(len(kinds)), key=lambda index: (kinds[index], index in hidden, index not in hidden and index // length)
    ):
        indices = list(group)
        text.append(CLOSING[previous_kind] if kind != previous_kind else "", STYLES.get(previous_kind, ""))
        text.append("|" if indices[0] and indices[0] % length == 0 else "", STYLES["block"])
        text.append(OPENING[kind] if kind != previous_kind else "", STYLES[kind])
        if is_hidden:
            text.append(f" <... {len(indices):,} tokens ...> ", STYLES["block"])
        else:
            _append_tokens(text, segment.tokens[indices].tolist(), kind, tokenizer)
        previous_kind = kind
    text.append(CLOSING[previous_kind], STYLES[previous_kind])
    return text


def _find_hidden(kinds: Sequence[str], max_tokens: int) -> set[int]:
    """Find the tokens to leave out: the middle of long contexts and answers. EOS padding is short as it is."""
    runs = [list(group) for _, group in groupby(range(len(kinds)), key=lambda index: kinds[index])]
    half = max(4, max_tokens // len(runs) // 2)
    return {
        index for run in runs if kinds[run[0]] != "eos_padding" and len(run) > 3 * half for index in run[half:-half]
    }


def _append_tokens(text: Text, token_ids: Sequence[int], kind: str, tokenizer: Tokenizer) -> None:
    """Append the text of tokens; EOS padding as a number, and special tokens of an answer in their own style."""
    if kind == "eos_padding":
        text.append(f"{len(token_ids)} x {_decode(token_ids[:1], tokenizer)}", STYLES[kind])
        return
    for is_special, group in groupby(token_ids, key=lambda token: token in tokenizer.hidden_ids):
        style = STYLES["stop" if is_special and kind == "answer" else kind]
        text.append(_decode(list(group), tokenizer), style)


def _decode(token_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    return escape_control_characters(tokenizer.decode(token_ids))


def row_to_json(row: Row, tokenizer: Tokenizer) -> dict[str, Any]:
    """The arrays of a row, and its segments as text."""
    segments = []
    for segment in _split_row(row):
        is_answer = segment.loss_mask & ~segment.is_eos_padding
        parts = {"context": ~segment.loss_mask, "answer": is_answer, "eos_padding": segment.is_eos_padding}
        texts = {name: tokenizer.decode(segment.tokens[part].tolist()) for name, part in parts.items()}
        segments.append({"document": segment.document, "segment": segment.number, **texts})
    arrays = {name.removesuffix("_L"): None if value is None else value.tolist() for name, value in vars(row).items()}
    return {"segments": segments, **arrays}


def format_counts(counts: dict[str, Any], settings: RowSettings) -> list[Part]:
    """Format the table of numbers."""
    num_answer_tokens = counts["targets"] - counts["eos_padding"]
    whole = "of an epoch" if settings.validated_run is None else "of the run's validations"
    scope = whole if counts["is_complete"] else "the first ones; others were not counted"
    tokens, targets = max(1, counts["tokens"]), max(1, counts["targets"])
    blocks = "none, both directions" if settings.block_length is None else f"{settings.block_length:,} tokens"
    lines = [
        ("rows", f"{counts['rows']:,} of {settings.row_length:,} positions ({scope})"),
        ("documents", f"{counts['documents']:,}, with {counts['answers']:,} segments"),
        ("tokens", f"{counts['tokens']:,}, and {counts['padding_share']:.1%} of the positions are padding"),
        ("learned", f"{num_answer_tokens:,} tokens, {num_answer_tokens / tokens:.1%} of all"),
        ("EOS padding", f"{counts['eos_padding']:,} tokens, {counts['eos_padding'] / targets:.1%} of the targets"),
        ("document length", _format_quantiles(counts["document_length"])),
        ("learned per segment", _format_quantiles(counts["answer_length"])),
        ("blocks", blocks),
        ("left out or mended", "" if counts["skipped"] else "nothing"),
    ]
    logs = [log for component in settings.components for log in component.skip_logs]
    examples = {reason: f"; the first: {text}" for log in logs for reason, text in log.examples.items()}
    skipped = sorted(counts["skipped"].items())
    return [Table((), [*lines, *((f"  {count:,}", reason + examples.get(reason, "")) for reason, count in skipped)])]


def _format_quantiles(lengths: dict[str, int]) -> str:
    return ", ".join(f"{share} {value:,}" for share, value in lengths.items()) or "none"
