"""Pack documents of any length into rows of equal length: one row of the [B, L] batch each."""

from __future__ import annotations

import copy
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from diffusionlm.data.reader import ReaderPosition, ResumableReader, Tokens, WindowedReader
from diffusionlm.vision.images import PlacedImage

T = TypeVar("T")
SizedItem = TypeVar("SizedItem", bound=Sized)

EMPTY_TOKENS: Tokens = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class Document:
    """The T tokens of a conversation, which its reader has shortened to a row; it brings its own end-of-text tokens.

    A text is `Tokens` alone, all of them targets, and one segment.
    """

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    """True: a target, which is part of an answer, its stop token, or EOS padding."""
    is_eos_padding: NDArray[np.bool_]
    """True for targets that are padding after the stop token."""
    segment_ids: NDArray[np.int32]
    """0, 1, ...: one segment per answer, with the context since the answer before it."""
    is_desirable: bool | None = None
    """Label of the answer. None: it has none, or it does not matter."""
    images: tuple[PlacedImage, ...] = ()
    """Images of its prompts, by position in the document."""

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
    """Index of the segment within the row, from 0; -1: padding. None: a run without conversations."""
    is_eos_padding_L: NDArray[np.bool_] | None = None
    """Targets that are padding after a stop token. None: a run without conversations."""
    is_desirable_1: NDArray[np.bool_] | None = None
    """Label of the row's answer. None: the row is no labeled example."""
    images: tuple[PlacedImage, ...] = ()
    """Images of its documents, by position in the row."""


@dataclass(frozen=True)
class RowFormat:
    """The length of rows and the end-of-text tokens around each text.

    Raises:
        ValueError: a row has no room for a document's start and one token.
    """

    row_length: int
    eos_token_id: int
    begin_with_eos: bool = False
    """Each text, and each row that continues one, begins with end-of-text: context without a loss."""
    end_with_eos: bool = True
    has_segments: bool = False
    """Rows have segments and EOS padding, because the run has conversations."""

    def __post_init__(self) -> None:
        if self.begin_with_eos and self.row_length < 2:
            raise ValueError(
                "data.begin_with_eos needs rows of at least 2 tokens, one of them with a loss; row_length is "
                f"{self.row_length}: raise it"
            )

    def append_eos(self, tokens: Tokens) -> Tokens:
        """Append the end-of-text token, if texts end with it."""
        if not self.end_with_eos:
            return tokens
        return np.concatenate((tokens, np.array([self.eos_token_id], dtype=np.int32)))

    def build_row(self, documents: Sequence[Tokens | Document]) -> Row:
        """Build the row of these documents, which it has room for; the rest is padding."""
        length, start, num_segments = self.row_length, 0, 0
        tokens: Any
        loss_mask: Any
        segment_ids: Any
        is_eos_padding: Any
        label = documents[0].is_desirable if documents and isinstance(documents[0], Document) else None
        images: list[PlacedImage] = []
        row = Row(
            tokens_L=np.full(length, self.eos_token_id, dtype=np.int32),
            document_ids_L=np.full(length, -1, dtype=np.int32),
            loss_mask_L=np.zeros(length, dtype=np.bool_),
            segment_ids_L=np.full(length, -1, dtype=np.int32) if self.has_segments else None,
            is_eos_padding_L=np.zeros(length, dtype=np.bool_) if self.has_segments else None,
            is_desirable_1=None if label is None else np.array([label]),
        )
        for index, document in enumerate(documents):
            first, tokens = start, document
            loss_mask, segment_ids, is_eos_padding = True, 0, False
            if isinstance(document, Document):
                tokens, loss_mask = document.tokens, document.loss_mask
                segment_ids, is_eos_padding = document.segment_ids, document.is_eos_padding
                images += [image.move(start) for image in document.images]
            else:
                first += self.begin_with_eos  # padding is end-of-text, so the token at the start is already there
            end = first + len(document)
            row.tokens_L[first:end] = tokens
            row.document_ids_L[start:end] = index
            row.loss_mask_L[first:end] = loss_mask
            if row.segment_ids_L is not None and row.is_eos_padding_L is not None:
                row.segment_ids_L[start:end] = num_segments + segment_ids
                row.is_eos_padding_L[start:end] = is_eos_padding
                num_segments = int(row.segment_ids_L[end - 1]) + 1
            start = end
        return replace(row, images=tuple(images)) if images else row


@dataclass
class PackedRowReader:
    """Rows of consecutive texts without gaps; the last row of an epoch is padded.

    A text that is cut continues in the next row, as a new document. Texts without tokens are left out.
    """

    upstream: ResumableReader[Tokens]
    row_format: RowFormat

    def __post_init__(self) -> None:
        self._cached: tuple[tuple[int, ReaderPosition] | None, Tokens, ReaderPosition] = (None, EMPTY_TOKENS, None)

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[Row], ReaderPosition]:
        """Read rows; a position is that of a text, and an offset into its tokens."""
        position = position or {"document": None, "offset": 0}
        rows: list[Row] = []
        while len(rows) < limit and position is not None:
            pieces, position = self._read_pieces(epoch, position)
            rows += [self.row_format.build_row(pieces)] if pieces else []
        return rows, position

    def _read_pieces(self, epoch: int, position: ReaderPosition) -> tuple[list[Tokens], ReaderPosition]:
        """Return the texts of a row, the first and the last of which may be cut."""
        begin_with_eos = self.row_format.begin_with_eos
        pieces: list[Tokens] = []
        num_free = self.row_format.row_length
        while num_free > 0:
            tokens, next_document = self._read_document(epoch, position["document"])
            piece = tokens[position["offset"] : position["offset"] + num_free - begin_with_eos]
            if len(tokens) and num_free == begin_with_eos:
                break  # a start without a token after it has no loss: the position stays padding
            if len(piece):
                pieces.append(piece)
                num_free -= len(piece) + begin_with_eos
            if position["offset"] + len(piece) < len(tokens):
                return pieces, {"document": position["document"], "offset": position["offset"] + len(piece)}
            if next_document is None:
                return pieces, None
            position = {"document": next_document, "offset": 0}
        return pieces, position

    def _read_document(self, epoch: int, position: ReaderPosition) -> tuple[Tokens, ReaderPosition]:
        """Return the tokens of the text at a position (none at the end), and the position of the next one."""
        key, tokens, next_position = self._cached
        if key != (epoch, position):
            documents, next_position = self.upstream.read(epoch, position, 1)
            tokens = self.row_format.append_eos(documents[0]) if documents else EMPTY_TOKENS
            self._cached = ((epoch, position), tokens, next_position)
        return tokens, next_position


@dataclass
class PaddedRowReader:
    """Rows of one text each: long texts are truncated, short ones padded.

    A truncated text also ends in end-of-text. Texts without tokens are left out.
    """

    upstream: ResumableReader[Tokens]
    row_format: RowFormat

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[Row], ReaderPosition]:
        """Read rows; positions are those of the texts."""
        row_format = self.row_format
        length = row_format.row_length - row_format.begin_with_eos - row_format.end_with_eos
        rows: list[Row] = []
        while True:
            texts, position = self.upstream.read(epoch, position, limit - len(rows))
            documents = (row_format.append_eos(tokens[:length]) for tokens in texts)
            rows += [row_format.build_row([tokens]) for tokens in documents if len(tokens)]
            if position is None or len(rows) == limit:
                return rows, position


def pack_windows(
    upstream: ResumableReader[T],
    row_format: RowFormat,
    window_size: int,
    group: Callable[[list[T], RowFormat], Sequence[Sequence[Tokens | Document]]],
) -> WindowedReader[T, Row]:
    """Pack window by window: `group` distributes its documents to rows."""

    def pack(items: list[T]) -> list[Row]:
        return [row_format.build_row(documents) for documents in group(items, row_format)]

    return WindowedReader(upstream, window_size, lambda _epoch, _index, items: lambda: pack(items))


def pack_texts(texts: list[Tokens], row_format: RowFormat) -> list[list[Tokens]]:
    """Distribute texts to rows so that only those longer than a row are cut."""
    max_length = row_format.row_length - row_format.begin_with_eos
    pieces = [
        tokens[start : start + max_length]
        for tokens in map(row_format.append_eos, texts)
        for start in range(0, len(tokens), max_length)
    ]
    return group_best_fit(pieces, row_format.row_length, row_format.begin_with_eos)


def pack_conversations(documents: list[Document], row_format: RowFormat) -> list[list[Document]]:
    """Distribute conversations to rows; none is cut."""
    return group_best_fit(documents, row_format.row_length)


def pack_separately(documents: list[Document], row_format: RowFormat) -> list[list[Document]]:
    """Give each conversation a row of its own."""
    return [[document] for document in documents]


def group_best_fit(pieces: Sequence[SizedItem], capacity: int, overhead: int = 0) -> list[list[SizedItem]]:
    """Distribute pieces to rows: from the longest to the shortest, each goes into the fullest row with enough space.

    Best-fit decreasing (Ding et al. 2024, "Fewer truncations improve language modeling").

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
    return replace(row, document_ids_L=document_ids_L.astype(np.int32))


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
    padded = copy.deepcopy(row)
    assert padded.segment_ids_L is not None and padded.is_eos_padding_L is not None
    padded.document_ids_L[padding] = 0
    padded.segment_ids_L[padding] = row.segment_ids_L[size - 1]
    padded.loss_mask_L[padding] = True
    padded.is_eos_padding_L[padding] = True
    return padded


def append_mismatch(row: Row, other: Row) -> Row:
    """Append the row's prompt with another row's answer, up to the end of the row: KTO's estimate of the divergence
    needs answers that do not belong to their prompts. Both rows have one conversation with one answer."""
    (start, end), (other_start, other_end) = (
        (int(one.loss_mask_L.argmax()), int((one.document_ids_L >= 0).sum())) for one in (row, other)
    )
    appended, length = copy.deepcopy(row), len(row.tokens_L)
    stop = min(length, end + start + other_end - other_start)
    for name, values in vars(appended).items():
        if name.endswith("_L"):
            answer = getattr(other, name)[other_start : other_start + stop - end - start]
            values[end:stop] = np.concatenate([getattr(row, name)[:start], answer])
    assert appended.segment_ids_L is not None
    appended.document_ids_L[end:stop] = appended.segment_ids_L[end:stop] = 1
    return replace(appended, images=(*row.images, *(image.move(end) for image in row.images)))
