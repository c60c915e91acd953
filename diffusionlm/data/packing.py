"""Pack documents of any length into rows of equal length: one row of the [B, L] batch each."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from diffusionlm.data.reader import ReaderPosition, ResumableReader, Tokens, WindowedReader

SizedItem = TypeVar("SizedItem", bound=Sized)

EMPTY_TOKENS: Tokens = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class Document:
    """The T tokens of a conversation; a text is `Tokens` alone, all of them targets.

    A document is never cut: its reader has shortened it to a row.
    """

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    """True: a target, which is part of an answer, its stop token, or EOS padding."""
    is_eos_padding: NDArray[np.bool_]
    """True for targets that are padding after the stop token."""
    segment_ids: NDArray[np.int32]
    """0, 1, ...: one segment per answer, with the context since the answer before it."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Row:
    """One row of L tokens with the documents in it."""

    tokens_L: NDArray[np.int32]
    document_ids_L: NDArray[np.int32]
    """Index of the document within the row, from 0; -1: padding, which attends only to itself."""
    loss_mask_L: NDArray[np.bool_]
    """True: the position may be noised and has a loss. False for padding, prompts and the end-of-text token at the
    start of a document."""
    segment_ids_L: NDArray[np.int32] | None = None
    """Index of the segment within the row, from 0; -1: padding. Each document of text is one segment. None: a run
    without conversations."""
    is_eos_padding_L: NDArray[np.bool_] | None = None
    """Targets that are padding after a stop token. None: a run without conversations."""


@dataclass(frozen=True)
class RowFormat:
    """The length of rows and the end-of-text tokens around each document.

    Raises:
        ValueError: a row has no room for a document's start and one token.
    """

    row_length: int
    eos_token_id: int
    begin_with_eos: bool = False
    """Each document, and each row that continues one, begins with end-of-text: context without a loss."""
    end_with_eos: bool = True

    def __post_init__(self) -> None:
        if self.begin_with_eos and self.row_length < 2:
            raise ValueError(
                "data.begin_with_eos needs rows of at least 2 tokens, one of them with a loss; row_length is "
                f"{self.row_length}: raise it"
            )

    def append_eos(self, tokens: Tokens) -> Tokens:
        """Append the end-of-text token, if documents end with it."""
        if not self.end_with_eos:
            return tokens
        return np.concatenate((tokens, np.array([self.eos_token_id], dtype=np.int32)))

    def empty_row(self) -> Row:
        """Return a row that is all padding."""
        return Row(
            tokens_L=np.full(self.row_length, self.eos_token_id, dtype=np.int32),
            document_ids_L=np.full(self.row_length, -1, dtype=np.int32),
            loss_mask_L=np.zeros(self.row_length, dtype=np.bool_),
        )

    def write_document(self, row: Row, tokens: Tokens, start: int, index: int) -> int:
        """Write tokens of document ``index`` into the row at ``start``. Returns the position after them."""
        first = start + self.begin_with_eos  # padding is end-of-text, so the token at the start is already there
        end = first + len(tokens)
        row.tokens_L[first:end] = tokens
        row.document_ids_L[start:end] = index
        row.loss_mask_L[first:end] = True
        return end


@dataclass
class PackedRowReader:
    """Rows of consecutive documents without gaps; the last row of an epoch is padded.

    A document that is cut continues in the next row, as a new document. Documents without tokens are left out.
    """

    upstream: ResumableReader[Tokens]
    row_format: RowFormat

    def __post_init__(self) -> None:
        self._cached: tuple[tuple[int, ReaderPosition] | None, Tokens, ReaderPosition] = (None, EMPTY_TOKENS, None)

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[Row], ReaderPosition]:
        """Read rows; a position is that of a document, and an offset into its tokens."""
        position = position or {"document": None, "offset": 0}
        rows: list[Row] = []
        while len(rows) < limit and position is not None:
            row, position = self._build_row(epoch, position)
            if row is not None:
                rows.append(row)
        return rows, position

    def _build_row(self, epoch: int, position: ReaderPosition) -> tuple[Row | None, ReaderPosition]:
        row_format = self.row_format
        row, filled, num_documents = row_format.empty_row(), 0, 0
        while filled < row_format.row_length:
            tokens, next_document = self._read_document(epoch, position["document"])
            num_free = row_format.row_length - filled - row_format.begin_with_eos
            piece = tokens[position["offset"] : position["offset"] + num_free]
            if len(tokens) and num_free == 0:
                return row, position  # a start without a token after it has no loss: the position stays padding
            if len(piece):
                filled = row_format.write_document(row, piece, filled, num_documents)
                num_documents += 1
            if position["offset"] + len(piece) < len(tokens):
                return row, {"document": position["document"], "offset": position["offset"] + len(piece)}
            if next_document is None:
                return (row if filled else None), None
            position = {"document": next_document, "offset": 0}
        return row, position

    def _read_document(self, epoch: int, position: ReaderPosition) -> tuple[Tokens, ReaderPosition]:
        """Return the tokens of the document at a position (none at the end), and the position of the next one."""
        key, tokens, next_position = self._cached
        if key != (epoch, position):
            documents, next_position = self.upstream.read(epoch, position, 1)
            tokens = self.row_format.append_eos(documents[0]) if documents else EMPTY_TOKENS
            self._cached = ((epoch, position), tokens, next_position)
        return tokens, next_position


@dataclass
class PaddedRowReader:
    """Rows of one document each: long documents are truncated, short ones padded.

    A truncated document also ends in end-of-text. Documents without tokens are left out.
    """

    upstream: ResumableReader[Tokens]
    row_format: RowFormat

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[Row], ReaderPosition]:
        """Read rows; positions are those of the documents."""
        rows: list[Row] = []
        while True:
            documents, position = self.upstream.read(epoch, position, limit - len(rows))
            rows += [row for row in map(self._build_row, documents) if row is not None]
            if position is None or len(rows) == limit:
                return rows, position

    def _build_row(self, tokens: Tokens) -> Row | None:
        row_format = self.row_format
        num_free = row_format.row_length - row_format.begin_with_eos - row_format.end_with_eos
        tokens = row_format.append_eos(tokens[:num_free])
        if not len(tokens):
            return None
        row = row_format.empty_row()
        row_format.write_document(row, tokens, 0, 0)
        return row


def pack_best_fit(
    upstream: ResumableReader[Tokens], row_format: RowFormat, window_size: int
) -> WindowedReader[Tokens, Row]:
    """Pack documents so that only those longer than a row are cut; free space at the end of a row is padding.

    Best-fit decreasing (Ding et al. 2024, "Fewer truncations improve language modeling") within windows of
    ``window_size`` documents: from the longest to the shortest, each goes into the fullest row with enough space.
    """

    return WindowedReader(
        upstream, window_size, lambda _epoch, _index, documents: lambda: _pack_window(documents, row_format)
    )


def _pack_window(documents: list[Tokens], row_format: RowFormat) -> list[Row]:
    max_length = row_format.row_length - row_format.begin_with_eos
    pieces = [
        tokens[start : start + max_length]
        for tokens in map(row_format.append_eos, documents)
        for start in range(0, len(tokens), max_length)
    ]
    rows: list[Row] = []
    for group in group_best_fit(pieces, row_format.row_length, row_format.begin_with_eos):
        row, filled = row_format.empty_row(), 0
        for index, piece in enumerate(group):
            filled = row_format.write_document(row, piece, filled, index)
        rows.append(row)
    return rows


def group_best_fit(pieces: Sequence[SizedItem], capacity: int, overhead: int = 0) -> list[list[SizedItem]]:
    """Distribute pieces to rows: from the longest to the shortest, each goes into the fullest row with enough space.

    Args:
        capacity: positions of a row; no piece is longer.
        overhead: positions that each piece needs beside its own.
    """
    groups: list[list[SizedItem]] = []
    free_space: list[tuple[int, int]] = []  # (free positions, row index), ascending
    for piece in sorted(pieces, key=len, reverse=True):  # stable: pieces of equal length keep their order
        size = len(piece) + overhead
        best = bisect_left(free_space, (size, 0))
        if best < len(free_space):
            num_free, row_index = free_space.pop(best)
        else:
            num_free, row_index = capacity, len(groups)
            groups.append([])
        groups[row_index].append(piece)
        insort(free_space, (num_free - size, row_index))
    return groups


def split_row_randomly(row: Row, rng: np.random.Generator) -> Row:
    """Split the row into documents of random length: cut the rest at a uniform position until nothing is left.

    LLaDA truncates 1 % of its batches to a random length (Nie et al. 2025, guidelines); here the rest is kept.
    """
    length = len(row.tokens_L)
    piece_ids_L = np.zeros(length, dtype=np.int32)
    start = 0
    while start < length:
        start += int(rng.integers(1, length - start + 1))
        piece_ids_L[start:] += 1
    # The sum changes at every old and new boundary; padding stays padding.
    document_ids_L = np.where(row.document_ids_L < 0, row.document_ids_L, row.document_ids_L + piece_ids_L)
    return Row(row.tokens_L, document_ids_L.astype(np.int32), row.loss_mask_L)


def pack_conversations(
    upstream: ResumableReader[Document], row_format: RowFormat, window_size: int, *, is_padded: bool
) -> WindowedReader[Document, Row]:
    """Pack whole conversations: one per row, or combined as `pack_best_fit` does. None is cut, and they bring all of
    their tokens, whatever the format says of end-of-text tokens.

    Args:
        window_size: documents that are packed together.
    """
    row_format = replace(row_format, begin_with_eos=False, end_with_eos=False)

    def pack(documents: list[Document]) -> list[Row]:
        groups = (
            [[document] for document in documents] if is_padded else group_best_fit(documents, row_format.row_length)
        )
        return [_build_conversation_row(group, row_format) for group in groups]

    return WindowedReader(upstream, window_size, lambda _epoch, _index, documents: lambda: pack(documents))


def pack_pairs(upstream: ResumableReader[tuple[Document, Document]], row_format: RowFormat) -> WindowedReader[Any, Row]:
    """One row for each chosen and rejected conversation, in this order."""
    row_format = replace(row_format, begin_with_eos=False, end_with_eos=False)

    def pack(pairs: list[tuple[Document, Document]]) -> list[Row]:
        return [_build_conversation_row(pair, row_format) for pair in pairs]

    return WindowedReader(upstream, 1, lambda _epoch, _index, pairs: lambda: pack(pairs))


def _build_conversation_row(documents: Sequence[Document], row_format: RowFormat) -> Row:
    row = label_segments(row_format.empty_row())
    assert row.segment_ids_L is not None and row.is_eos_padding_L is not None
    start, num_segments = 0, 0
    for index, document in enumerate(documents):
        part = slice(start, row_format.write_document(row, document.tokens, start, index))
        row.loss_mask_L[part] = document.loss_mask
        row.is_eos_padding_L[part] = document.is_eos_padding
        row.segment_ids_L[part] = document.segment_ids + num_segments
        start, num_segments = part.stop, num_segments + int(document.segment_ids[-1]) + 1
    return row


def label_segments(row: Row) -> Row:
    """Return a row of text as it stands beside conversations: each document is one segment without EOS padding."""
    return replace(
        row, segment_ids_L=row.document_ids_L.copy(), is_eos_padding_L=np.zeros(len(row.tokens_L), dtype=np.bool_)
    )


@dataclass
class SegmentLabelingReader:
    """Rows of text for a mixture with conversations: with their segments."""

    upstream: ResumableReader[Row]

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[Row], ReaderPosition]:
        rows, position = self.upstream.read(epoch, position, limit)
        return [label_segments(row) for row in rows], position


def pad_to_longest(rows: Sequence[Row]) -> list[Row]:
    """Return rows of one conversation each, padded with end-of-text up to the longest of them: LLaDA's batches.

    The EOS padding belongs to the last answer and is learned.
    """
    length = max(int((row.document_ids_L >= 0).sum()) for row in rows)
    return [_pad_row(row, length) for row in rows]


def _pad_row(row: Row, length: int) -> Row:
    assert row.segment_ids_L is not None and row.is_eos_padding_L is not None
    size = int((row.document_ids_L >= 0).sum())
    padding = slice(size, length)  # its tokens are end-of-text already
    padded = Row(*(values.copy() for values in vars(row).values()))
    assert padded.segment_ids_L is not None and padded.is_eos_padding_L is not None
    padded.document_ids_L[padding] = 0
    padded.segment_ids_L[padding] = row.segment_ids_L[size - 1]
    padded.loss_mask_L[padding] = True
    padded.is_eos_padding_L[padding] = True
    return padded
