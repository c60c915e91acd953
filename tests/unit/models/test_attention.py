"""Dense attention: query heads that a GPU stacks, decoding, and the selection of a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F

from config.generation import GenerationConfig
from diffusionlm.inference.generate import generate
from diffusionlm.models import dense_attention
from diffusionlm.models.attention_backends import prepare_attention, select_backend, select_cached_backend
from diffusionlm.models.dense_attention import attend
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, BlockCausal, Causal
from diffusionlm.models.transformer import Transformer
from tests.fake_cuda import FUSED_ATTENTION, fake_cuda
from tests.unit.models.attention_cases import (
    assert_equal_with_gradients,
    attention_inputs,
    name_case,
    softmax_attention,
)

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 0, -1, -1]])
PATTERNS: list[AttentionPattern] = [Bidirectional(), Causal(), BlockCausal(4)]
PATTERNS += [pattern.with_documents(DOCUMENTS) for pattern in PATTERNS]


@pytest.mark.parametrize("pattern", PATTERNS, ids=name_case)
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
