"""Rows of equal length from documents of any length."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diffusionlm.data.reader import ItemsFuture, ReaderPosition, ResumableReader, Tokens, WindowedReader

EMPTY_TOKENS: Tokens = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class Row:
    """One row of L tokens."""

    tokens_L: NDArray[np.int32]
    document_ids_L: NDArray[np.int32]
    """Number of the document within the row, from 0; padding is -1 and sees only itself."""
    loss_mask_L: NDArray[np.bool_]
    """May be noised and scored: everything but padding and the end-of-text token that a document begins with."""


@dataclass(frozen=True)
class RowFormat:
    """How documents become rows: their length, and the end-of-text tokens around each document.

    Raises:
        ValueError: rows are too short for a beginning and a token behind it.
    """

    row_length: int
    eos_token_id: int
    begin_with_eos: bool = False
    """Each document, and each row that goes on with one, begins with end-of-text: context, never scored."""
    end: bool = True
    """Each document ends in end-of-text."""

    def __post_init__(self) -> None:
        if self.begin_with_eos and self.row_length < 2:
            raise ValueError(
                "data.begin_with_eos needs rows of at least 2 tokens, one of them scored; row_length is "
                f"{self.row_length}: raise it"
            )

    def scored(self, tokens: Tokens) -> Tokens:
        """What is scored of a document: its tokens and their end."""
        return np.concatenate((tokens, np.array([self.eos_token_id], dtype=np.int32))) if self.end else tokens

    def empty_row(self) -> Row:
        """A row without anything in it."""
        return Row(
            tokens_L=np.full(self.row_length, self.eos_token_id, dtype=np.int32),
            document_ids_L=np.full(self.row_length, -1, dtype=np.int32),
            loss_mask_L=np.zeros(self.row_length, dtype=np.bool_),
        )

    def write_document(self, row: Row, piece: Tokens, start: int, number: int) -> int:
        """Put scored tokens of a document, and its beginning, into a row. Returns where they end."""
        first = start + self.begin_with_eos  # the beginning is there already: padding is end-of-text
        end = first + len(piece)
        row.tokens_L[first:end] = piece
        row.document_ids_L[start:end] = number
        row.loss_mask_L[first:end] = True
        return end


@dataclass
class PackedRowReader:
    """Documents one behind the other without gaps; the epoch's last row is padded.

    Where a document goes on in the next row, it begins there again, so that every row begins alike. One without any
    token to score is left out.
    """

    upstream: ResumableReader[Tokens]
    row_format: RowFormat

    def __post_init__(self) -> None:
        self._cached: tuple[tuple[int, ReaderPosition] | None, Tokens, ReaderPosition] = (None, EMPTY_TOKENS, None)

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[Row], ReaderPosition]:
        """Up to ``limit`` rows; a position is a document and an offset into its tokens."""
        place = position or {"document": None, "offset": 0}
        rows: list[Row] = []
        while len(rows) < limit and place is not None:
            row, place = self._build_row(epoch, place)
            if row is not None:
                rows.append(row)
        return rows, place

    def _build_row(self, epoch: int, place: ReaderPosition) -> tuple[Row | None, ReaderPosition]:
        """One row, and the place behind it: None at the end of the epoch."""
        row_format = self.row_format
        row, filled, number = row_format.empty_row(), 0, 0
        while filled < row_format.row_length:
            tokens, next_position = self._read_document(epoch, place["document"])
            room = row_format.row_length - filled - row_format.begin_with_eos
            taken = tokens[place["offset"] : place["offset"] + room]
            if len(tokens) and room == 0:
                return row, place  # a beginning with nothing behind it teaches nothing: the slot stays padding
            if len(taken):
                filled = row_format.write_document(row, taken, filled, number)
                number += 1
            if place["offset"] + len(taken) < len(tokens):
                return row, {"document": place["document"], "offset": place["offset"] + len(taken)}
            if next_position is None:
                return (row if filled else None), None
            place = {"document": next_position, "offset": 0}
        return row, place

    def _read_document(self, epoch: int, position: ReaderPosition) -> tuple[Tokens, ReaderPosition]:
        """Scored tokens of the document at a position (none at the very end), and the position of the next."""
        key, tokens, next_position = self._cached
        if key != (epoch, position):
            documents, next_position = self.upstream.read(epoch, position, 1)
            tokens = self.row_format.scored(documents[0]) if documents else EMPTY_TOKENS
            self._cached = ((epoch, position), tokens, next_position)
        return tokens, next_position


@dataclass
class PaddedRowReader:
    """One document a row; longer ones are cut to the row, shorter ones padded.

    A document ends in end-of-text also where it is cut. One without any token to score is left out.
    """

    upstream: ResumableReader[Tokens]
    row_format: RowFormat

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[Row], ReaderPosition]:
        """Up to ``limit`` rows; positions are those of the documents."""
        rows: list[Row] = []
        while True:
            documents, position = self.upstream.read(epoch, position, limit - len(rows))
            rows += [row for row in map(self._build_row, documents) if row is not None]
            if position is None or len(rows) == limit:
                return rows, position

    def _build_row(self, tokens: Tokens) -> Row | None:
        row_format = self.row_format
        scored = row_format.scored(tokens[: row_format.row_length - row_format.begin_with_eos - row_format.end])
        if not len(scored):
            return None
        row = row_format.empty_row()
        row_format.write_document(row, scored, 0, 0)
        return row


def pack_best_fit(upstream: ResumableReader[Tokens], row_format: RowFormat, window: int) -> WindowedReader[Tokens, Row]:
    """Rows with as few documents cut as possible: only those that are longer than a row are.

    Best-fit decreasing (Ding et al. 2024, "Fewer truncations improve language modeling") within windows of so many
    documents: from the longest to the shortest, each goes into the fullest row that has room for it. What is over in a
    row is padding.
    """

    def pack(_epoch: int, _number: int, documents: list[Tokens]) -> ItemsFuture[Row]:
        return lambda: _pack_window(documents, row_format)

    return WindowedReader(upstream, window, pack)


def _pack_window(documents: list[Tokens], row_format: RowFormat) -> list[Row]:
    longest = row_format.row_length - row_format.begin_with_eos
    scored = map(row_format.scored, documents)
    pieces = [tokens[start : start + longest] for tokens in scored for start in range(0, len(tokens), longest)]
    pieces.sort(key=len, reverse=True)  # stable: equal ones keep their order
    rows: list[Row] = []
    fill: list[tuple[int, int]] = []  # of each row: where it ends, how many documents it has
    rooms: list[tuple[int, int]] = []  # (room, row), ascending
    for piece in pieces:
        place = bisect_left(rooms, (len(piece) + row_format.begin_with_eos, 0))
        if place < len(rooms):
            _, index = rooms.pop(place)
        else:
            index = len(rows)
            rows.append(row_format.empty_row())
            fill.append((0, 0))
        filled, number = fill[index]
        filled = row_format.write_document(rows[index], piece, filled, number)
        fill[index] = (filled, number + 1)
        insort(rooms, (row_format.row_length - filled, index))
    return rows


def split_row_randomly(row: Row, rng: np.random.Generator) -> Row:
    """The row in documents of random length: what is left is cut at a uniform place, until nothing is left.

    LLaDA cuts 1 % of its batches to a random length (Nie et al. 2025, guidelines); here the rest is kept.
    """
    length = len(row.tokens_L)
    pieces_L = np.zeros(length, dtype=np.int32)
    start = 0
    while start < length:
        start += int(rng.integers(1, length - start + 1))
        pieces_L[start:] += 1
    # Documents that were there stay apart; padding stays padding.
    joined_L = row.document_ids_L + pieces_L
    document_ids_L = np.where(row.document_ids_L < 0, row.document_ids_L, joined_L).astype(np.int32)
    return Row(row.tokens_L, document_ids_L, row.loss_mask_L)
