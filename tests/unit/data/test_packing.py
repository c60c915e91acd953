"""Packing: each token is in exactly one row, in order; positions resume exactly."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from diffusionlm.data.packing import PackedRowReader, PaddedRowReader, Row, RowFormat, pack_best_fit, split_row_randomly
from diffusionlm.data.tokenization import InlineTextEncoder, tokenize_reader

Drain = Callable[..., list[Any]]
ReadTokens = Callable[[list[str]], Any]
EOS = 256
LENGTHS = list(itertools.product((2, 3, 8, 64), (False, True), (False, True)))
"""Row length, begin_with_eos, end_with_eos."""
DOCUMENTS = ["abc", "", "a long document that spans several rows", "x", "seven77", "1234567", "the end"]
CASES = [DOCUMENTS, ["only"], ["12345678" * 3, "1234567"], ["1234567", "1234567"], ["", "", ""], ["x" * 100]]


def row_format(length: int, begin_with_eos: bool = False, end_with_eos: bool = True) -> RowFormat:
    return RowFormat(length, EOS, begin_with_eos, end_with_eos)


@pytest.fixture
def read_tokens(list_reader: Any, byte_tokenizer: Any) -> ReadTokens:
    """A reader of the tokens of these documents."""
    return lambda documents: tokenize_reader(list_reader(documents), InlineTextEncoder(byte_tokenizer.encode))


def equal_rows(x: list[Row], y: list[Row]) -> bool:
    return len(x) == len(y) and all(
        np.array_equal(a.tokens_L, b.tokens_L)
        and np.array_equal(a.document_ids_L, b.document_ids_L)
        and np.array_equal(a.loss_mask_L, b.loss_mask_L)
        for a, b in zip(x, y, strict=True)
    )


def format_row(text: str, begin: bool, end: bool) -> tuple[list[int], list[bool]]:
    """Return the tokens of a document and their loss mask."""
    scored = [*text.encode(), *[EOS] * end]
    if not scored:
        return [], []
    return [*[EOS] * begin, *scored], [*[False] * begin, *[True] * len(scored)]


def packed_rows(scored: list[list[int]], length: int, begin: bool) -> list[list[tuple[int, bool, int]]]:
    """Reference: (token, loss mask, document) per position; a token goes where it fits, after a start token at the
    beginning of its document or row."""
    rows: list[list[tuple[int, bool, int]]] = []
    for tokens in scored:
        for place, token in enumerate(tokens):
            fresh = not rows or len(rows[-1]) + 1 + (begin and place == 0) > length
            if fresh:
                rows.append([])
            starts = fresh or place == 0
            number = 0 if not rows[-1] else rows[-1][-1][2] + (place == 0)
            rows[-1] += [(EOS, False, number)] * (begin and starts) + [(token, True, number)]
    return rows


@pytest.mark.parametrize("documents", CASES)
@pytest.mark.parametrize(("length", "begin", "end"), [(1, False, True), *LENGTHS])
def test_packed_documents_begin_and_end_as_configured(
    documents: list[str], length: int, begin: bool, end: bool, read_tokens: ReadTokens, check_resuming: Drain
) -> None:
    def make() -> PackedRowReader:
        return PackedRowReader(
            read_tokens(documents),
            row_format(length, begin, end),
        )

    rows = check_resuming(make, equal_rows)
    expected = packed_rows([[*text.encode(), *[EOS] * end] for text in documents], length, begin)
    assert len(rows) == len(expected)
    for row, slots in zip(rows, expected, strict=True):
        padding = [(EOS, False, -1)] * (length - len(slots))
        tokens, targets, numbers = zip(*slots, *padding, strict=True)
        assert tuple(row.tokens_L.tolist()) == tokens
        assert tuple(row.loss_mask_L.tolist()) == targets
        assert tuple(row.document_ids_L.tolist()) == numbers
        assert row.loss_mask_L.any() and row.loss_mask_L.dtype == np.bool_


def test_a_cut_document_begins_again(read_tokens: ReadTokens, drain: Drain) -> None:
    rows = drain(
        PackedRowReader(
            read_tokens(["ab", "cdefgh", "i"]),
            row_format(6, begin_with_eos=True),
        )
    )
    a, b, c, d, e, f, g, h, i = b"abcdefghi"
    assert [row.tokens_L.tolist() for row in rows] == [
        [EOS, a, b, EOS, EOS, c],
        [EOS, d, e, f, g, h],
        [EOS, EOS, EOS, i, EOS, EOS],
    ]
    assert [row.document_ids_L.tolist() for row in rows] == [[0, 0, 0, 0, 1, 1], [0] * 6, [0, 0, 1, 1, 1, -1]]
    assert rows[2].loss_mask_L.tolist() == [False, True, False, True, True, False]


@pytest.mark.parametrize(("length", "begin", "end"), [(1, False, True), *LENGTHS])
def test_padded_documents_begin_and_end_as_configured(
    length: int, begin: bool, end: bool, read_tokens: ReadTokens, check_resuming: Drain
) -> None:
    def make() -> PaddedRowReader:
        return PaddedRowReader(
            read_tokens(DOCUMENTS),
            row_format(length, begin, end),
        )

    rows = check_resuming(make, equal_rows)
    texts = [text[: length - begin - end] for text in DOCUMENTS if text or end]
    assert len(rows) == len(texts)
    for text, row in zip(texts, rows, strict=True):
        tokens, targets = format_row(text, begin, end)
        padding = length - len(tokens)
        assert row.tokens_L.tolist() == tokens + [EOS] * padding
        assert row.loss_mask_L.tolist() == targets + [False] * padding
        assert row.document_ids_L.tolist() == [0] * len(tokens) + [-1] * padding
        assert row.loss_mask_L.any()


@pytest.mark.parametrize("kind", [PackedRowReader, PaddedRowReader])
@pytest.mark.parametrize("begin", [False, True])
def test_empty_documents_are_left_out(kind: Any, begin: bool, read_tokens: ReadTokens, drain: Drain) -> None:
    for documents in (["", "", ""], [], ["", "", "ab", "", "", "cd", "", ""]):
        rows = drain(
            kind(
                read_tokens(documents),
                row_format(8, begin, False),
            ),
            (2,),
        )
        scored = [bytes(row.tokens_L[row.loss_mask_L].tolist()).decode() for row in rows]
        assert "".join(scored) == "".join(documents)
        assert all(scored)


@pytest.mark.parametrize("kind", [PackedRowReader, PaddedRowReader])
def test_a_row_needs_room_for_a_start_and_a_token(kind: Any, read_tokens: ReadTokens) -> None:
    with pytest.raises(ValueError, match=r"data\.begin_with_eos needs rows of at least 2 tokens.* is 1"):
        kind(
            read_tokens(["ab"]),
            row_format(1, begin_with_eos=True),
        )


def test_packed_documents_are_encoded_once(read_tokens: ReadTokens, byte_tokenizer: Any, drain: Drain) -> None:
    encoded_texts: list[str] = []
    original = byte_tokenizer.encode

    def encode(text: str) -> Any:
        encoded_texts.append(text)
        return original(text)

    byte_tokenizer.encode = encode
    drain(
        PackedRowReader(read_tokens(DOCUMENTS), row_format(4)),
        (1,),
    )
    assert encoded_texts == DOCUMENTS


def test_the_cached_document_is_of_the_same_epoch(byte_tokenizer: Any) -> None:
    """Positions are the same in every epoch; documents are not."""

    class Changing:
        def read(self, epoch: int, position: Any, limit: int) -> tuple[list[str], Any]:
            return [f"epoch {epoch} " * 3], None

    packed = PackedRowReader(tokenize_reader(Changing(), InlineTextEncoder(byte_tokenizer.encode)), row_format(8))
    for epoch in (0, 1, 0):
        row = packed.read(epoch, None, 1)[0][0]
        assert bytes(row.tokens_L.tolist()) == f"epoch {epoch} "[:8].encode()


@pytest.mark.parametrize("documents", [*CASES, [f"{'ab' * (index * 7 % 13)}" for index in range(60)]])
@pytest.mark.parametrize(("length", "begin", "end"), LENGTHS)
def test_best_fit_cuts_long_documents_only(
    documents: list[str], length: int, begin: bool, end: bool, read_tokens: ReadTokens, check_resuming: Drain
) -> None:
    def make() -> Any:
        texts = read_tokens(documents)
        return pack_best_fit(texts, row_format(length, begin, end), window_size=25)

    rows = check_resuming(make, equal_rows, step=9)
    longest = length - begin
    expected = []
    for text in documents:
        scored = [*text.encode(), *[EOS] * end]
        expected += [[*[EOS] * begin, *scored[at : at + longest]] for at in range(0, len(scored), longest)]
    actual = []
    for row in rows:
        num_tokens = int((row.document_ids_L >= 0).sum())
        assert (row.document_ids_L[num_tokens:] == -1).all() and (row.tokens_L[num_tokens:] == EOS).all()
        assert not row.loss_mask_L[num_tokens:].any() and row.loss_mask_L.any()
        for number in range(int(row.document_ids_L.max()) + 1):
            places = np.flatnonzero(row.document_ids_L == number)
            assert (np.diff(places) == 1).all()
            actual.append(row.tokens_L[places].tolist())
            assert row.loss_mask_L[places].tolist() == [not begin or at > 0 for at in range(len(places))]
    assert sorted(actual) == sorted(expected)


def test_best_fit_of_documents_that_fill_rows_exactly(read_tokens: ReadTokens, drain: Drain) -> None:
    rng = np.random.default_rng(0)
    sizes: list[int] = []
    for _ in range(200):  # 200 full rows, each cut into documents
        cuts = np.sort(rng.choice(np.arange(8, 57), size=2, replace=False))
        sizes += np.diff([0, *cuts, 64]).tolist()
    texts = ["x" * (size - 1) for size in rng.permutation(sizes)]
    rows = drain(pack_best_fit(read_tokens(texts), row_format(64), 1000))
    assert 200 <= len(rows) <= 204, "within 2 % of the optimum"
    small_window = drain(pack_best_fit(read_tokens(texts), row_format(64), 3))
    assert len(small_window) > 230, "a small window has less to choose from"


def test_split_rows_keep_tokens_padding_and_documents() -> None:
    documents = np.array([0] * 9 + [1] * 5 + [-1] * 2, dtype=np.int32)
    targets = np.random.default_rng(0).random(16) < 0.5
    row = Row(np.arange(16, dtype=np.int32), documents, targets)
    firsts, pieces = [], []
    for seed in range(400):
        cut = split_row_randomly(row, np.random.default_rng(seed))
        assert row.document_ids_L is documents and documents[8] == 0, "the row itself stays"
        assert np.array_equal(cut.tokens_L, row.tokens_L)
        assert np.array_equal(cut.loss_mask_L, targets)
        assert np.array_equal(cut.document_ids_L < 0, documents < 0)
        real = cut.document_ids_L[:14]
        assert (np.diff(real) >= 0).all(), "each piece is one run"
        assert cut.document_ids_L[8] != cut.document_ids_L[9], "documents that were apart stay apart"
        firsts.append(int((real == real[0]).sum()))
        pieces.append(len(np.unique(real)))
    # The first cut is uniform over the row: 1 ... 16, of which the first document lets 9 be seen.
    counts = np.bincount(firsts, minlength=10)[1:10]
    assert (counts[:8] > 8).all()
    assert counts[8] > counts[:8].max()
    assert max(pieces) > 4
