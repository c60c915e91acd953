"""Every backend against softmax written out, and the selection of a backend."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from config.training.runtime import AttentionBackend
from diffusionlm.models import attention_backends
from diffusionlm.models.attention_backends import prepare_attention
from diffusionlm.models.dense_attention import AttentionScale
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
from diffusionlm.models.tiled import Tile, build_tiles
from tests.unit.models.attention_cases import (
    assert_equal_with_gradients,
    assert_near_with_gradients,
    attention_inputs,
    name_case,
    softmax_attention,
)

LENGTH = 150
"""More than two tiles, and no multiple of one."""
BLOCKS = (1, 2, 3, 4, 7, 50, 200)
WINDOW = 20
CAPPED = AttentionScale(scale=0.7, softcap=1.3)


DOCUMENTS = torch.tensor([[0] * 5 + [1] + [2] * 64 + [3] * 71 + [-1] * 9, [0] * 2 + [1] * 38 + [2] * 110])
"""Short and long ones, one of a single token, and padding."""


def patterns() -> list[AttentionPattern]:
    results: list[AttentionPattern] = []
    for packed in (None, DOCUMENTS):
        offsets = torch.arange(LENGTH)[None] if packed is None else document_offsets(packed)
        results += [Bidirectional(packed), Causal(packed)]
        results += [make(block, packed) for make in (BlockCausal, BlockDiffusion) for block in BLOCKS]
        results += [PromptAndOwnBlock(block, offsets < 30, packed) for block in (1, 4, 7, 200)]
    return results


def assert_equals_softmax(
    pattern: AttentionPattern,
    backend: AttentionBackend,
    window: int | None,
    *,
    queries: int | None = None,
    heads: tuple[int, int] = (4, 2),
) -> None:
    length = LENGTH * pattern.positions_per_token
    inputs = attention_inputs(length, queries, heads=heads)
    expected = softmax_attention(*inputs, pattern.dense_mask(length, window=window)[..., : inputs[0].shape[1], :])
    ours = prepare_attention(pattern, length, "cpu", backend, window)(*inputs)
    assert_equal_with_gradients(ours, expected, inputs)


@pytest.mark.parametrize("window", [None, WINDOW], ids=name_case)
@pytest.mark.parametrize("pattern", patterns(), ids=name_case)
def test_tiled_equals_softmax(pattern: AttentionPattern, window: int | None) -> None:
    assert_equals_softmax(pattern, "tiled", window)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "auto"])
@pytest.mark.parametrize("window", [None, WINDOW, 1000], ids=name_case)
@pytest.mark.parametrize(
    "pattern",
    [Bidirectional(), BlockCausal(7), BlockDiffusion(7), BlockDiffusion(4, DOCUMENTS), Bidirectional(DOCUMENTS)],
    ids=name_case,
)
def test_dense_and_auto_equal_softmax(pattern: AttentionPattern, window: int | None, backend: AttentionBackend) -> None:
    assert_equals_softmax(pattern, backend, window)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
def test_any_number_of_key_heads(heads: tuple[int, int], backend: AttentionBackend) -> None:
    for pattern in (Bidirectional(), BlockCausal(4, DOCUMENTS)):
        assert_equals_softmax(pattern, backend, None, heads=heads)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "tiled"])
@pytest.mark.parametrize("queries", [1, 64, 65, LENGTH])
@pytest.mark.parametrize("pattern", [Causal(), BlockDiffusion(7), BlockDiffusion(32, DOCUMENTS)], ids=name_case)
def test_fewer_queries_than_keys(pattern: AttentionPattern, queries: int, backend: AttentionBackend) -> None:
    assert_equals_softmax(pattern, backend, None, queries=queries)


@pytest.mark.parametrize(
    ("backend", "rule"),
    [*((backend, AttentionScale()) for backend in ("eager", "sdpa", "auto")), ("eager", CAPPED), ("auto", CAPPED)],
    ids=str,
)
@pytest.mark.parametrize("shape", [(9, 9), (2, 9, 9), (2, 1, 9, 9), (2, 4, 9, 9), (1, 4, 9, 9)])
def test_a_bias_of_the_user(shape: tuple[int, ...], backend: AttentionBackend, rule: AttentionScale) -> None:
    bias = torch.randn(shape, dtype=torch.float64)
    bias[..., 3:, 2] = -math.inf
    boolean = bias > -1
    boolean[..., 0] = True
    for pattern, window, queries in (
        (DenseBias(bias), None, 9),
        (DenseBias(bias), 3, 4),
        (DenseBias(boolean), None, 9),
    ):
        inputs = attention_inputs(9, queries)
        expected = softmax_attention(*inputs, pattern.dense_mask(9, window=window)[..., :queries, :], rule)
        ours = prepare_attention(pattern, 9, "cpu", backend, window, rule)(*inputs)
        assert_equal_with_gradients(ours, expected, inputs)
    half = [tensor.detach().bfloat16() for tensor in attention_inputs(9)]
    assert prepare_attention(DenseBias(bias), 9, "cpu", backend, None, rule)(*half).dtype == torch.bfloat16


@pytest.mark.parametrize("backend", ["tiled", "flex"])
def test_a_bias_has_no_closed_form(backend: AttentionBackend) -> None:
    with pytest.raises(ValueError, match=rf'"{backend}" cannot compute DenseBias.*"eager"'):
        prepare_attention(DenseBias(torch.zeros(9, 9)), 9, "cpu", backend)


@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa", "tiled", "flex"])
def test_a_length_that_does_not_fit_is_an_error_before_the_first_layer(backend: AttentionBackend) -> None:
    with pytest.raises(ValueError, match="two halves"):
        prepare_attention(BlockDiffusion(2), 7, "cpu", backend)
    with pytest.raises(ValueError, match="documents_BL is for 150 tokens"):
        prepare_attention(Causal(DOCUMENTS), 9, "cpu", backend)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("tiled", torch.float32),
        ("tiled", torch.bfloat16),
        ("eager", torch.bfloat16),
        ("sdpa", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("pattern", [Bidirectional(DOCUMENTS), Causal(), BlockDiffusion(7)], ids=name_case)
def test_within_each_precision(pattern: AttentionPattern, backend: AttentionBackend, dtype: torch.dtype) -> None:
    length = LENGTH * pattern.positions_per_token
    q, k, v = attention_inputs(length, dtype=dtype, width=16)
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    expected = softmax_attention(wide[0], wide[1], wide[2], pattern.dense_mask(length))
    ours = prepare_attention(pattern, length, "cpu", backend)(q, k, v)
    assert ours.dtype == dtype
    assert_near_with_gradients(ours, (q, k, v), expected, wide, 2e-2 if dtype == torch.bfloat16 else 1e-5)


def test_auto_selects_tiles_if_they_skip_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def choice(pattern: AttentionPattern, length: int, dtype: torch.dtype = torch.float32, **options: Any) -> str:
        return prepare_attention(pattern, length, "cpu", "auto", **options).backend_for(
            torch.zeros(1, length, 1, 8, dtype=dtype)
        )

    assert choice(Bidirectional(), 1024) == "sdpa"
    assert choice(Bidirectional(), 512, torch.bfloat16) == "eager"
    for pattern in (Causal(), BlockCausal(32), BlockDiffusion(32), BlockDiffusion(512)):
        assert choice(pattern, 1024) == "tiled"
        assert choice(pattern, 1024, torch.bfloat16) == "tiled"
        assert choice(pattern, 64) == "sdpa"
        assert choice(pattern, 64, torch.bfloat16) == "eager"
    assert choice(BlockDiffusion(16), 256) == "tiled"
    assert choice(BlockDiffusion(16), 256, torch.bfloat16) == "eager"
    assert choice(Bidirectional(torch.arange(1024)[None] // 128), 1024) == "tiled"
    assert choice(Bidirectional(torch.arange(1024)[None] // 1000), 1024) == "sdpa", "nearly everything is seen"
    assert choice(BlockCausal(2000), 1024) == "sdpa", "everything is seen"
    assert choice(Bidirectional(), 1024, window=100) == "tiled"
    assert choice(Bidirectional(), 1024, window=1024) == "sdpa"
    assert choice(DenseBias(torch.zeros(1024, 1024)), 1024) == "sdpa"
    monkeypatch.setattr(attention_backends, "build_tiles", None)
    assert choice(Bidirectional(), 1024) == "sdpa", "tiles were made for nothing"
    assert choice(Causal(), 64) == "sdpa", "tiles were made for nothing"


def test_layers_share_their_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[tuple[Any, ...]] = []

    def spy(*arguments: Any) -> tuple[Tile, ...]:
        results.append(arguments)
        return build_tiles(*arguments)

    monkeypatch.setattr(attention_backends, "build_tiles", spy)
    attention = prepare_attention(BlockDiffusion(4), 512, "cpu")
    for _ in range(3):
        attention(*attention_inputs(512))
    assert len(results) == 1
    attention(*attention_inputs(512, dtype=torch.float32))
    assert len(results) == 2
