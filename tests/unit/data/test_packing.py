"""Rows: nothing lost, nothing doubled, everything in order."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from diffusionlm.data.packing import PackedRows, PaddedRows, Row, cut_at_random

Drain = Callable[..., list[Any]]
EOS = 256
DOCUMENTS = ["abc", "", "a long document that spans several rows", "x", "seven77", "1234567", "the end"]
CASES = [DOCUMENTS, ["only"], ["12345678" * 3, "1234567"], ["1234567", "1234567"], ["", "", ""], ["x" * 100]]


def streams(documents: list[str]) -> list[int]:
    return [token for text in documents for token in [*text.encode(), EOS]]


def equal(one: list[Row], other: list[Row]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a.tokens_L, b.tokens_L) and np.array_equal(a.documents_L, b.documents_L)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("documents", CASES)
@pytest.mark.parametrize("length", [1, 3, 8, 64])
def test_packed_rows_are_the_documents_end_to_end(
    documents: list[str], length: int, list_reader: Any, byte_tokenizer: Any, drain: Drain
) -> None:
    rows = drain(PackedRows(list_reader(documents), byte_tokenizer, length))
    tokens = np.concatenate([row.tokens_L for row in rows])
    real = np.concatenate([row.is_target_L for row in rows])
    expected = streams(documents)
    assert tokens[real].tolist() == expected
    assert len(rows) == -(-len(expected) // length)
    assert all(row.is_target_L.all() for row in rows[:-1]), "only the last row is padded"
    assert (np.diff(real.astype(int)) <= 0).all(), "padding comes last"
    assert (tokens[~real] == EOS).all()
    which = np.repeat(np.arange(len(documents)), [len(text.encode()) + 1 for text in documents])
    for index, row in enumerate(rows):
        part = which[index * length : (index + 1) * length]
        assert row.documents_L[: len(part)].tolist() == (part - part[0]).tolist()
        assert (row.documents_L[len(part) :] == -1).all()
        assert row.tokens_L.dtype == row.documents_L.dtype == np.int32


@pytest.mark.parametrize("documents", CASES)
@pytest.mark.parametrize("length", [3, 8])
def test_packed_rows_resume_at_every_place(
    documents: list[str], length: int, list_reader: Any, byte_tokenizer: Any, drain: Drain
) -> None:
    def make() -> PackedRows:
        return PackedRows(list_reader(documents), byte_tokenizer, length)

    whole = drain(make())
    assert equal(drain(make(), (1,)), whole) and equal(drain(make(), (2, 1)), whole)
    for count in range(1, len(whole) + 1):
        head, position = make().read(0, None, count)
        tail = [] if position is None else drain(make(), (2,), position=json.loads(json.dumps(position)))
        assert equal(head + tail, whole)


def test_no_documents_no_rows(list_reader: Any, byte_tokenizer: Any, drain: Drain) -> None:
    assert drain(PackedRows(list_reader([]), byte_tokenizer, 8)) == []
    assert drain(PaddedRows(list_reader([]), byte_tokenizer, 8)) == []


def test_packed_documents_are_encoded_once(list_reader: Any, byte_tokenizer: Any, drain: Drain) -> None:
    encoded: list[str] = []
    original = byte_tokenizer.encode
    byte_tokenizer.encode = lambda text: (encoded.append(text), original(text))[1]
    drain(PackedRows(list_reader(DOCUMENTS), byte_tokenizer, 4), (1,))
    assert encoded == DOCUMENTS


@pytest.mark.parametrize("length", [1, 4, 8, 64])
def test_padded_rows_hold_one_document_each(length: int, list_reader: Any, byte_tokenizer: Any, drain: Drain) -> None:
    rows = drain(PaddedRows(list_reader(DOCUMENTS), byte_tokenizer, length))
    assert len(rows) == len(DOCUMENTS)
    for text, row in zip(DOCUMENTS, rows, strict=True):
        expected = [*text.encode()[: length - 1], EOS]
        assert row.tokens_L[row.is_target_L].tolist() == expected
        assert row.documents_L.tolist() == [0] * len(expected) + [-1] * (length - len(expected))
        assert (row.tokens_L[len(expected) :] == EOS).all()


def test_padded_rows_resume_at_every_place(list_reader: Any, byte_tokenizer: Any, drain: Drain) -> None:
    def make() -> PaddedRows:
        return PaddedRows(list_reader(DOCUMENTS), byte_tokenizer, 8)

    whole = drain(make())
    for count in range(1, len(whole) + 1):
        head, position = make().read(0, None, count)
        assert equal(head + drain(make(), (2,), position=json.loads(json.dumps(position))), whole)


@pytest.mark.parametrize("kind", [PackedRows, PaddedRows])
def test_tokenizer_without_end_of_text_is_refused(kind: Any, list_reader: Any, byte_tokenizer: Any) -> None:
    byte_tokenizer.eos_token_id = None
    with pytest.raises(ValueError, match="end-of-text"):
        kind(list_reader([]), byte_tokenizer, 8)


def test_packed_rows_of_two_epochs_are_not_mixed_up(byte_tokenizer: Any) -> None:
    """A position is the same in every epoch, the document there is not: what is held must be the epoch's own."""

    class Changing:
        def read(self, epoch: int, position: Any, limit: int) -> tuple[list[str], Any]:
            return [f"epoch {epoch} " * 3], None

    packed = PackedRows(Changing(), byte_tokenizer, 8)
    for epoch in (0, 1, 0):
        row = packed.read(epoch, None, 1)[0][0]
        assert bytes(row.tokens_L.tolist()) == f"epoch {epoch} "[:8].encode()


def test_cutting_keeps_tokens_padding_and_documents() -> None:
    documents = np.array([0] * 9 + [1] * 5 + [-1] * 2, dtype=np.int32)
    row = Row(np.arange(16, dtype=np.int32), documents)
    firsts, pieces = [], []
    for seed in range(400):
        cut = cut_at_random(row, np.random.default_rng(seed))
        assert np.array_equal(cut.tokens_L, row.tokens_L)
        assert np.array_equal(cut.documents_L < 0, documents < 0)
        real = cut.documents_L[:14]
        assert (np.diff(real) >= 0).all(), "each piece is one run"
        assert cut.documents_L[8] != cut.documents_L[9], "documents that were apart stay apart"
        firsts.append(int((real == real[0]).sum()))
        pieces.append(len(np.unique(real)))
    # The first cut is uniform over the row: 1 ... 16, of which the first document lets 9 be seen.
    counts = np.bincount(firsts, minlength=10)[1:10]
    assert (counts[:8] > 8).all()
    assert counts[8] > counts[:8].max()
    assert max(pieces) > 4


def test_rows_that_are_cut_do_not_change_the_others() -> None:
    row = Row(np.arange(4, dtype=np.int32), np.zeros(4, dtype=np.int32))
    cut_at_random(row, np.random.default_rng(0))
    assert not row.documents_L.any()
