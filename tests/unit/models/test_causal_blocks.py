"""Token-causal halves of block diffusion, and a block after causal text: against pictures, definitions, other forwards.

The pictures are those of Nemotron-Labs-Diffusion, I-DLM and SDAR: a row for each query, noisy keys, then clean ones.
"""

from __future__ import annotations

import itertools
from typing import Literal

import numpy as np
import pytest
import torch

from config.model import BlockAttention
from config.training.runtime import AttentionBackend
from diffusionlm.models.attention_backends import prepare_attention
from diffusionlm.models.cache import PagedCache
from diffusionlm.models.patterns import (
    AttentionPattern,
    BlockCausal,
    BlockDiffusion,
    Causal,
    CausalThenBlock,
    CleanAndBlockCopies,
)
from diffusionlm.models.varlen import SequenceSlice, VarlenBatch
from tests.conftest import MakeModel
from tests.unit.models.attention_cases import assert_equal_with_gradients, attention_inputs, softmax_attention

LENGTH = 11
DOCUMENTS = [[0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1], [0] * 3 + [1] + [2] * 5 + [-1] * 2]
SEGMENTS = [[0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3], [0] * 3 + [1] + [2, 3, 3, 3, 3] + [-1] * 2]
FLAGS: list[tuple[BlockAttention, BlockAttention]] = [
    ("block", "block"),
    ("block", "token"),
    ("token", "block"),
    ("token", "token"),
]
"""Attention of the clean half, and of the noisy half."""
BLOCKS = (1, 2, 3, 4, 7, LENGTH, 100)

NOISY = {
    "block": ["####.... ........"] * 4 + ["....#### ####...."] * 4,
    "token": [
        *["#....... ........", "##...... ........", "###..... ........", "####.... ........"],
        *["....#... ####....", "....##.. ####....", "....###. ####....", "....#### ####...."],
    ],
}
CLEAN = {
    "block": ["........ ####...."] * 4 + ["........ ########"] * 4,
    "token": [f"........ {'#' * (i + 1):.<8}" for i in range(8)],
}


@pytest.mark.parametrize(("clean", "noisy"), FLAGS)
def test_pictures(clean: BlockAttention, noisy: BlockAttention) -> None:
    expected = [[mark == "#" for mark in row.replace(" ", "")] for row in NOISY[noisy] + CLEAN[clean]]
    assert BlockDiffusion(4, clean=clean, noisy=noisy).dense_mask(16).tolist() == [expected]


def run_start(numbers: list[int], position: int) -> int:
    while position and numbers[position - 1] == numbers[position]:
        position -= 1
    return position


def closed_form(
    block: int, clean: str, noisy: str, documents: list[int], segments: list[int], window: int | None
) -> list[list[bool]]:
    """The mask, key by key: bounds of a block are counted from its segment, those of a text from its document."""

    def is_visible(query: int, key: int) -> bool:
        (is_clean_query, i), (is_clean_key, j) = divmod(query, LENGTH), divmod(key, LENGTH)
        start = i - (i - run_start(segments, i)) % block
        in_block = start <= j < start + block and run_start(segments, i) == run_start(segments, j)
        if run_start(documents, i) != run_start(documents, j) or (window is not None and abs(i - j) >= window):
            return False
        if is_clean_query:
            return bool(is_clean_key) and (j <= i or (clean == "block" and in_block))
        return j < start if is_clean_key else in_block and (noisy == "block" or j <= i)

    return [[is_visible(query, key) for key in range(2 * LENGTH)] for query in range(2 * LENGTH)]


@pytest.mark.parametrize("window", [None, 1, 4, 50])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("clean", "noisy"), FLAGS)
def test_dense_and_intervals_equal_the_closed_form(
    clean: BlockAttention, noisy: BlockAttention, block: int, window: int | None
) -> None:
    whole = [[0] * LENGTH] * 2
    for documents, segments in ((None, None), (DOCUMENTS, None), (DOCUMENTS, SEGMENTS), (None, SEGMENTS)):
        ids = (None if numbers is None else torch.tensor(numbers) for numbers in (documents, segments))
        pattern = BlockDiffusion(block, next(ids), next(ids), clean=clean, noisy=noisy)
        rows = zip(documents or whole, segments or documents or whole, strict=True)
        expected = torch.tensor([closed_form(block, clean, noisy, *row, window) for row in rows])
        dense_mask = pattern.dense_mask(2 * LENGTH, window=window)
        assert torch.equal(dense_mask.expand_as(expected), expected)
        starts, ends = pattern.intervals(2 * LENGTH, window=window)
        keys = torch.arange(2 * LENGTH)
        num_ranges = ((keys >= starts[..., None]) & (keys < ends[..., None])).sum(dim=2)
        assert torch.equal(num_ranges.expand_as(expected), expected.long())
        assert starts.shape[-1] == 2


def test_each_option_has_its_own_mask() -> None:
    """With blocks of one token there is one mask; else no two options have the same."""
    masks = [BlockDiffusion(3, clean=clean, noisy=noisy).dense_mask(2 * LENGTH) for clean, noisy in FLAGS]
    assert not any(torch.equal(*pair) for pair in itertools.combinations(masks, 2))
    masks = [BlockDiffusion(1, clean=clean, noisy=noisy).dense_mask(2 * LENGTH) for clean, noisy in FLAGS]
    assert all(torch.equal(masks[0], mask) for mask in masks)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "tiled"])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("clean", "noisy"), FLAGS[1:])
def test_backends_equal_softmax(
    clean: BlockAttention, noisy: BlockAttention, window: int | None, backend: AttentionBackend
) -> None:
    length = 150
    documents = torch.tensor([[0] * 5 + [1] + [2] * 64 + [3] * 71 + [-1] * 9, [0] * 40 + [1] * 110])
    for block, ids in ((1, None), (7, None), (32, documents), (200, None)):
        pattern = BlockDiffusion(block, ids, clean=clean, noisy=noisy)
        inputs = attention_inputs(2 * length)
        expected = softmax_attention(*inputs, pattern.dense_mask(2 * length, window=window))
        ours = prepare_attention(pattern, 2 * length, "cpu", backend, window)(*inputs)
        assert_equal_with_gradients(ours, expected, inputs)


def random_tokens(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, 17, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("backend", ["eager", "sdpa", "tiled"])
@pytest.mark.parametrize("noisy", ["block", "token"])
@pytest.mark.parametrize("block", BLOCKS)
@torch.no_grad()
def test_halves_equal_forwards_of_one_half(
    tiny_model: MakeModel, block: int, noisy: BlockAttention, backend: Literal["eager", "sdpa", "tiled"]
) -> None:
    """The clean half is a causal forward, whatever the noise; a noisy block is one after causal text."""
    model = tiny_model(torch.float64, backend=backend)
    xt, x0 = random_tokens(2, LENGTH, seed=1), random_tokens(2, LENGTH)
    both = model(torch.cat([xt, x0], dim=1), pattern=BlockDiffusion(block, clean="token", noisy=noisy))
    torch.testing.assert_close(both[:, LENGTH:], model(x0, pattern=Causal()), rtol=1e-12, atol=1e-12)
    for start in range(0, LENGTH, block):
        end = min(start + block, LENGTH)
        text = torch.cat([x0[:, :start], xt[:, start:end]], dim=1)
        alone = model(text, pattern=Causal() if noisy == "token" else CausalThenBlock(start, end))
        torch.testing.assert_close(both[:, start:end], alone[:, start:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("clean", "noisy"), FLAGS[1:])
@torch.no_grad()
def test_packed_rows_equal_rows_alone(tiny_model: MakeModel, clean: BlockAttention, noisy: BlockAttention) -> None:
    model = tiny_model(torch.float64)
    xt, x0 = random_tokens(1, LENGTH, seed=1), random_tokens(1, LENGTH)
    ids = torch.tensor([DOCUMENTS[0]])
    positions = torch.tensor([[*range(5), *range(6)] * 2])
    pattern = BlockDiffusion(2, ids, clean=clean, noisy=noisy)
    packed = model(torch.cat([xt, x0], dim=1), pattern=pattern, positions=positions)
    for own in (slice(0, 5), slice(5, LENGTH)):
        rows = torch.cat([xt[:, own], x0[:, own]], dim=1)
        alone = model(rows, pattern=BlockDiffusion(2, clean=clean, noisy=noisy))
        of_document = torch.cat([packed[:, :LENGTH][:, own], packed[:, LENGTH:][:, own]], dim=1)
        torch.testing.assert_close(of_document, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize(("start", "end"), [(0, LENGTH), (4, LENGTH), (10, LENGTH), (4, 20)])
def test_causal_then_block_equals_its_definition(start: int, end: int, window: int | None) -> None:
    pattern: AttentionPattern = CausalThenBlock(start, end)
    expected = [
        [(key <= query or query >= start) and (window is None or abs(query - key) < window) for key in range(LENGTH)]
        for query in range(LENGTH)
    ]
    assert pattern.dense_mask(LENGTH, window=window).tolist() == [expected]
    intervals = pattern.intervals(LENGTH, window=window)
    assert intervals is not None
    starts, ends = intervals
    keys = torch.arange(LENGTH)
    assert torch.equal((keys >= starts[0]) & (keys < ends[0]), torch.tensor(expected))
    with pytest.raises(ValueError, match="a block from 4 to 4"):
        CausalThenBlock(4, 4)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@torch.no_grad()
def test_commit_and_draft_of_cached_texts_in_one_forward(
    tiny_model: MakeModel, backend: Literal["eager", "sdpa"]
) -> None:
    """The keys of the text are final after the forward of its block: a causal forward reads them."""
    model = tiny_model(torch.float64, backend=backend)
    tokens, masks = random_tokens(LENGTH), torch.full((4,), 18)
    cache = PagedCache(model.config, 8, 4, "cpu", torch.float64)

    def feed(inputs: torch.Tensor, start: int, pattern: AttentionPattern) -> torch.Tensor:
        end = start + len(inputs)
        part = SequenceSlice(start, end, end, pattern, pages=[5, 0, 3, 7], outputs=np.arange(start, end))
        logits_QV: torch.Tensor = model(inputs[None], pattern=VarlenBatch([part], cache))
        return logits_QV

    feed(tokens[:3], 0, Causal())
    both = feed(torch.cat([tokens[3:6], masks]), 3, CausalThenBlock(6, 10))
    whole = model(torch.cat([tokens[:6], masks])[None], pattern=CausalThenBlock(6, 10))[0]
    torch.testing.assert_close(both, whole[3:], rtol=1e-12, atol=1e-12)
    last = feed(tokens[6:], 6, Causal())
    torch.testing.assert_close(last, model(tokens[None], pattern=Causal())[0, 6:], rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="BlockDiffusion cannot be used with a cache"):
        feed(tokens[:4], 0, BlockDiffusion(2))


@pytest.mark.parametrize(("clean", "noisy"), FLAGS)
@torch.no_grad()
def test_copies_equal_rows_of_block_diffusion(
    tiny_model: MakeModel, clean: BlockAttention, noisy: BlockAttention
) -> None:
    model = tiny_model(torch.float64)
    xt, x0 = random_tokens(1, 12, seed=1), random_tokens(1, 12)
    rows = model(torch.cat([xt, x0], dim=1), pattern=BlockDiffusion(4, clean=clean, noisy=noisy))[0]
    ids = (*range(8), *range(8, 12), *range(4, 8))
    pattern = CleanAndBlockCopies(4, ids, ((8, 12), (12, 16)), clean=clean, noisy=noisy)
    inputs = torch.cat([x0[0, :8], xt[0, 8:12], xt[0, 4:8]])
    part = SequenceSlice(0, 16, 16, pattern, position_ids=np.array(ids))
    logits = model(inputs[None], pattern=VarlenBatch([part]))[0]
    torch.testing.assert_close(logits, torch.cat([rows[12:20], rows[8:12], rows[4:8]]), rtol=1e-12, atol=1e-12)


def test_options_of_the_clean_half_are_those_of_decoding() -> None:
    for block in BLOCKS:
        for clean, alone in (("block", BlockCausal(block)), ("token", Causal())):
            half = BlockDiffusion(block, clean=clean).dense_mask(2 * LENGTH)[:, LENGTH:, LENGTH:]  # type: ignore[arg-type]
            assert torch.equal(half, alone.dense_mask(LENGTH))
