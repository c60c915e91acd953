"""Every backend against softmax written out, the selection of a backend, and what a GPU computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F

from config.generation import GenerationConfig
from config.training.runtime import AttentionBackend
from diffusionlm.inference.generate import generate
from diffusionlm.models import attention_backends, dense_attention
from diffusionlm.models.attention_backends import prepare_attention, select_backend, select_cached_backend
from diffusionlm.models.dense_attention import AttentionScale, attend
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
from diffusionlm.models.transformer import Transformer
from tests.fake_cuda import FUSED_ATTENTION, fake_cuda
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


FEW_DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 0, -1, -1]])
FEW_PATTERNS: list[AttentionPattern] = [Bidirectional(), Causal(), BlockCausal(4)]
FEW_PATTERNS += [pattern.with_documents(FEW_DOCUMENTS) for pattern in FEW_PATTERNS]


@pytest.mark.parametrize("pattern", FEW_PATTERNS, ids=name_case)
def test_stacked_query_heads_equal_softmax(pattern: AttentionPattern, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU computes for a mask if query heads share keys."""
    monkeypatch.setattr(dense_attention, "_stacks_groups", lambda q, k, mask: True)
    q, k, v = inputs = attention_inputs(9)
    for mask in (pattern.dense_mask(9), torch.randn(2, 4, 9, 9, dtype=torch.float64)):
        assert_equal_with_gradients(attend(q, k, v, mask, "sdpa"), softmax_attention(q, k, v, mask), inputs)


@pytest.mark.parametrize(
    ("dtype", "is_masked", "is_stacked"),
    [
        (torch.bfloat16, False, False),
        (torch.bfloat16, True, True),
        (torch.float32, False, True),
        (torch.float32, True, True),
    ],
)
def test_which_attention_of_a_gpu_stacks_query_heads(dtype: torch.dtype, is_masked: bool, is_stacked: bool) -> None:
    """The memory-efficient kernel takes equally many heads only; flash takes no mask and no fp32."""
    with fake_cuda() as record:
        q, k = (torch.ones(2, 9, heads, 16, dtype=dtype, device="cuda") for heads in (4, 2))
        mask = torch.ones(1, 9, 9, dtype=torch.bool, device="cuda") if is_masked else None
        out = attend(q, k, k, mask, "sdpa")
    [launch] = [launch for launch in record.launches if launch.name == FUSED_ATTENTION]
    assert out.shape == (2, 9, 4, 16)
    assert launch.inputs[0].shape == ((2, 2, 18, 16) if is_stacked else (2, 4, 9, 16))
    assert [mask.shape for mask in launch.inputs[3:]] == [(1, 1, 18, 9)] * is_masked


def test_queries_of_outputs_are_copied_once_on_a_gpu() -> None:
    with fake_cuda() as record, torch.device("cuda"):
        q, k, positions = torch.ones(3, 4, 16), torch.ones(2, 9, 2, 16), torch.tensor([0, 4, 11])
        attention = prepare_attention(Bidirectional(), 9, "cuda")
        record.launches.clear()
        assert attention.at_positions(q, k, k, positions).shape == (3, 4, 16)
    assert record.count()["index_copy_"] == 1 and "index_copy" not in record.count()
    assert not record.waits


@pytest.mark.parametrize("cache", [None, "none"])
def test_decoding_does_not_plan_for_each_shape(
    cache: Literal["none"] | None, tiny_model: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN does. Training and validation have constant shapes, and keep it."""
    uses, shapes = [], set()
    original = F.scaled_dot_product_attention

    def attend_recorded(q: torch.Tensor, k: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        uses.append(torch.backends.cuda.cudnn_sdp_enabled())
        shapes.add((q.shape, k.shape))
        return original(q, k, *args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend_recorded)
    model = tiny_model()
    config = GenerationConfig(max_new_tokens=8, block_length=4, steps=8, attention="block_causal", cache=cache)
    generate(model, [[1, 2, 3], [1, 2, 3, 4, 5]], config)
    assert set(uses) == {False} and len(shapes) > 4
    uses.clear()
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), pattern=Bidirectional())
    assert set(uses) == {True}


def test_auto_is_eager_for_short_bfloat16_on_the_cpu() -> None:
    q = torch.zeros(1, 8, 2, 4)
    assert select_backend("auto", q, 8, None, None) == "sdpa"
    assert select_backend("auto", q.bfloat16(), 8, None, None) == "eager"
    assert select_backend("auto", q.bfloat16(), 4096, None, None) == "eager", "few queries of a long sequence"
    assert select_backend("auto", torch.zeros(1, 513, 1, 2, dtype=torch.bfloat16), 513, None, None) == "sdpa"
    assert select_backend("sdpa", q.bfloat16(), 8, None, None) == "sdpa"
    assert select_backend("eager", q, 8, None, None) == "eager"


@pytest.mark.parametrize(
    ("num_queries", "device", "dtype", "softcap", "expected"),
    [
        (1, "cpu", torch.bfloat16, None, "eager"),
        (2, "cpu", torch.bfloat16, None, "sdpa"),
        (32, "cpu", torch.bfloat16, None, "eager"),
        (513, "cpu", torch.bfloat16, None, "sdpa"),
        (1, "cpu", torch.float32, None, "sdpa"),
        (1, "cuda", torch.bfloat16, None, "sdpa"),
        (2, "cpu", torch.float32, 3.0, "eager"),
    ],
)
def test_auto_with_a_cache(
    num_queries: int, device: str, dtype: torch.dtype, softcap: float | None, expected: str
) -> None:
    assert select_cached_backend("auto", num_queries, device, dtype, softcap) == expected
    assert select_cached_backend("sdpa", num_queries, device, dtype, None) == "sdpa"
