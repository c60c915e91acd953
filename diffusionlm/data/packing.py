"""Rows of equal length from documents of any length."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diffusionlm.data.reader import Position, Reader, Tokens
from diffusionlm.data.windows import Pending, Windows

NOTHING: Tokens = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class Row:
    """One row of L tokens."""

    tokens_L: NDArray[np.int32]
    documents_L: NDArray[np.int32]
    """Number of the document within the row, from 0; padding is -1 and sees only itself."""
    is_target_L: NDArray[np.bool_]
    """May be noised and scored: everything but padding and the end-of-text token that a document begins with."""


@dataclass(frozen=True)
class Frame:
    """How documents become rows: their length, and the end-of-text tokens around each document.

    Raises:
        ValueError: rows are too short for a beginning and a token behind it.
    """

    row_length: int
    eos: int
    begin: bool = False
    """Each document, and each row that goes on with one, begins with end-of-text: context, never scored."""
    end: bool = True
    """Each document ends in end-of-text."""

    def __post_init__(self) -> None:
        if self.begin and self.row_length < 2:
            raise ValueError(
                "data.begin_with_eos needs rows of at least 2 tokens, one of them scored; row_length is "
                f"{self.row_length}: raise it"
            )

    def scored(self, tokens: Tokens) -> Tokens:
        """What is scored of a document: its tokens and their end."""
        return np.concatenate((tokens, np.array([self.eos], dtype=np.int32))) if self.end else tokens

    def padding(self) -> Row:
        """A row without anything in it."""
        return Row(
            tokens_L=np.full(self.row_length, self.eos, dtype=np.int32),
            documents_L=np.full(self.row_length, -1, dtype=np.int32),
            is_target_L=np.zeros(self.row_length, dtype=np.bool_),
        )

    def write(self, row: Row, piece: Tokens, start: int, number: int) -> int:
        """Put scored tokens of a document, and its beginning, into a row. Returns where they end."""
        first = start + self.begin  # the beginning is there already: padding is end-of-text
        end = first + len(piece)
        row.tokens_L[first:end] = piece
        row.documents_L[start:end] = number
        row.is_target_L[first:end] = True
        return end


@dataclass
class PackedRows:
    """Documents one behind the other without gaps; the epoch's last row is padded.

    Where a document goes on in the next row, it begins there again, so that every row begins alike. One without any
    token to score is left out.
    """

    upstream: Reader[Tokens]
    frame: Frame

    def __post_init__(self) -> None:
        self._held: tuple[tuple[int, Position] | None, Tokens, Position] = (None, NOTHING, None)

    def read(self, epoch: int, position: Position, limit: int) -> tuple[list[Row], Position]:
        """Up to ``limit`` rows; a position is a document and an offset into its tokens."""
        place = position or {"document": None, "offset": 0}
        rows: list[Row] = []
        while len(rows) < limit and place is not None:
            row, place = self._row(epoch, place)
            if row is not None:
                rows.append(row)
        return rows, place

    def _row(self, epoch: int, place: Position) -> tuple[Row | None, Position]:
        """One row, and the place behind it: None at the end of the epoch."""
        frame = self.frame
        row, filled, number = frame.padding(), 0, 0
        while filled < frame.row_length:
            tokens, behind = self._document(epoch, place["document"])
            room = frame.row_length - filled - frame.begin
            taken = tokens[place["offset"] : place["offset"] + room]
            if len(tokens) and room == 0:
                return row, place  # a beginning with nothing behind it teaches nothing: the slot stays padding
            if len(taken):
                filled = frame.write(row, taken, filled, number)
                number += 1
            if place["offset"] + len(taken) < len(tokens):
                return row, {"document": place["document"], "offset": place["offset"] + len(taken)}
            if behind is None:
                return (row if filled else None), None
            place = {"document": behind, "offset": 0}
        return row, place

    def _document(self, epoch: int, position: Position) -> tuple[Tokens, Position]:
        """Scored tokens of the document at a position (none at the very end), and the position of the next."""
        key, tokens, behind = self._held
        if key != (epoch, position):
            documents, behind = self.upstream.read(epoch, position, 1)
            tokens = self.frame.scored(documents[0]) if documents else NOTHING
            self._held = ((epoch, position), tokens, behind)
        return tokens, behind


@dataclass
class PaddedRows:
    """One document a row; longer ones are cut to the row, shorter ones padded.

    A document ends in end-of-text also where it is cut. One without any token to score is left out.
    """

    upstream: Reader[Tokens]
    frame: Frame

    def read(self, epoch: int, position: Position, limit: int) -> tuple[list[Row], Position]:
        """Up to ``limit`` rows; positions are those of the documents."""
        rows: list[Row] = []
        while True:
            documents, position = self.upstream.read(epoch, position, limit - len(rows))
            rows += [row for row in map(self._row, documents) if row is not None]
            if position is None or len(rows) == limit:
                return rows, position

    def _row(self, tokens: Tokens) -> Row | None:
        frame = self.frame
        scored = frame.scored(tokens[: frame.row_length - frame.begin - frame.end])
        if not len(scored):
            return None
        row = frame.padding()
        frame.write(row, scored, 0, 0)
        return row


def best_fit_rows(upstream: Reader[Tokens], frame: Frame, window: int) -> Windows[Tokens, Row]:
    """Rows with as few documents cut as possible: only those that are longer than a row are.

    Best-fit decreasing (Ding et al. 2024, "Fewer truncations improve language modeling") within windows of so many
    documents: from the longest to the shortest, each goes into the fullest row that has room for it. What is over in a
    row is padding.
    """

    def pack(_epoch: int, _number: int, documents: list[Tokens]) -> Pending[Row]:
        return lambda: _best_fit(documents, frame)

    return Windows(upstream, window, pack)


def _best_fit(documents: list[Tokens], frame: Frame) -> list[Row]:
    longest = frame.row_length - frame.begin
    scored = map(frame.scored, documents)
    pieces = [tokens[start : start + longest] for tokens in scored for start in range(0, len(tokens), longest)]
    pieces.sort(key=len, reverse=True)  # stable: equal ones keep their order
    rows: list[Row] = []
    fill: list[tuple[int, int]] = []  # of each row: where it ends, how many documents it has
    rooms: list[tuple[int, int]] = []  # (room, row), ascending
    for piece in pieces:
        place = bisect_left(rooms, (len(piece) + frame.begin, 0))
        if place < len(rooms):
            _, index = rooms.pop(place)
        else:
            index = len(rows)
            rows.append(frame.padding())
            fill.append((0, 0))
        filled, number = fill[index]
        filled = frame.write(rows[index], piece, filled, number)
        fill[index] = (filled, number + 1)
        insort(rooms, (frame.row_length - filled, index))
    return rows


def cut_at_random(row: Row, chance: np.random.Generator) -> Row:
    """The row in documents of random length: what is left is cut at a uniform place, until nothing is left.

    LLaDA cuts 1 % of its batches to a random length (Nie et al. 2025, guidelines); here the rest is kept.
    """
    length = len(row.tokens_L)
    pieces_L = np.zeros(length, dtype=np.int32)
    start = 0
    while start < length:
        start += int(chance.integers(1, length - start + 1))
        pieces_L[start:] += 1
    # Documents that were there stay apart; padding stays padding.
    joined_L = row.documents_L + pieces_L
    documents_L = np.where(row.documents_L < 0, row.documents_L, joined_L).astype(np.int32)
    return Row(row.tokens_L, documents_L, row.is_target_L)
