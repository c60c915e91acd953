"""Patterns against their definition, position by position."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from diffusionlm.models.patterns import AttentionPattern, Bidirectional, BlockCausal, Causal, document_offsets

LENGTH = 11
DOCUMENTS = torch.tensor(
    [
        [0, 0, 0, 0, 1, 1, 1, 1, 1, 2, -1],
        [0] * LENGTH,
        list(range(LENGTH)),
        [0, 0, 0, 1, 1, 1, 1, -1, -1, -1, -1],
    ]
)

Rule = Callable[[int, int], bool]
"""May the query see the key, both counted from the start of their document."""


def loops(rule: Rule, documents: list[int] | None) -> list[list[bool]]:
    documents = documents or [0] * LENGTH
    starts = [documents.index(number) for number in documents]
    return [
        [documents[query] == documents[key] and rule(query - starts[query], key - starts[key]) for key in range(LENGTH)]
        for query in range(LENGTH)
    ]


CASES: list[tuple[AttentionPattern, Rule]] = [
    (Bidirectional(), lambda query, key: True),
    (Causal(), lambda query, key: key <= query),
    (BlockCausal(1), lambda query, key: key <= query),
    (BlockCausal(3), lambda query, key: key // 3 <= query // 3),
    (BlockCausal(4), lambda query, key: key // 4 <= query // 4),
    (BlockCausal(100), lambda query, key: True),
]


@pytest.mark.parametrize(("pattern", "rule"), CASES, ids=str)
def test_dense_equals_loops(pattern: AttentionPattern, rule: Rule) -> None:
    assert pattern.dense(LENGTH).tolist() == [loops(rule, None)]
    packed = pattern.with_documents(DOCUMENTS)
    assert packed.dense(LENGTH).tolist() == [loops(rule, row) for row in DOCUMENTS.tolist()]
    assert packed.dense(LENGTH).dtype == torch.bool
    assert pattern.documents_BL is None, "with_documents must not change its pattern"


@pytest.mark.parametrize(("pattern", "rule"), CASES, ids=str)
def test_unrestricted_means_no_mask_is_needed(pattern: AttentionPattern, rule: Rule) -> None:
    for each in (pattern, pattern.with_documents(DOCUMENTS)):
        if each.is_unrestricted:
            assert each.dense(LENGTH).all()
    assert Bidirectional().is_unrestricted
    assert not pattern.with_documents(DOCUMENTS).is_unrestricted


def test_every_position_sees_itself() -> None:
    for pattern, _ in CASES:
        assert pattern.with_documents(DOCUMENTS).dense(LENGTH).diagonal(dim1=1, dim2=2).all()


def test_offsets_count_from_the_document() -> None:
    assert document_offsets(DOCUMENTS).tolist() == [
        [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 0],
        list(range(LENGTH)),
        [0] * LENGTH,
        [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3],
    ]


def test_block_length_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block_length = 0"):
        BlockCausal(0)
