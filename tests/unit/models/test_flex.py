"""FlexAttention's block mask in closed form against torch's own from every pair, and what it computes."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from config.training.runtime import AttentionBackend
from diffusionlm.models.attention_backends import prepare_attention
from diffusionlm.models.flex import (
    BLOCK_SIZE,
    _choose_kernel_options,
    _compiled_flex_attention,
    build_block_mask,
    count_visible_by_tile,
    is_hopper,
)
from diffusionlm.models.patterns import (
    AttentionPattern,
    Bidirectional,
    BlockCausal,
    BlockDiffusion,
    Causal,
    PromptAndOwnBlock,
)
from tests.unit.models.attention_cases import assert_near_with_gradients, name_case

LENGTH = 330
DOCUMENTS = torch.tensor([[0] * 140 + [1] * 3 + [2] * 150 + [-1] * 37, [0] * 330])


def patterns() -> list[AttentionPattern]:
    results: list[AttentionPattern] = [PromptAndOwnBlock(16, torch.arange(LENGTH)[None] < 200)]
    for packed in (None, DOCUMENTS):
        results += [Bidirectional(packed), Causal(packed)]
        results += [make(block, packed) for make in (BlockCausal, BlockDiffusion) for block in (1, 4, 7, 128, 500)]
        results += [BlockDiffusion(7, packed, clean="token"), BlockDiffusion(128, packed, clean="token", noisy="token")]
    return results


def listed(numbers: torch.Tensor, indices: torch.Tensor) -> list[list[list[int]]]:
    return [
        [sorted(tiles[:number].tolist()) for number, tiles in zip(row[0], table[0], strict=True)]
        for row, table in zip(numbers, indices, strict=True)
    ]


def assert_same(ours: BlockMask, theirs: BlockMask) -> None:
    assert ours.shape == theirs.shape
    for kind in ("kv", "full_kv", "q", "full_q"):
        numbers, indices = getattr(ours, f"{kind}_num_blocks"), getattr(ours, f"{kind}_indices")
        their_numbers, their_indices = getattr(theirs, f"{kind}_num_blocks"), getattr(theirs, f"{kind}_indices")
        assert numbers.dtype == indices.dtype == torch.int32
        assert listed(numbers, indices) == listed(their_numbers, their_indices), kind


@pytest.mark.parametrize("window", [None, 9, 255], ids=name_case)  # 255: one pair of a tile is hidden
@pytest.mark.parametrize("pattern", patterns(), ids=name_case)
def test_tiles_are_those_of_create_block_mask(pattern: AttentionPattern, window: int | None) -> None:
    length = LENGTH * pattern.positions_per_token
    dense_mask = pattern.dense_mask(length, window=window)
    intervals = pattern.intervals(length, window=window)
    assert intervals is not None
    for queries in (length, 200):
        expected = create_block_mask(
            lambda b, h, q, k: dense_mask[b, q, k], len(dense_mask), 1, queries, length, device=torch.device("cpu")
        )
        assert_same(build_block_mask(intervals, queries, length), expected)


def test_tables_are_small() -> None:
    """Nothing of the size of all pairs is made: 2^20 positions would be a terabyte."""
    intervals = BlockDiffusion(32).intervals(1 << 16)
    visible = count_visible_by_tile(*intervals, 1 << 16)
    assert visible.shape == (1, 512, 512)
    assert visible.sum() == (1 << 15) ** 2 + (1 << 15) * 32
    full = build_block_mask(intervals, 1 << 16, 1 << 16)
    assert full.full_kv_num_blocks is not None
    assert int(full.kv_num_blocks.sum()) == 3 * 256 and int(full.full_kv_num_blocks.sum()) == 256 * 255


def tensors(length: int, queries: int) -> list[torch.Tensor]:
    return [torch.randn(2, positions, heads, 16) for positions, heads in ((queries, 4), (length, 2), (length, 2))]


@pytest.mark.parametrize("window", [None, pytest.param(9, marks=pytest.mark.slow)], ids=name_case)
@pytest.mark.parametrize("pattern", patterns()[::3], ids=name_case)
def test_flex_equals_sdpa_on_the_cpu(pattern: AttentionPattern, window: int | None) -> None:
    length = LENGTH * pattern.positions_per_token
    flex, sdpa = (prepare_attention(pattern, length, "cpu", backend, window) for backend in ("flex", "sdpa"))
    for queries in (length, 200):
        q, k, v = tensors(length, queries)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # That it is slow without the compiler.
            ours = flex(q, k, v)
        torch.testing.assert_close(ours, sdpa(q, k, v), rtol=1e-5, atol=1e-5)


def test_no_gradients_on_the_cpu() -> None:
    attention = prepare_attention(Causal(), LENGTH, "cpu", "flex")
    q, k, v = tensors(LENGTH, LENGTH)
    k.requires_grad_()
    with pytest.raises(ValueError, match=r'"flex".*CPU.*"tiled"'):
        attention(q, k, v)
    with torch.no_grad():
        assert attention(q, k, v).shape == q.shape


@pytest.mark.slow
def test_all_versions_of_a_process_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the ninth would hold all scores. Here with a compiler that counts, and what flex may get on a GPU."""
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: original(function, backend=backend))
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=8), warnings.catch_warnings():
        warnings.simplefilter("error")
        attend = _compiled_flex_attention.__wrapped__()
        kinds = itertools.product((torch.float32, torch.bfloat16, torch.float16), (1, 2), (False, True))
        for dtype, batch, returns_sums in kinds:
            q = torch.ones(batch, 2, 16, 16, dtype=dtype)
            attend(q, q, q, return_lse=returns_sums)
    assert len(compiled) == 12


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("backend", ["flex", "auto", "tiled"])
@pytest.mark.parametrize("window", [None, 100], ids=name_case)
@pytest.mark.parametrize("pattern", patterns(), ids=name_case)
def test_cuda_forward_and_backward(pattern: AttentionPattern, window: int | None, backend: AttentionBackend) -> None:
    length = LENGTH * pattern.positions_per_token
    wide: list[Any] = [tensor.double().requires_grad_() for tensor in tensors(length, length)]
    ours: list[Any] = [tensor.detach().to("cuda", torch.float32).requires_grad_() for tensor in wide]
    expected = prepare_attention(pattern, length, "cpu", "eager", window)(*wide)
    out = prepare_attention(pattern.to("cuda"), length, "cuda", backend, window)(*ours)
    assert_near_with_gradients(out, ours, expected, wide, 5e-3)


def test_kernel_options_divide_the_tiles_of_a_mask() -> None:
    """The backward's tiles must also divide each other. Options that need the shared memory of an H100 are for it."""
    found = set()
    for width, dtype, on_hopper in itertools.product(
        (32, 64, 128, 256), (torch.bfloat16, torch.float32), (False, True)
    ):
        options = _choose_kernel_options(torch.zeros(1, 4, 2, width, dtype=dtype), on_hopper)
        if options is None:
            continue
        found.add((width, dtype, on_hopper))
        assert all(BLOCK_SIZE % tile == 0 for name, tile in options.items() if "BLOCK" in name)
        if "bwd_BLOCK_M1" in options:
            assert options["bwd_BLOCK_N1"] % options["bwd_BLOCK_M1"] == 0
            assert options["bwd_BLOCK_M2"] % options["bwd_BLOCK_N2"] == 0
    assert (128, torch.bfloat16, True) in found and (128, torch.bfloat16, False) not in found
    assert not is_hopper(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(
    ("width", "dtype", "limit"), [(64, torch.bfloat16, 2e-2), (128, torch.bfloat16, 2e-2), (128, torch.float32, 5e-3)]
)
def test_cuda_at_widths_with_kernel_options(width: int, dtype: torch.dtype, limit: float) -> None:
    """Those of models, which have options for a GPU that the small heads of the other tests have not."""
    pattern = BlockDiffusion(16, DOCUMENTS)
    length = LENGTH * pattern.positions_per_token
    ours: list[Any] = [
        torch.randn(2, length, heads, width, device="cuda", dtype=dtype).requires_grad_() for heads in (4, 2, 2)
    ]
    wide: list[Any] = [tensor.detach().cpu().double().requires_grad_() for tensor in ours]
    out = prepare_attention(pattern.to("cuda"), length, "cuda", "flex")(*ours)
    expected = prepare_attention(pattern, length, "cpu", "eager")(*wide)
    assert out.dtype == dtype
    assert_near_with_gradients(out, ours, expected, wide, limit)
