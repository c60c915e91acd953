"""Noisy and clean halves, or copies of blocks, in one forward: no leaks, and the result of decoding block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
import torch

from diffusionlm.models.patterns import BlockCausal, BlockDiffusion, CleanAndBlockCopies
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.varlen import SequenceSlice, VarlenBatch
from tests.conftest import MakeModel

LENGTH = 22
MASK = 18
BACKENDS = ["eager", "sdpa", "tiled"]


def streams(rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Noised and clean tokens."""
    generator = torch.Generator().manual_seed(7)
    clean = torch.randint(0, 17, (rows, LENGTH), generator=generator)
    return clean.masked_fill(torch.rand(clean.shape, generator=generator) < 0.5, MASK), clean


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_length", [1, 2, 4, 7, 22, 100])
@pytest.mark.parametrize("window", [None, 6])
def test_one_forward_equals_block_by_block(
    tiny_model: MakeModel, block_length: int, window: int | None, backend: str
) -> None:
    """The noisy rows of block b: the clean blocks before it and the noisy block, block-causal."""
    sliding = {} if window is None else {"sliding_window": window, "layer_types": ("sliding_attention",) * 2}
    model = tiny_model(torch.float64, backend=backend, **sliding)
    xt, x0 = streams()
    both = model(torch.cat([xt, x0], dim=1), pattern=BlockDiffusion(block_length))
    for start in range(0, LENGTH, block_length):
        end = min(start + block_length, LENGTH)
        context = torch.cat([x0[:, :start], xt[:, start:end]], dim=1)
        alone = model(context, pattern=BlockCausal(block_length))[:, start:]
        torch.testing.assert_close(both[:, start:end], alone, rtol=1e-12, atol=1e-12)
    clean = model(x0, pattern=BlockCausal(block_length))
    torch.testing.assert_close(both[:, LENGTH:], clean, rtol=1e-12, atol=1e-12)


def test_the_context_counts_tokens_of_one_half(tiny_model: MakeModel) -> None:
    model = tiny_model(max_position_embeddings=8)
    assert model(torch.zeros(1, 16, dtype=torch.int64), pattern=BlockDiffusion(4)).shape == (1, 16, 19)
    with pytest.raises(ValueError, match=r"9 tokens.*max_position_embeddings = 8"):
        model(torch.zeros(1, 18, dtype=torch.int64), pattern=BlockDiffusion(4))
    with pytest.raises(ValueError, match=r"7 positions.*two halves"):
        model(torch.zeros(1, 7, dtype=torch.int64), pattern=BlockDiffusion(4))


COPIES = [(4, 4), (0, 4), (8, 3), (4, 4)]
"""First position and length of each copy: blocks of 4, the last one of 3 tokens."""


def build_pattern(num_clean: int, copies: list[tuple[int, int]], block_length: int = 4) -> CleanAndBlockCopies:
    ids = [*range(num_clean), *(start + i for start, length in copies for i in range(length))]
    ends = (num_clean + np.cumsum([length for _, length in copies])).tolist()
    bounds = [(end - length, end) for end, (_, length) in zip(ends, copies, strict=True)]
    return CleanAndBlockCopies(block_length, tuple(ids), tuple(bounds))


@pytest.mark.parametrize("window", [None, 1, 3, 6, 50])
@pytest.mark.parametrize(("num_clean", "copies"), [(10, COPIES), (0, [(0, 3)])])
def test_mask_equals_the_definition(num_clean: int, copies: list[tuple[int, int]], window: int | None) -> None:
    pattern = build_pattern(num_clean, copies)
    owners = [-1] * num_clean + [number for number, (_, length) in enumerate(copies) for _ in range(length)]
    positions = pattern.position_ids
    expected = [
        [
            (
                (owners[key] == owners[query] >= 0)
                or (owners[key] == owners[query] == -1 and positions[key] // 4 <= positions[query] // 4)
                or (owners[key] == -1 and owners[query] >= 0 and positions[key] // 4 < positions[query] // 4)
            )
            and (window is None or abs(positions[key] - positions[query]) < window)
            for key in range(len(owners))
        ]
        for query in range(len(owners))
    ]
    assert pattern.dense_mask(len(owners), window=window).tolist() == [expected]
    with pytest.raises(ValueError, match="position_ids"):
        pattern.dense_mask(len(owners) + 1)


@pytest.mark.parametrize("backend", ["sdpa", "eager", "tiled"])
@torch.no_grad()
def test_copies_of_blocks_equal_rows_of_block_diffusion(
    tiny_model: Callable[..., Transformer], backend: Literal["sdpa", "eager", "tiled"]
) -> None:
    model = tiny_model(torch.float64, backend=backend, max_position_embeddings=12)
    clean, noisy = torch.randint(0, 10, (2, 12), generator=torch.Generator().manual_seed(1))
    logits_2LV = model(torch.cat([noisy, clean])[None], pattern=BlockDiffusion(4))[0]
    copies = [(8, 4), (0, 4), (4, 4)]
    pattern = build_pattern(8, copies)
    tokens = torch.cat([clean[:8], *(noisy[start : start + length] for start, length in copies)])
    part = SequenceSlice(0, 20, 20, pattern, position_ids=np.array(pattern.position_ids))
    other = SequenceSlice(0, 3, 3, build_pattern(0, [(0, 3)]))
    # More inputs than the model's context: the positions are within it.
    both = model(torch.cat([tokens, tokens[:3]])[None], pattern=VarlenBatch([part, other]))[0]
    torch.testing.assert_close(both[:8], logits_2LV[12:20])
    for first, (start, length) in zip((8, 12, 16), copies, strict=True):
        torch.testing.assert_close(both[first : first + length], logits_2LV[start : start + length])
    with pytest.raises(ValueError, match="2 position_ids for 3 inputs"):
        SequenceSlice(0, 3, 3, pattern, position_ids=np.arange(2))
    too_long = SequenceSlice(0, 20, 20, pattern, position_ids=np.array(pattern.position_ids) + 1)
    with pytest.raises(ValueError, match="13 tokens are more than the model's context"):
        model(tokens[None], pattern=VarlenBatch([too_long]))
