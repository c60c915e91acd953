"""Noisy and clean halves in one forward: no leaks, and the same result as decoding block by block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from diffusionlm.models.patterns import Bidirectional, BlockCausal, BlockDiffusion
from diffusionlm.models.transformer import Transformer

MakeModel = Callable[..., Transformer]

LENGTH = 22
MASK = 18
BACKENDS = ["eager", "sdpa", "tiled"]


@dataclass(frozen=True)
class Leaky(BlockDiffusion):
    """The mistake to be found: a noisy block that sees its own clean tokens."""

    def dense_mask(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> torch.Tensor:
        half = length // 2
        leaky = super().dense_mask(length, device, window)
        leaky[:, :half, half:] |= leaky[:, :half, :half]
        return leaky


def streams(rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Noised and clean tokens."""
    generator = torch.Generator().manual_seed(7)
    clean = torch.randint(0, 17, (rows, LENGTH), generator=generator)
    return clean.masked_fill(torch.rand(clean.shape, generator=generator) < 0.5, MASK), clean


def changed_in(clean: torch.Tensor, block: int, block_length: int) -> torch.Tensor:
    """Clean tokens, all of one block other ones."""
    is_inside = torch.arange(LENGTH) // block_length == block
    return torch.where(is_inside, (clean + 3) % 17, clean)


def noisy_logits(model: Transformer, pattern: BlockDiffusion, xt: torch.Tensor, x0: torch.Tensor) -> torch.Tensor:
    return model(torch.cat([xt, x0], dim=1), pattern=pattern)[:, :LENGTH]


def moved_blocks(model: Transformer, pattern: BlockDiffusion, block: int) -> list[int]:
    """Noisy blocks whose outputs change with the clean tokens of one block."""
    xt, x0 = streams()
    before = noisy_logits(model, pattern, xt, x0)
    after = noisy_logits(model, pattern, xt, changed_in(x0, block, pattern.block_length))
    is_moved_L = (before != after).any(dim=2).any(dim=0)
    return sorted({index // pattern.block_length for index in is_moved_L.nonzero().flatten().tolist()})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_length", [1, 3, 4, 8])
def test_clean_tokens_reach_later_noisy_blocks_only(tiny_model: MakeModel, block_length: int, backend: str) -> None:
    model = tiny_model(torch.float64, backend=backend)
    blocks = -(-LENGTH // block_length)
    for block in (0, blocks // 2, blocks - 1):
        assert moved_blocks(model, BlockDiffusion(block_length), block) == list(range(block + 1, blocks))


def test_a_leak_would_be_detected(tiny_model: MakeModel) -> None:
    model = tiny_model(torch.float64, backend="sdpa")
    assert moved_blocks(model, Leaky(4), 2) == [2, 3, 4, 5]


@pytest.mark.parametrize("backend", BACKENDS)
def test_noise_stays_in_its_block(tiny_model: MakeModel, backend: str) -> None:
    """Neither another noisy block nor any clean row knows of it."""
    model = tiny_model(torch.float64, backend=backend)
    xt, x0 = streams()
    pattern = BlockDiffusion(4)
    before = model(torch.cat([xt, x0], dim=1), pattern=pattern)
    after = model(torch.cat([changed_in(xt, 2, 4), x0], dim=1), pattern=pattern)
    moved = (before != after).any(dim=2).any(dim=0).nonzero().flatten().tolist()
    assert moved == [8, 9, 10, 11]


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_are_separate_in_both_halves(tiny_model: MakeModel, backend: str) -> None:
    model = tiny_model(torch.float64, backend=backend)
    xt, x0 = streams()
    documents = torch.tensor([[0] * 9 + [1] * 10 + [-1] * 3, [0] * 5 + [1] * 17])
    packed = noisy_logits(model, BlockDiffusion(4, documents), xt, x0)
    for row, (first, last) in [(0, (0, 9)), (0, (9, 19)), (1, (0, 5)), (1, (5, 22))]:
        part = torch.cat([xt[row : row + 1, first:last], x0[row : row + 1, first:last]], dim=1)
        alone = model(part, pattern=BlockDiffusion(4))[:, : last - first]
        # Rotations are relative up to rounding: cosines are taken in fp32.
        torch.testing.assert_close(packed[row : row + 1, first:last], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block_length", [22, 100])
def test_one_block_is_plain_bidirectional(tiny_model: MakeModel, block_length: int) -> None:
    model = tiny_model(torch.float64)
    xt, x0 = streams()
    plain = model(xt, pattern=Bidirectional())
    for clean in (x0, torch.zeros_like(x0)):
        noisy = noisy_logits(model, BlockDiffusion(block_length), xt, clean)
        torch.testing.assert_close(noisy, plain, rtol=1e-12, atol=1e-12)


def test_the_context_counts_tokens_of_one_half(tiny_model: MakeModel) -> None:
    model = tiny_model(max_position_embeddings=8)
    assert model(torch.zeros(1, 16, dtype=torch.int64), pattern=BlockDiffusion(4)).shape == (1, 16, 19)
    with pytest.raises(ValueError, match=r"9 tokens.*max_position_embeddings = 8"):
        model(torch.zeros(1, 18, dtype=torch.int64), pattern=BlockDiffusion(4))
    with pytest.raises(ValueError, match=r"7 positions.*two halves"):
        model(torch.zeros(1, 7, dtype=torch.int64), pattern=BlockDiffusion(4))
