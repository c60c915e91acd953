"""Format rows and their counts for people, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cli.data.reading import RowCounts, RowSettings, quantiles
from cli.tables import make_table
from diffusionlm.data.packing import Row
from files.terminal_text import escape_control_characters
from logger.pages import Part
from tokenizer import Tokenizer

if TYPE_CHECKING:
    from rich.text import Text

STYLES = {"context": "dim", "answer": "green", "stop": "bold reverse green", "fill": "magenta", "block": "cyan"}

LEGEND = "prompts as they are, [[learned tokens]], {fill}, | begins a block"

MAX_SEGMENTS = 3
"""Segments of a shortened row."""
MAX_TOKENS = 160
"""Tokens of a shortened row, about."""


@dataclass(frozen=True)
class _Segment:
    """A segment of a document in a row."""

    document: int
    number: int
    """Index within its document."""
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    is_fill: NDArray[np.bool_]


def _split_row(row: Row) -> Iterator[_Segment]:
    """Iterate over the segments of a row; a document of text is one segment."""
    segment_ids_L = row.document_ids_L if row.segment_ids_L is None else row.segment_ids_L
    is_fill_L = np.zeros(len(row.tokens_L), dtype=np.bool_) if row.is_fill_L is None else row.is_fill_L
    for document in range(int(row.document_ids_L.max()) + 1):
        numbers = np.unique(segment_ids_L[row.document_ids_L == document])
        for index, number in enumerate(numbers):
            part = (row.document_ids_L == document) & (segment_ids_L == number)
            yield _Segment(document, index, row.tokens_L[part], row.loss_mask_L[part], is_fill_L[part])


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
        num_fill = int(segment.is_fill.sum())
        num_answer = int(segment.loss_mask.sum()) - num_fill
        name = f"document {segment.document + 1}, segment {segment.number + 1}"
        numbers = f"{len(segment.tokens) - num_answer - num_fill:,} context, {num_answer:,} learned, {num_fill:,} fill"
        parts.append(Text(f"- {name}: {numbers}", "bold"))
        parts.append(_format_segment(segment, settings, None if is_full else MAX_TOKENS // len(first_segments)))
    if len(first_segments) < len(segments):
        parts.append(Text(f"- {len(segments) - len(first_segments):,} more segments", "bold"))
    return [*parts, ""]


def _format_segment(segment: _Segment, settings: RowSettings, max_tokens: int | None) -> Text:
    from rich.text import Text

    tokenizer, text = settings.tokenizer, Text()
    kinds = [
        "fill" if is_fill else "answer" if is_target else "context"
        for is_target, is_fill in zip(segment.loss_mask, segment.is_fill, strict=True)
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
    """Find the tokens to leave out: the middle of long contexts and answers. Fill is short as it is."""
    runs = [list(group) for _, group in groupby(range(len(kinds)), key=lambda index: kinds[index])]
    half = max(4, max_tokens // len(runs) // 2)
    return {index for run in runs if kinds[run[0]] != "fill" and len(run) > 3 * half for index in run[half:-half]}


OPENING = {"context": "", "answer": "[[", "fill": "{"}
CLOSING = {"": "", "context": "", "answer": "]]", "fill": "}"}


def _append_tokens(text: Text, token_ids: Sequence[int], kind: str, tokenizer: Tokenizer) -> None:
    """Append the text of tokens; equal fill tokens as a number, and special tokens of an answer in their own style."""
    if kind == "fill":
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
        is_answer = segment.loss_mask & ~segment.is_fill
        parts = {"context": ~segment.loss_mask, "answer": is_answer, "fill": segment.is_fill}
        texts = {name: tokenizer.decode(segment.tokens[part].tolist()) for name, part in parts.items()}
        segments.append({"document": segment.document, "segment": segment.number, **texts})
    arrays = {name.removesuffix("_L"): None if value is None else value.tolist() for name, value in vars(row).items()}
    return {"segments": segments, **arrays}


def format_counts(counts: RowCounts, settings: RowSettings) -> list[Part]:
    """Format the table of numbers."""
    answer_tokens = counts.targets - counts.fill
    whole = "of an epoch" if settings.validated_run is None else "of the run's validations"
    scope = whole if counts.is_complete else "the first ones; others were not counted"
    padding = 1.0 - counts.tokens / max(1, counts.positions)
    blocks = "none, both directions" if settings.block_length is None else f"{settings.block_length:,} tokens"
    lines = [
        ("rows", f"{counts.rows:,} of {settings.row_length:,} positions ({scope})"),
        ("documents", f"{counts.documents:,}, with {counts.answers:,} segments"),
        ("tokens", f"{counts.tokens:,}, and {padding:.1%} of the positions are padding"),
        ("learned", f"{answer_tokens:,} tokens, {answer_tokens / max(1, counts.tokens):.1%} of all"),
        ("fill", f"{counts.fill:,} tokens, {counts.fill / max(1, counts.targets):.1%} of the targets"),
        ("document length", _format_quantiles(counts.document_lengths)),
        ("learned per segment", _format_quantiles(counts.answer_lengths)),
        ("blocks", blocks),
        ("left out or mended", "nothing" if not counts.skipped else ""),
    ]
    logs = [log for component in settings.components for log in component.skip_logs]
    examples = {reason: f"; the first: {text}" for log in logs for reason, text in log.examples.items()}
    lines += [(f"  {count:,}", reason + examples.get(reason, "")) for reason, count in sorted(counts.skipped.items())]
    return [make_table(lines)]


def _format_quantiles(lengths: Sequence[int]) -> str:
    return ", ".join(f"{share} {value:,}" for share, value in quantiles(lengths).items()) or "none"
