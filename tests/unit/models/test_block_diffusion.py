"""Noisy and clean halves in one forward: no leaks, and the same result as decoding block by block."""

from __future__ import annotations

import pytest
import torch

from diffusionlm.models.patterns import BlockCausal, BlockDiffusion
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
