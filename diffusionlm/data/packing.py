"""Rows of equal length from documents of any length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from diffusionlm.data.sources import Position, Reader


class Encoder(Protocol):
    """What rows need of a tokenizer."""

    @property
    def eos_token_id(self) -> int | None: ...

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class Row:
    """One row of L tokens."""

    tokens_L: NDArray[np.int32]
    documents_L: NDArray[np.int32]
    """Number of the document within the row, from 0; padding is -1 and sees only itself."""
    is_target_L: NDArray[np.bool_]
    """May be noised and scored: everything but padding and the end-of-text token that a document begins with."""


@dataclass
class PackedRows:
    """Documents one behind the other without gaps; the epoch's last row is padded.

    A document begins and ends in end-of-text as `config.data.DataConfig` says; where it goes on in the next row, it
    begins there again, so that every row begins alike. One without any token to score is left out.

    Raises:
        ValueError: the tokenizer has no end-of-text token, or rows are too short for a beginning and a token behind it.
    """

    upstream: Reader[str]
    tokenizer: Encoder
    row_length: int
    begin_with_eos: bool = False
    end_with_eos: bool = True

    def __post_init__(self) -> None:
        self._eos = _eos(self.tokenizer)
        _check_length(self.row_length, self.begin_with_eos)
        self._held: tuple[tuple[int, Position] | None, list[int], Position] = (None, [], None)

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
        row, filled, number = _padding(self.row_length, self._eos), 0, 0
        while filled < self.row_length:
            tokens, behind = self._document(epoch, place["document"])
            room = self.row_length - filled - self.begin_with_eos
            taken = tokens[place["offset"] : place["offset"] + room]
            if tokens and room == 0:
                return row, place  # a beginning with nothing behind it teaches nothing: the slot stays padding
            if taken:
                piece = [self._eos, *taken] if self.begin_with_eos else taken
                _write(row, piece, filled, number, begins=self.begin_with_eos)
                filled += len(piece)
                number += 1
            if place["offset"] + len(taken) < len(tokens):
                return row, {"document": place["document"], "offset": place["offset"] + len(taken)}
            if behind is None:
                return (row if filled else None), None
            place = {"document": behind, "offset": 0}
        return row, place

    def _document(self, epoch: int, position: Position) -> tuple[list[int], Position]:
        """Tokens of the document at a position (none at the very end), and the position of the next."""
        key, tokens, behind = self._held
        if key != (epoch, position):
            documents, behind = self.upstream.read(epoch, position, 1)
            tokens = []
            if documents:
                encoded = self.tokenizer.encode(documents[0])
                tokens = [*encoded, self._eos] if self.end_with_eos else encoded
            self._held = ((epoch, position), tokens, behind)
        return tokens, behind


@dataclass
class PaddedRows:
    """One document a row; longer ones are cut to the row, shorter ones padded.

    A document begins and ends in end-of-text as `config.data.DataConfig` says, also where it is cut. One without any
    token to score is left out.

    Raises:
        ValueError: the tokenizer has no end-of-text token, or rows are too short for a beginning and a token behind it.
    """

    upstream: Reader[str]
    tokenizer: Encoder
    row_length: int
    begin_with_eos: bool = False
    end_with_eos: bool = True

    def __post_init__(self) -> None:
        self._eos = _eos(self.tokenizer)
        _check_length(self.row_length, self.begin_with_eos)

    def read(self, epoch: int, position: Position, limit: int) -> tuple[list[Row], Position]:
        """Up to ``limit`` rows; positions are those of the documents."""
        rows: list[Row] = []
        while True:
            documents, position = self.upstream.read(epoch, position, limit - len(rows))
            rows += [row for row in map(self._row, documents) if row is not None]
            if position is None or len(rows) == limit:
                return rows, position

    def _row(self, text: str) -> Row | None:
        room = self.row_length - self.begin_with_eos - self.end_with_eos
        tokens = self.tokenizer.encode(text)[:room]
        framed = _framed(tokens, self._eos, self.begin_with_eos, self.end_with_eos)
        if not framed:
            return None
        row = _padding(self.row_length, self._eos)
        _write(row, framed, 0, 0, begins=self.begin_with_eos)
        return row


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


def _padding(row_length: int, eos: int) -> Row:
    return Row(
        tokens_L=np.full(row_length, eos, dtype=np.int32),
        documents_L=np.full(row_length, -1, dtype=np.int32),
        is_target_L=np.zeros(row_length, dtype=np.bool_),
    )


def _write(row: Row, tokens: list[int], start: int, number: int, *, begins: bool) -> None:
    """Put a document, or the part of it that fits, into a row; ``begins``: its first token is no target."""
    here = slice(start, start + len(tokens))
    row.tokens_L[here] = tokens
    row.documents_L[here] = number
    row.is_target_L[here] = True
    row.is_target_L[start] = not begins


def _framed(tokens: list[int], eos: int, begin: bool, end: bool) -> list[int]:
    """The document between its end-of-text tokens; nothing if it has no token to score."""
    scored = [*tokens, eos] if end else tokens
    return [eos, *scored] if begin and scored else scored


def _check_length(row_length: int, begin_with_eos: bool) -> None:
    if begin_with_eos and row_length < 2:
        raise ValueError(
            f"data.begin_with_eos needs rows of at least 2 tokens, one of them scored; row_length is {row_length}: "
            "raise it"
        )


def _eos(tokenizer: Encoder) -> int:
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-text token, which rows are padded with; give one that has")
    return tokenizer.eos_token_id
