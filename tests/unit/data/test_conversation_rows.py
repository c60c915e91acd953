"""Rows of conversations: no conversation is cut, and targets, EOS padding and segments stay with their tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from diffusionlm.data.loader import collate_rows
from diffusionlm.data.packing import Document, Row, RowFormat, SegmentLabelingReader, group_best_fit, label_segments
from diffusionlm.data.packing import pack_conversations as pack

Drain = Callable[..., list[Any]]
PAD = 99


def document(*segments: str, first_token: int = 0) -> Document:
    """Each segment is spelled: `p` prompt, `a` answer, `f` EOS padding."""
    letters = "".join(segments)
    return Document(
        np.arange(first_token, first_token + len(letters), dtype=np.int32),
        np.array([letter in "af" for letter in letters]),
        np.array([letter == "f" for letter in letters]),
        np.repeat(np.arange(len(segments), dtype=np.int32), [len(segment) for segment in segments]),
    )


def facts(row: Row) -> tuple[list[int], ...]:
    assert row.segment_ids_L is not None and row.is_eos_padding_L is not None
    values = (row.tokens_L, row.document_ids_L, row.loss_mask_L, row.is_eos_padding_L, row.segment_ids_L)
    return tuple(value.astype(int).tolist() for value in values)


def test_two_conversations_share_a_row(list_reader: Any, drain: Drain) -> None:
    documents = [document("pa", "paf"), document("ppa", first_token=20)]
    rows = drain(pack(list_reader(documents), RowFormat(9, PAD), 10, is_padded=False))
    assert [facts(row) for row in rows] == [
        (
            [0, 1, 2, 3, 4, 20, 21, 22, PAD],
            [0, 0, 0, 0, 0, 1, 1, 1, -1],
            [0, 1, 0, 1, 1, 0, 0, 1, 0],
            [0, 0, 0, 0, 1, 0, 0, 0, 0],
            [0, 0, 1, 1, 1, 2, 2, 2, -1],
        )
    ]


def test_padded_rows_hold_one_conversation_each(list_reader: Any, drain: Drain) -> None:
    documents = [document("pa"), document("pa", "paf", first_token=10)]
    rows = drain(pack(list_reader(documents), RowFormat(6, PAD), 10, is_padded=True))
    assert [row.tokens_L.tolist() for row in rows] == [[0, 1, PAD, PAD, PAD, PAD], [10, 11, 12, 13, 14, PAD]]


@pytest.mark.parametrize("row_length", [7, 20, 64])
def test_no_conversation_is_cut_or_lost(row_length: int, list_reader: Any, drain: Drain) -> None:
    rng = np.random.default_rng(0)
    documents = [
        document("p" * int(rng.integers(1, 4)) + "a" * int(rng.integers(1, 4)), first_token=100 * index)
        for index in range(50)
    ]
    rows = drain(pack(list_reader(documents), RowFormat(row_length, PAD), 16, is_padded=False))
    found = [
        (row.tokens_L[mine].tolist(), row.loss_mask_L[mine].tolist())
        for row in rows
        for index in range(row.document_ids_L.max() + 1)
        for mine in [row.document_ids_L == index]
    ]
    assert sorted(found) == sorted((item.tokens.tolist(), item.loss_mask.tolist()) for item in documents)


def test_text_beside_conversations_has_a_segment_per_document(list_reader: Any, drain: Drain) -> None:
    text = Row(np.arange(5, dtype=np.int32), np.array([0, 0, 1, 1, -1], dtype=np.int32), np.ones(5, dtype=np.bool_))
    (row,) = drain(SegmentLabelingReader(list_reader([text])))
    assert facts(row)[3:] == ([0] * 5, [0, 0, 1, 1, -1])
    chat = drain(pack(list_reader([document("pa")]), RowFormat(5, PAD), 1, is_padded=True))[0]
    batch = collate_rows([row, chat])
    assert batch.segment_BL is not None and batch.is_eos_padding_BL is not None
    assert batch.segment_BL.tolist() == [[0, 0, 1, 1, -1], [0, 0, -1, -1, -1]]
    assert not batch.is_eos_padding_BL.any()
    assert collate_rows([text]).segment_BL is None
    assert label_segments(text).tokens_L is text.tokens_L


def test_best_fit_takes_the_fullest_row() -> None:
    assert group_best_fit(["aaaa", "b", "ccc", "dd"], 5) == [["aaaa", "b"], ["ccc", "dd"]]
