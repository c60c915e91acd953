"""Patterns against their definition, position by position, and their closed form against both."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from diffusionlm.models.patterns import (
    AttentionPattern,
    Bidirectional,
    BlockCausal,
    BlockDiffusion,
    Causal,
    DenseBias,
    PromptAndOwnBlock,
    document_offsets,
)

LENGTH = 11
DOCUMENTS = torch.tensor(
    [
        [0, 0, 0, 0, 1, 1, 1, 1, 1, 2, -1],
        [0] * LENGTH,
        list(range(LENGTH)),
        [0, 0, 0, 1, 1, 1, 1, -1, -1, -1, -1],
        [-1, 5, 5, 5, 5, 5, 5, 5, 5, 5, -1],
    ]
)
PROMPTS = torch.tensor([3, 1, 0, 2, 100])
"""Longest prompt of each document, by row; a shorter document is all prompt."""

Rule = Callable[[int, int], bool]
"""May the query see the key, both counted from the start of their document?"""


def runs(documents: list[int]) -> Iterator[tuple[int, int]]:
    """First position of its document for each position, and one behind the last."""
    for index, number in enumerate(documents):
        first, end = index, index + 1
        while first > 0 and documents[first - 1] == number:
            first -= 1
        while end < len(documents) and documents[end] == number:
            end += 1
        yield first, end


def loops(rule: Rule, documents: list[int] | None, window: int | None = None) -> list[list[bool]]:
    spans = list(runs(documents or [0] * LENGTH))
    return [
        [
            spans[query] == spans[key]
            and rule(query - spans[query][0], key - spans[key][0])
            and (window is None or abs(query - key) < window)
            for key in range(LENGTH)
        ]
        for query in range(LENGTH)
    ]


def prompt_rule(prompt: int, block: int) -> Rule:
    def rule(query: int, key: int) -> bool:
        if query < prompt:
            return key < prompt
        return key < prompt or (key - prompt) // block == (query - prompt) // block

    return rule


CASES: list[tuple[AttentionPattern, Rule]] = [
    (Bidirectional(), lambda query, key: True),
    (Causal(), lambda query, key: key <= query),
    (BlockCausal(1), lambda query, key: key <= query),
    (BlockCausal(3), lambda query, key: key // 3 <= query // 3),
    (BlockCausal(4), lambda query, key: key // 4 <= query // 4),
    (BlockCausal(100), lambda query, key: True),
]
BLOCKS = (1, 2, 3, 4, 7, 100)
WINDOWS = (None, 1, 2, 4, 10, 11, 50)


def prompts(documents: torch.Tensor | None) -> torch.Tensor:
    """Boolean [B, L] or, without documents, [1, L] of a prompt of 3."""
    if documents is None:
        return torch.arange(LENGTH)[None] < 3
    return document_offsets(documents) < PROMPTS[:, None]


def visible_keys(intervals: tuple[torch.Tensor, torch.Tensor], length: int) -> torch.Tensor:
    """How often a query sees a key through its ranges."""
    starts, ends = intervals
    keys = torch.arange(length)
    assert (starts <= ends).all() and (starts >= 0).all() and (ends <= length).all()
    return ((keys >= starts[..., None]) & (keys < ends[..., None])).sum(dim=2)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("pattern", "rule"), CASES, ids=lambda case: str(case) if not callable(case) else "")
def test_dense_equals_loops(pattern: AttentionPattern, rule: Rule, window: int | None) -> None:
    assert pattern.dense_mask(LENGTH, window=window).tolist() == [loops(rule, None, window)]
    packed = pattern.with_documents(DOCUMENTS)
    dense_mask = packed.dense_mask(LENGTH, window=window)
    assert dense_mask.tolist() == [loops(rule, row, window) for row in DOCUMENTS.tolist()]
    assert dense_mask.dtype == torch.bool
    assert pattern.documents_BL is None, "with_documents must not change its pattern"
    assert pattern.positions_per_token == 1


SEGMENTS = torch.tensor(
    [
        [0, 0, 0, 1, 2, 2, 3, 3, 3, 4, -1],
        [0] * 5 + [1] + [2] * 5,
        list(range(LENGTH)),
        [0, 0, 0, 1, 1, 2, 2, -1, -1, -1, -1],
        [-1, 0, 0, 0, 0, 1, 1, 1, 1, 1, -1],
    ]
)
"""Runs inside of DOCUMENTS."""


def two_streams(
    block: int, documents: list[int] | None, segments: list[int] | None, window: int | None
) -> list[list[bool]]:
    """The table of block diffusion, quarter by quarter. Blocks start with each segment, or document: pairs of the start
    and the number of a block are compared in order."""
    starts = [first for first, _ in runs(segments or documents or [0] * LENGTH)]
    blocks = [(starts[i], (i - starts[i]) // block) for i in range(LENGTH)]
    together = loops(lambda query, key: True, documents, window)

    def quarter(is_visible: Callable[[tuple[int, int], tuple[int, int]], bool]) -> list[list[bool]]:
        return [
            [together[query][key] and is_visible(blocks[query], blocks[key]) for key in range(LENGTH)]
            for query in range(LENGTH)
        ]

    same, before, upto = quarter(operator.eq), quarter(operator.gt), quarter(operator.ge)
    return [same[i] + before[i] for i in range(LENGTH)] + [[False] * LENGTH + upto[i] for i in range(LENGTH)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(
    ("documents", "segments"), [(None, None), (DOCUMENTS, None), (DOCUMENTS, SEGMENTS), (None, SEGMENTS)]
)
def test_block_diffusion_equals_loops(
    documents: torch.Tensor | None, segments: torch.Tensor | None, block: int, window: int | None
) -> None:
    pattern = BlockDiffusion(block, documents, segments)
    assert pattern.positions_per_token == 2
    num_rows = 1 if documents is segments is None else len(DOCUMENTS)
    documents_of_rows, segments_of_rows = (
        [None] * num_rows if ids_BL is None else ids_BL.tolist() for ids_BL in (documents, segments)
    )
    rows = zip(documents_of_rows, segments_of_rows, strict=True)
    dense_mask = pattern.dense_mask(2 * LENGTH, window=window)
    assert dense_mask.tolist() == [two_streams(block, *row, window) for row in rows]
    intervals = pattern.intervals(2 * LENGTH, window=window)
    assert torch.equal(visible_keys(intervals, 2 * LENGTH), dense_mask.long())


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block", BLOCKS)
def test_block_causal_is_the_clean_half_of_block_diffusion(block: int, window: int | None) -> None:
    """The attention of decoding is that of training, also where blocks start with each segment."""
    for documents, segments in ((None, None), (None, SEGMENTS), (DOCUMENTS, None), (DOCUMENTS, SEGMENTS)):
        pattern = BlockCausal(block, documents, segments)
        clean_half = BlockDiffusion(block, documents, segments).dense_mask(2 * LENGTH, window=window)
        dense_mask = pattern.dense_mask(LENGTH, window=window)
        assert torch.equal(dense_mask, clean_half[:, LENGTH:, LENGTH:])
        intervals = pattern.intervals(LENGTH, window=window)
        assert torch.equal(visible_keys(intervals, LENGTH), dense_mask.long())
    ends_BL = BlockCausal(block, None, SEGMENTS).dense_mask(LENGTH).sum(dim=2)
    positions_BQ = torch.tensor([[0, 5, LENGTH - 1], [7, 7, 1]])
    limits_BQ = BlockCausal(block, None, SEGMENTS[:2]).key_limit(positions_BQ)
    assert torch.equal(limits_BQ, ends_BL[:2].gather(1, positions_BQ))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block", BLOCKS)
def test_prompt_and_own_block_equals_loops(block: int, window: int | None) -> None:
    pattern = PromptAndOwnBlock(block, prompts(None))
    assert pattern.dense_mask(LENGTH, window=window).tolist() == [loops(prompt_rule(3, block), None, window)]
    packed = PromptAndOwnBlock(block, prompts(DOCUMENTS)).with_documents(DOCUMENTS).dense_mask(LENGTH, window=window)
    assert packed.tolist() == [
        loops(prompt_rule(prompt, block), row, window)
        for prompt, row in zip(PROMPTS.tolist(), DOCUMENTS.tolist(), strict=True)
    ]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["", "documents"])
def test_intervals_equal_dense(documents: torch.Tensor | None, window: int | None) -> None:
    patterns: list[AttentionPattern] = [Bidirectional(documents), Causal(documents)]
    for block in BLOCKS:
        patterns += [BlockCausal(block, documents), BlockDiffusion(block, documents)]
        patterns += [PromptAndOwnBlock(block, prompts(documents), documents)]
    for pattern in patterns:
        length = LENGTH * pattern.positions_per_token
        intervals = pattern.intervals(length, window=window)
        assert intervals is not None
        expected = pattern.dense_mask(length, window=window).long()
        assert intervals[0].shape[:2] == expected.shape[:2], pattern
        assert torch.equal(visible_keys(intervals, length), expected), pattern  # a key is in one range only: never 2


def test_one_prompt_for_all_rows_of_documents() -> None:
    documents = torch.tensor([[0] * 6, [1] * 6])
    pattern = PromptAndOwnBlock(2, torch.arange(6)[None] < 3, documents)
    dense_mask = pattern.dense_mask(6)
    assert dense_mask.shape == (2, 6, 6) and torch.equal(dense_mask[0], dense_mask[1])
    intervals = pattern.intervals(6)
    assert torch.equal(visible_keys(intervals, 6), dense_mask.long())


@pytest.mark.parametrize("shape", [(LENGTH, LENGTH), (1, LENGTH, LENGTH), (5, LENGTH, LENGTH), (5, 2, LENGTH, LENGTH)])
def test_dense_bias(shape: tuple[int, ...]) -> None:
    bias = torch.randn(shape)
    pattern = DenseBias(bias)
    general: AttentionPattern = pattern
    assert torch.equal(pattern.dense_mask(LENGTH).squeeze(), bias.squeeze())
    assert general.intervals(LENGTH) is None and not pattern.is_unrestricted
    restricted = pattern.with_documents(DOCUMENTS).dense_mask(LENGTH, window=3)
    allowed = Bidirectional(DOCUMENTS).dense_mask(LENGTH, window=3)
    allowed = allowed[:, None] if len(shape) == 4 else allowed
    assert torch.equal(restricted, torch.where(allowed, bias, -torch.inf))
    boolean = replace(pattern, bias=bias > 0, documents_BL=DOCUMENTS).dense_mask(LENGTH, window=3)
    assert torch.equal(boolean, (bias > 0) & allowed)


@pytest.mark.parametrize(("pattern", "rule"), CASES, ids=lambda case: str(case) if not callable(case) else "")
def test_unrestricted_means_no_mask_is_needed(pattern: AttentionPattern, rule: Rule) -> None:
    for value in (pattern, pattern.with_documents(DOCUMENTS)):
        if value.is_unrestricted:
            assert value.dense_mask(LENGTH).all()
    assert Bidirectional().is_unrestricted
    assert not pattern.with_documents(DOCUMENTS).is_unrestricted


def test_offsets_count_from_the_document() -> None:
    assert document_offsets(DOCUMENTS).tolist() == [
        [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 0],
        list(range(LENGTH)),
        [0] * LENGTH,
        [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3],
        [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0],
    ]


def test_patterns_move_with_their_tensors() -> None:
    assert Bidirectional().to("meta") == Bidirectional()
    moved = [pattern.with_documents(DOCUMENTS).to("meta") for pattern, _ in CASES]
    moved += [BlockDiffusion(3, DOCUMENTS).to("meta"), PromptAndOwnBlock(3, prompts(None), DOCUMENTS).to("meta")]
    moved += [DenseBias(torch.zeros(LENGTH, LENGTH), DOCUMENTS).to("meta")]
    for pattern in moved:
        assert pattern.documents_BL is not None and pattern.documents_BL.is_meta
    assert PromptAndOwnBlock(3, prompts(None)).to("meta").is_prompt_BL.is_meta
    assert DenseBias(torch.zeros(LENGTH, LENGTH)).to("meta").bias.is_meta


def test_errors_name_value_and_remedy() -> None:
    for make in (BlockCausal, BlockDiffusion, lambda block: PromptAndOwnBlock(block, prompts(None))):
        with pytest.raises(ValueError, match="block_length = 0"):
            make(0)
    for use in (BlockDiffusion(2).dense_mask, BlockDiffusion(2).intervals):
        with pytest.raises(ValueError, match=r"7 positions.*two halves"):
            use(7)
    for pattern in (Bidirectional(), Causal(), BlockCausal(2), BlockDiffusion(2)):
        for use in (pattern.dense_mask, pattern.intervals):
            with pytest.raises(ValueError, match="window = 0"):
                use(12, window=0)
        with pytest.raises(ValueError, match=rf"documents_BL is for {LENGTH} tokens, the sequence has 6"):
            pattern.with_documents(DOCUMENTS).dense_mask(6 * pattern.positions_per_token)
    with pytest.raises(ValueError, match=r"is_prompt_BL.*int64"):
        PromptAndOwnBlock(2, torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="is_prompt_BL is for 11 tokens, the sequence has 12"):
        PromptAndOwnBlock(2, prompts(None)).dense_mask(12)
    with pytest.raises(ValueError, match=r"prefix of each document.*documents_BL"):
        PromptAndOwnBlock(2, prompts(DOCUMENTS)).dense_mask(LENGTH)
    for shape in ([4], [4, 5], [1, 1, 1, 4, 4]):
        with pytest.raises(ValueError, match=r"\[L, L\]"):
            DenseBias(torch.zeros(shape))
    with pytest.raises(ValueError, match="int64"):
        DenseBias(torch.zeros(4, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="bias is for 4 positions, the sequence has 5"):
        DenseBias(torch.zeros(4, 4)).dense_mask(5)
