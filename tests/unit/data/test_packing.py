"""Packing: each token is in exactly one row, in order; conversations are whole; positions resume exactly."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from diffusionlm.data.loader import collate_rows
from diffusionlm.data.packing import (
    Document,
    PackedRowReader,
    PaddedRowReader,
    Row,
    RowFormat,
    append_mismatch,
    group_best_fit,
    pack_conversations,
    pack_separately,
    pack_texts,
    pack_windows,
    split_row_randomly,
)
from diffusionlm.data.tokenization import encode_inline, tokenize_reader

Drain = Callable[..., list[Any]]
ReadTokens = Callable[[list[str]], Any]
EOS = 256
FORMATS = [(1, False, True), *itertools.product((2, 8), (False, True), (False, True))]
"""Row length, begin_with_eos, end_with_eos."""
TEXTS = ["abc", "", "a long document that spans several rows", "x", "seven77", "1234567", "the end"]
CASES = [TEXTS, ["only"], ["12345678" * 3, "1234567"], ["1234567", "1234567"], ["", "", ""], [], ["x" * 100]]

Slots = list[tuple[int, bool, int]]
"""(token, loss mask, document) per position."""


@pytest.fixture
def read_tokens(list_reader: Any, byte_tokenizer: Any) -> ReadTokens:
    """A reader of the tokens of these texts."""
    return lambda texts: tokenize_reader(list_reader(texts), encode_inline(byte_tokenizer.encode))


def slots_of(row: Row) -> Slots:
    return list(zip(row.tokens_L.tolist(), row.loss_mask_L.tolist(), row.document_ids_L.tolist(), strict=True))


def equal_rows(x: list[Row], y: list[Row]) -> bool:
    return list(map(slots_of, x)) == list(map(slots_of, y))


def pad(slots: Slots, length: int) -> Slots:
    return slots + [(EOS, False, -1)] * (length - len(slots))


def expect_packed(texts: list[str], length: int, begin: bool, end: bool) -> list[Slots]:
    """Reference: a token goes where it fits, after a start token at the beginning of its text or row."""
    rows: list[Slots] = []
    for tokens in ([*text.encode(), *[EOS] * end] for text in texts):
        for place, token in enumerate(tokens):
            fresh = not rows or len(rows[-1]) + 1 + (begin and place == 0) > length
            if fresh:
                rows.append([])
            number = 0 if not rows[-1] else rows[-1][-1][2] + (place == 0)
            rows[-1] += [(EOS, False, number)] * (begin and (fresh or place == 0)) + [(token, True, number)]
    return [pad(slots, length) for slots in rows]


def expect_padded(texts: list[str], length: int, begin: bool, end: bool) -> list[Slots]:
    cut = [text.encode()[: length - begin - end] for text in texts if text or end]
    rows = [[(EOS, False, 0)] * begin + [(token, True, 0) for token in [*text, *[EOS] * end]] for text in cut]
    return [pad(slots, length) for slots in rows]


@pytest.mark.parametrize("texts", CASES)
@pytest.mark.parametrize(("length", "begin", "end"), FORMATS)
@pytest.mark.parametrize("kind", [PackedRowReader, PaddedRowReader])
def test_rows_of_texts(
    kind: Any,
    texts: list[str],
    length: int,
    begin: bool,
    end: bool,
    read_tokens: ReadTokens,
    check_resuming: Drain,
) -> None:
    rows = check_resuming(lambda: kind(read_tokens(texts), RowFormat(length, EOS, begin, end)), equal_rows)
    expect = expect_packed if kind is PackedRowReader else expect_padded
    assert list(map(slots_of, rows)) == expect(texts, length, begin, end)
    assert all(row.loss_mask_L.any() and row.loss_mask_L.dtype == np.bool_ for row in rows)


def test_a_row_needs_room_for_a_start_and_a_token() -> None:
    with pytest.raises(ValueError, match=r"data\.begin_with_eos needs rows of at least 2 tokens.* is 1"):
        RowFormat(1, EOS, begin_with_eos=True)


def test_packed_texts_are_encoded_once_per_epoch() -> None:
    """Positions are the same in every epoch; texts are not."""
    encoded_texts: list[str] = []

    def encode(text: str) -> list[int]:
        encoded_texts.append(text)
        return list(text.encode())

    class Changing:
        def read(self, epoch: int, position: Any, limit: int) -> tuple[list[str], Any]:
            return [f"epoch {epoch} " * 3], None

    reader, position = PackedRowReader(tokenize_reader(Changing(), encode_inline(encode)), RowFormat(8, EOS)), None
    for epoch in (0, 1, 0):
        (row,), position = reader.read(epoch, None, 1)
        assert bytes(row.tokens_L.tolist()) == f"epoch {epoch} ".encode()
        while position is not None:
            _, position = reader.read(epoch, position, 1)
    assert len(encoded_texts) == 3


@pytest.mark.parametrize("texts", [*CASES, [f"{'ab' * (index * 7 % 13)}" for index in range(30)]])
@pytest.mark.parametrize(("length", "begin", "end"), FORMATS)
def test_best_fit_cuts_long_texts_only(
    texts: list[str], length: int, begin: bool, end: bool, read_tokens: ReadTokens, check_resuming: Drain
) -> None:
    row_format = RowFormat(length, EOS, begin, end)
    rows = check_resuming(lambda: pack_windows(read_tokens(texts), row_format, 25, pack_texts), equal_rows, step=9)
    longest = length - begin
    expected = []
    for tokens in ([*text.encode(), *[EOS] * end] for text in texts):
        expected += [[*[EOS] * begin, *tokens[at : at + longest]] for at in range(0, len(tokens), longest)]
    actual = []
    for row in rows:
        num_tokens = int((row.document_ids_L >= 0).sum())
        assert pad(slots_of(row)[:num_tokens], length) == slots_of(row) and row.loss_mask_L.any()
        for number in range(int(row.document_ids_L.max()) + 1):
            places = np.flatnonzero(row.document_ids_L == number)
            assert (np.diff(places) == 1).all()
            actual.append(row.tokens_L[places].tolist())
            assert row.loss_mask_L[places].tolist() == [not begin or at > 0 for at in range(len(places))]
    assert sorted(actual) == sorted(expected)


def test_best_fit_fills_rows(read_tokens: ReadTokens, drain: Drain) -> None:
    assert group_best_fit(["aaaa", "b", "ccc", "dd"], 5) == [["aaaa", "b"], ["ccc", "dd"]], "the fullest row"
    rng = np.random.default_rng(0)
    sizes: list[int] = []
    for _ in range(200):  # 200 full rows, each cut into texts
        cuts = np.sort(rng.choice(np.arange(8, 57), size=2, replace=False))
        sizes += np.diff([0, *cuts, 64]).tolist()
    texts = ["x" * (size - 1) for size in rng.permutation(sizes)]
    rows = drain(pack_windows(read_tokens(texts), RowFormat(64, EOS), 1000, pack_texts))
    assert 200 <= len(rows) <= 204, "within 2 % of the optimum"


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


CHATS = RowFormat(9, EOS, begin_with_eos=True, has_segments=True)


def conversation(*segments: str, first_token: int = 0) -> Document:
    """Each segment is spelled: `p` prompt, `a` answer, `f` EOS padding."""
    letters = "".join(segments)
    return Document(
        np.arange(first_token, first_token + len(letters), dtype=np.int32),
        np.array([letter in "af" for letter in letters]),
        np.array([letter == "f" for letter in letters]),
        np.repeat(np.arange(len(segments), dtype=np.int32), [len(segment) for segment in segments]),
    )


def test_rows_of_conversations_and_texts(list_reader: Any, drain: Drain) -> None:
    """Targets, EOS padding and segments stay with their tokens; a text is one segment."""
    documents = [conversation("pa", "paf"), conversation("ppa", first_token=20)]
    (row,) = drain(pack_windows(list_reader(documents), CHATS, 10, pack_conversations))
    batch = collate_rows([row, CHATS.build_row([np.array([1, 2], np.int32), np.array([3], np.int32)])])
    assert batch.document_BL is not None and batch.segment_BL is not None and batch.is_eos_padding_BL is not None
    assert batch.tokens_BL.tolist() == [[0, 1, 2, 3, 4, 20, 21, 22, EOS], [EOS, 1, 2, EOS, 3, *[EOS] * 4]]
    assert batch.document_BL.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1, -1], [0, 0, 0, 1, 1, -1, -1, -1, -1]]
    assert batch.loss_mask_BL.int().tolist() == [[0, 1, 0, 1, 1, 0, 0, 1, 0], [0, 1, 1, 0, 1, 0, 0, 0, 0]]
    assert batch.is_eos_padding_BL.int().tolist() == [[0, 0, 0, 0, 1, 0, 0, 0, 0], [0] * 9]
    assert batch.segment_BL.tolist() == [[0, 0, 1, 1, 1, 2, 2, 2, -1], [0, 0, 0, 1, 1, -1, -1, -1, -1]]
    separate = drain(pack_windows(list_reader(documents), CHATS, 10, pack_separately))
    assert [row.tokens_L.tolist() for row in separate] == [[0, 1, 2, 3, 4, *[EOS] * 4], [20, 21, 22, *[EOS] * 6]]
    assert collate_rows([RowFormat(3, EOS).build_row([])]).segment_BL is None


@pytest.mark.parametrize("row_length", [7, 20, 64])
def test_no_conversation_is_cut_or_lost(row_length: int, list_reader: Any, drain: Drain) -> None:
    rng = np.random.default_rng(0)
    documents = [
        conversation("p" * int(rng.integers(1, 4)) + "a" * int(rng.integers(1, 4)), first_token=100 * index)
        for index in range(50)
    ]
    row_format = RowFormat(row_length, EOS, end_with_eos=True, has_segments=True)
    rows = drain(pack_windows(list_reader(documents), row_format, 16, pack_conversations))
    found = [
        (row.tokens_L[mine].tolist(), row.loss_mask_L[mine].tolist())
        for row in rows
        for index in range(row.document_ids_L.max() + 1)
        for mine in [row.document_ids_L == index]
    ]
    assert sorted(found) == sorted((item.tokens.tolist(), item.loss_mask.tolist()) for item in documents)


def test_a_prompt_with_the_answer_of_another_row() -> None:
    """A second conversation, cut where the row ends; the rows themselves stay as they are."""
    first, second = (
        CHATS.build_row([document]) for document in (conversation("ppaf"), conversation("paaf", first_token=20))
    )
    row = append_mismatch(first, second)
    assert row.tokens_L.tolist() == [0, 1, 2, 3, 0, 1, 21, 22, 23]
    assert row.document_ids_L.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert row.loss_mask_L.astype(int).tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert row.segment_ids_L is not None and row.segment_ids_L.tolist() == row.document_ids_L.tolist()
    assert row.is_eos_padding_L is not None and row.is_eos_padding_L.astype(int).tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 1]
    long = append_mismatch(second, CHATS.build_row([conversation("paaaaaaaf", first_token=40)]))
    assert long.tokens_L.tolist() == [20, 21, 22, 23, 20, 41, 42, 43, 44]
    assert append_mismatch(first, CHATS.build_row([conversation("pa", first_token=60)])).tokens_L.tolist()[4:] == [
        0,
        1,
        61,
        EOS,
        EOS,
    ]
    assert first.tokens_L.tolist() == [0, 1, 2, 3, *[EOS] * 5]
