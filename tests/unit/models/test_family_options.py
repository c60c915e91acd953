"""The options by which families differ, each against its formula; whole families: tests/reference."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from config.training.runtime import AttentionBackend
from diffusionlm.models.attention_backends import prepare_attention, select_backend
from diffusionlm.models.dense_attention import AttentionScale, attend
from diffusionlm.models.init import init_weights
from diffusionlm.models.layers import RMSNorm, soft_cap
from diffusionlm.models.patterns import (
    AttentionPattern,
    Bidirectional,
    BlockDiffusion,
    Causal,
)
from diffusionlm.models.transformer import Block, Transformer
from profiling import triton_setup
from tests.conftest import MakeConfig, MakeModel
from tests.unit.models.attention_cases import (
    assert_equal_with_gradients,
    assert_near_with_gradients,
    attention_inputs,
    softmax_attention,
)

TOKENS = torch.randint(0, 18, (3, 12), generator=torch.Generator().manual_seed(0))
GEMMA2: dict[str, Any] = {
    "qk_norm": False,
    "hidden_act": "gelu_pytorch_tanh",
    "sandwich_norms": True,
    "norm_offset": True,
    "scale_embeddings": True,
    "query_pre_attn_scalar": 11.0,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 4.0,
    "layer_types": ("sliding_attention", "full_attention"),
    "sliding_window": 4,
}
CAPPED = AttentionScale(scale=0.7, softcap=1.3)


# Small modules


def test_soft_cap() -> None:
    x = torch.tensor([0.0, 1e-3, 2.0, -2.0, 1e4, -torch.inf], dtype=torch.float64)
    expected = [3.0 * math.tanh(logit / 3.0) for logit in x.tolist()]
    inputs = x.clone()
    torch.testing.assert_close(soft_cap(x, 3.0).tolist(), expected)
    assert torch.equal(x, inputs)
    assert torch.autograd.gradcheck(lambda y: soft_cap(y, 3.0), (x[:4].requires_grad_(),))
    assert soft_cap(torch.ones(2, dtype=torch.bfloat16), 3.0).dtype == torch.bfloat16


def test_the_offset_is_added_in_float32() -> None:
    """1 + 2^-9 is 1 in bf16."""
    norm = RMSNorm(4, 0.0, offset=True).bfloat16()
    with torch.no_grad():
        norm.weight.fill_(2.0**-9)
    x = torch.full((1, 4), 3.0, dtype=torch.float32)
    assert norm(x).tolist() == [[1.0 + 2.0**-9] * 4]


# Scores of attention


@pytest.mark.parametrize("queries", [None, 30])
@pytest.mark.parametrize("pattern", [Bidirectional(), Causal(), BlockDiffusion(7)], ids=str)
@pytest.mark.parametrize(
    ("backend", "rule"),
    [
        *((backend, AttentionScale(scale=0.7)) for backend in ("eager", "sdpa", "tiled", "auto")),
        *((backend, rule) for backend in ("eager", "auto") for rule in (CAPPED, AttentionScale(softcap=0.5))),
    ],
    ids=str,
)
def test_scale_and_cap_equal_softmax(
    backend: AttentionBackend, rule: AttentionScale, pattern: AttentionPattern, queries: int | None
) -> None:
    length = 280
    inputs = attention_inputs(length, queries)
    for window in (None, 20):
        mask = pattern.dense_mask(length, window=window)[:, : inputs[0].shape[1]]
        ours = prepare_attention(pattern, length, "cpu", backend, window, rule)(*inputs)
        assert_equal_with_gradients(ours, softmax_attention(*inputs, mask, rule), inputs, tolerance=1e-11)


@pytest.mark.parametrize("rule", [CAPPED, AttentionScale(scale=0.7)], ids=str)
@pytest.mark.parametrize("pattern", [Bidirectional(), BlockDiffusion(7)], ids=str)
def test_flex_scales_and_caps(pattern: AttentionPattern, rule: AttentionScale) -> None:
    q, k, v = (tensor.detach().float() for tensor in attention_inputs(280, width=16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That it is slow without the compiler.
        ours = prepare_attention(pattern, 280, "cpu", "flex", 20, rule)(q, k, v)
    torch.testing.assert_close(
        ours, softmax_attention(q, k, v, pattern.dense_mask(280, window=20), rule), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("backend", ["sdpa", "tiled"])
def test_a_backend_without_soft_cap_is_an_error(backend: Any, tiny_model: MakeModel) -> None:
    message = rf'"{backend}" cannot cap scores.*attn_logit_softcapping = 1\.3.*"eager"'
    for pattern in (Bidirectional(), Causal()):
        with pytest.raises(ValueError, match=message):
            prepare_attention(pattern, 600, "cpu", backend, None, CAPPED)
    with pytest.raises(ValueError, match=message):
        tiny_model(backend=backend, attn_logit_softcapping=1.3)
    if backend == "sdpa":
        q, k, v = attention_inputs(9)
        with pytest.raises(ValueError, match=message):
            attend(q, k, v, None, "sdpa", CAPPED)


@pytest.mark.parametrize(("softcap", "dense_backend"), [(1.3, "eager"), (None, "sdpa")])
def test_auto_on_a_gpu(softcap: float | None, dense_backend: str) -> None:
    """FlexAttention where its kernels fit, else a dense backend that can cap. Needs no GPU."""

    def select(length: int, width: int, dtype: torch.dtype, *, has_intervals: bool = True) -> str:
        query: Any = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, length, 1, width))
        return select_backend("auto", query, length, softcap, (lambda: 0.5) if has_intervals else None)

    assert select(512, 16, torch.bfloat16) == "flex"
    assert select(511, 16, torch.bfloat16) == dense_backend
    assert select(512, 8, torch.bfloat16) == dense_backend
    assert select(512, 16, torch.float64) == dense_backend
    assert select(512, 16, torch.bfloat16, has_intervals=False) == dense_backend


@pytest.mark.parametrize("problem", [None, "needs a C compiler"])
def test_auto_on_a_gpu_without_a_compiler(problem: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_setup, "find_triton_problem", lambda: problem)
    with FakeTensorMode():
        query = torch.zeros(1, 512, 1, 16, dtype=torch.bfloat16, device="cuda")
        attention = prepare_attention(Causal(), 512, "cuda")
        assert attention.backend_for(query) == ("flex" if problem is None else "sdpa")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("rule", [CAPPED, AttentionScale(softcap=0.5)], ids=str)
@pytest.mark.parametrize("pattern", [Bidirectional(), Causal(), BlockDiffusion(7)], ids=str)
def test_cuda_caps_forward_and_backward(pattern: AttentionPattern, rule: AttentionScale) -> None:
    for length, window, choice in ((600, None, "flex"), (600, 100, "flex"), (280, None, "eager")):
        q, k, v = wide = attention_inputs(length, width=16)
        ours = [tensor.detach().to("cuda", torch.float32).requires_grad_() for tensor in wide]
        expected = softmax_attention(q, k, v, pattern.dense_mask(length, window=window), rule)
        attention = prepare_attention(pattern.to("cuda"), length, "cuda", "auto", window, rule)
        assert attention.backend_for(ours[0]) == choice
        assert_near_with_gradients(attention(*ours), ours, expected, wide, 5e-3)


# The model


def test_the_factor_of_embeddings_is_rounded_like_them(tiny_model: MakeModel) -> None:
    """sqrt(24) = 4.898979...: 4.90625 in bf16, and a float32 in double, as in transformers. Given ones stay."""
    for dtype, factor in ((torch.bfloat16, 4.90625), (torch.float64, float(torch.tensor(24**0.5)))):
        model = tiny_model(dtype=dtype, scale_embeddings=True)
        embedded = model.model.embed_tokens(TOKENS)
        inputs = model(TOKENS, pattern=Causal(), inputs_embeds_BLD=embedded * factor)
        assert torch.equal(model(TOKENS, pattern=Causal()), inputs)
        assert not torch.equal(model(TOKENS, pattern=Causal(), inputs_embeds_BLD=embedded), inputs)


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("sandwich", [False, True])
def test_blocks_start_as_the_identity(make_config: MakeConfig, sandwich: bool, offset: bool) -> None:
    model = Transformer(make_config(sandwich_norms=sandwich, norm_offset=offset, attention_output_bias=True))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    init_weights(model, 0)
    x = torch.randn(2, 5, 24)
    block = model.model.layers[0]
    assert isinstance(block, Block) and isinstance(block.self_attn.q_norm, RMSNorm)
    assert torch.equal(block(x, model.rope(torch.arange(5)[None]), prepare_attention(Bidirectional(), 5, "cpu")), x)
    gain = block.input_layernorm.weight + offset
    assert gain.eq(1.0).all() and (block.self_attn.q_norm.weight + offset).eq(1.0).all()
    assert (model.model.norm.weight + offset).eq(1.0).all()


def test_with_sandwich_norms_the_first_gradient_reaches_the_gains_alone(make_config: MakeConfig) -> None:
    """Zeros in o_proj would have a gradient of 1 / sqrt(eps) behind their norm, and a first step of full size."""
    model = Transformer(make_config(sandwich_norms=True, rms_norm_eps=1e-12))
    init_weights(model, 0)
    model(TOKENS, pattern=Bidirectional()).square().sum().backward()
    block: Any = model.model.layers[0]
    assert block.post_attention_layernorm.weight.grad.abs().max() > 0
    assert block.post_feedforward_layernorm.weight.grad.abs().max() > 0
    for projection in (block.self_attn.o_proj, block.mlp.down_proj):
        assert projection.weight.std().item() == pytest.approx(projection.weight.shape[1] ** -0.5, rel=0.1)
        assert projection.weight.grad.eq(0.0).all()


def test_autocast_stays_in_its_precision(tiny_model: MakeModel) -> None:
    model = tiny_model(scale=0.05, **GEMMA2)
    expected = model(TOKENS, pattern=Causal())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = model(TOKENS, pattern=Causal())
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - expected).norm() < 0.03 * expected.norm()
