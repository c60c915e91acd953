"""Tiles: their queries and keys, and the memory and precision of tiled attention."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from diffusionlm.models import tiled
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, BlockCausal, BlockDiffusion, Causal
from diffusionlm.models.tiled import Tile, attend_tiled, build_tiles, tile_density

DOCUMENTS = torch.tensor([[0] * 40 + [1] * 100 + [2] * 3 + [-1] * 17, [0] * 100 + [1] * 60])


def tiles_of(pattern: AttentionPattern, length: int, dtype: torch.dtype = torch.float32) -> tuple[Tile, ...]:
    intervals = pattern.intervals(length)
    assert intervals is not None
    return build_tiles(intervals, pattern.positions_per_token, dtype)


@pytest.mark.parametrize("length", [1, 63, 64, 150, 512])
@pytest.mark.parametrize("block", [1, 2, 3, 5, 7, 16, 40, 48, 64, 100, 128, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_cover_all_queries_and_end_with_blocks(length: int, block: int, dtype: torch.dtype) -> None:
    tiles = tiles_of(BlockDiffusion(block), 2 * length, dtype)
    requested = {torch.float32: tiled.TILE_LENGTH, torch.bfloat16: tiled.BFLOAT16_TILE_LENGTH}[dtype]
    assert tiles[0].first == 0 and tiles[-1].end == 2 * length
    for tile, following in pairwise(tiles):
        assert tile.end == following.first
    assert length in {tile.first for tile in tiles}, "a tile is in both streams"
    for tile in tiles:
        inside, end = tile.first % length, (tile.end - 1) % length + 1
        assert end - inside <= requested * 3 // 2
        if block <= requested // 2:
            assert end % block == 0 or end == length
            assert end == length or end - inside >= requested // 2


def test_no_bias_where_blocks_are_as_long_as_tiles() -> None:
    for block in (64, 128, 256):
        assert not any(tile.biases for tile in tiles_of(BlockDiffusion(block), 1024))
        assert not any(tile.biases for tile in tiles_of(BlockCausal(block), 1024, torch.bfloat16) if block >= 128)


def test_biases_are_small_without_documents() -> None:
    """Only the staircase: at most a tile of columns for each range."""
    for tile in tiles_of(BlockDiffusion(8), 2048):
        assert all(bias.shape[-1] <= tiled.TILE_LENGTH and bias.shape[0] == 1 for _, bias in tile.biases)
        assert len(tile.biases) <= 2


@pytest.mark.parametrize(("block", "expected"), [(1, 0.32), (32, 0.30), (64, 0.2813), (128, 0.3125)])
def test_density_of_block_diffusion(block: int, expected: float) -> None:
    """The mask itself has 1/4 + block / (4 * 512) of the pairs."""
    exact = 0.25 + block / 2048
    result = tile_density(tiles_of(BlockDiffusion(block), 1024), 1024)
    assert exact - 1e-9 <= result <= expected + 1e-3


def inputs(dtype: torch.dtype = torch.float64, length: int = 70) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (torch.randn(2, length, heads, 3, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    return q, k, v


@pytest.mark.parametrize("pattern", [BlockDiffusion(3), Bidirectional(DOCUMENTS[:, :70])], ids=["blocks", "documents"])
def test_probabilities_are_saved_or_recomputed(pattern: AttentionPattern, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = tiles_of(pattern, 70)
    qkv = inputs()
    kept_tensors: list[int] = []

    def gradients() -> list[torch.Tensor]:
        out = attend_tiled(*qkv, tiles)
        function: Any = out.grad_fn
        while "Tiled" not in type(function).__name__:
            assert function is not None
            function = function.next_functions[0][0]
        kept_tensors.append(len(function.saved_tensors) - 3)
        return [out, *torch.autograd.grad(out.pow(2).sum(), qkv)]

    saved = gradients()
    monkeypatch.setattr(tiled, "MAX_SAVED_BYTES", 0)
    again = gradients()
    assert kept_tensors == [len(tiles), 0]
    for one, other in zip(saved, again, strict=True):
        assert torch.equal(one, other)


def test_many_tiles_do_not_lose_a_key_in_bfloat16() -> None:
    """The first key's gradient sums over all tiles; each adds less than bf16 resolves of the sum."""
    length = 4096
    q, k, v = (torch.zeros(1, length, 1, 2, dtype=torch.bfloat16) for _ in range(3))
    q[:], k[:, 0] = 8.0, 64.0  # Everybody looks at the first key alone.
    v.requires_grad_()
    out = attend_tiled(q, k, v, tiles_of(Causal(), length, torch.bfloat16))
    cotangent = torch.full_like(out, 1 / 128)
    cotangent[:, 0] = 1024.0
    (gradient,) = torch.autograd.grad(out, v, cotangent)
    assert gradient[0, 0].tolist() == [[1056.0] * 2]
    assert gradient[0, 1:].abs().max() == 0


def test_queries_alone_want_a_gradient() -> None:
    q, k, v = inputs()
    out = attend_tiled(q, k.detach(), v.detach(), tiles_of(Causal(), 70))
    both = attend_tiled(q, k, v, tiles_of(Causal(), 70))
    assert torch.equal(torch.autograd.grad(out.sum(), q)[0], torch.autograd.grad(both.sum(), q)[0])


def test_autocast_changes_nothing() -> None:
    tiles = tiles_of(BlockDiffusion(3), 70)
    qkv = inputs(torch.float32)
    expected = attend_tiled(*qkv, tiles)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attend_tiled(*qkv, tiles), expected)
