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

    @property
    def is_target_L(self) -> NDArray[np.bool_]:
        """Everything but padding."""
        return self.documents_L >= 0


@dataclass
class PackedRows:
    """Documents, each ended by end-of-text, one behind the other without gaps; the epoch's last row is padded."""

    upstream: Reader[str]
    tokenizer: Encoder
    row_length: int

    def __post_init__(self) -> None:
        self._eos = _eos(self.tokenizer)
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
            taken = tokens[place["offset"] : place["offset"] + self.row_length - filled]
            row.tokens_L[filled : filled + len(taken)] = taken
            row.documents_L[filled : filled + len(taken)] = number
            filled += len(taken)
            if place["offset"] + len(taken) < len(tokens):
                return row, {"document": place["document"], "offset": place["offset"] + len(taken)}
            number += 1
            if behind is None:
                return (row if filled else None), None
            place = {"document": behind, "offset": 0}
        return row, place

    def _document(self, epoch: int, position: Position) -> tuple[list[int], Position]:
        """Tokens of the document at a position (none at the very end), and the position of the next."""
        key, tokens, behind = self._held
        if key != (epoch, position):
            documents, behind = self.upstream.read(epoch, position, 1)
            tokens = [*self.tokenizer.encode(documents[0]), self._eos] if documents else []
            self._held = ((epoch, position), tokens, behind)
        return tokens, behind


@dataclass
class PaddedRows:
    """One document a row, ended by end-of-text; longer ones are cut to the row, shorter ones padded."""

    upstream: Reader[str]
    tokenizer: Encoder
    row_length: int

    def __post_init__(self) -> None:
        self._eos = _eos(self.tokenizer)

    def read(self, epoch: int, position: Position, limit: int) -> tuple[list[Row], Position]:
        """Up to ``limit`` rows; positions are those of the documents."""
        documents, behind = self.upstream.read(epoch, position, limit)
        rows = []
        for text in documents:
            row = _padding(self.row_length, self._eos)
            tokens = [*self.tokenizer.encode(text)[: self.row_length - 1], self._eos]
            row.tokens_L[: len(tokens)] = tokens
            row.documents_L[: len(tokens)] = 0
            rows.append(row)
        return rows, behind


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
    return Row(row.tokens_L, np.where(row.documents_L < 0, row.documents_L, joined_L).astype(np.int32))


def _padding(row_length: int, eos: int) -> Row:
    return Row(np.full(row_length, eos, dtype=np.int32), np.full(row_length, -1, dtype=np.int32))


def _eos(tokenizer: Encoder) -> int:
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-text token, which rows end in; give one that has")
    return tokenizer.eos_token_id
