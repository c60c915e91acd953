"""The options by which families differ, each against its formula; whole families: tests/reference."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from config.model import LinearRope, Llama3Rope, ModelConfig
from config.training.runtime import AttentionBackend
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.models.attention_backends import prepare_attention, select_backend
from diffusionlm.models.dense_attention import AttentionScale, attend
from diffusionlm.models.init import init_weights
from diffusionlm.models.layers import RMSNorm, RotaryEmbedding, SwiGLU, rotate, soft_cap
from diffusionlm.models.patterns import (
    AttentionPattern,
    Bidirectional,
    BlockCausal,
    BlockDiffusion,
    Causal,
    DenseBias,
)
from diffusionlm.models.transformer import Block, Transformer
from profiling import triton_setup

MakeConfig = Callable[..., ModelConfig]
MakeModel = Callable[..., Transformer]

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
LLAMA3 = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128)
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


def test_a_norm_with_an_offset_has_the_gain_one_more_than_its_weight() -> None:
    plain, offset = RMSNorm(6, 1e-3).double(), RMSNorm(6, 1e-3, offset=True).double()
    assert offset.weight.eq(0.0).all() and plain.weight.eq(1.0).all(), "both begin with a gain of one"
    with torch.no_grad():
        offset.weight.copy_(torch.randn(6))
        plain.weight.copy_(1.0 + offset.weight)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(offset(x), plain(x), rtol=1e-14, atol=1e-14)
    cotangent = torch.randn(4, 6, dtype=torch.float64)
    ours = torch.autograd.grad(offset(x), (x, offset.weight), cotangent)
    theirs = torch.autograd.grad(plain(x), (x, plain.weight), cotangent)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_offset_is_added_in_float32() -> None:
    """1 + 2^-9 is 1 in bf16."""
    norm = RMSNorm(4, 0.0, offset=True).bfloat16()
    with torch.no_grad():
        norm.weight.fill_(2.0**-9)
    x = torch.full((1, 4), 3.0, dtype=torch.float32)
    assert norm(x).tolist() == [[1.0 + 2.0**-9] * 4]


def test_linear_scaling_turns_a_position_like_one_so_many_times_nearer() -> None:
    plain, scaled = RotaryEmbedding(8, 50.0), RotaryEmbedding(8, 50.0, LinearRope(factor=4.0))
    positions = torch.arange(10)[None]
    torch.testing.assert_close(scaled(positions * 4), plain(positions))


def test_llama3_scaling_frequency_by_frequency() -> None:
    """transformers' rule in plain floats: by wavelength, in three cases."""
    head_dim, theta = 32, 1000.0
    cos, sin = RotaryEmbedding(head_dim, theta, LLAMA3)(torch.tensor([[1]]))
    angles = torch.atan2(sin, cos).flatten()[head_dim // 2 :].tolist()
    kinds = []
    for pair, angle in enumerate(angles):
        frequency = theta ** (-2 * pair / head_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength < 128 / 4.0:
            expected, kind = frequency, "fast"
        elif wavelength > 128 / 1.0:
            expected, kind = frequency / 8.0, "slow"
        else:
            smooth = (128 / wavelength - 1.0) / (4.0 - 1.0)
            expected, kind = (1 - smooth) * frequency / 8.0 + smooth * frequency, "between"
        assert angle == pytest.approx(expected, rel=1e-5), pair
        kinds.append(kind)
    assert set(kinds) == {"fast", "between", "slow"}


def test_scaled_rotations_know_only_distances() -> None:
    rope = RotaryEmbedding(16, 100.0, LLAMA3)
    q, k = torch.randn(2, 1, 1, 1, 16).unbind(0)
    products = [
        (rotate(q, rope(torch.tensor([[first]]))) * rotate(k, rope(torch.tensor([[first + 5]])))).sum()
        for first in (0, 3, 40)
    ]
    torch.testing.assert_close(products[1:], [products[0]] * 2)


def test_gelu_is_the_tanh_form() -> None:
    layer = SwiGLU(6, 10, "gelu_pytorch_tanh").double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 6, dtype=torch.float64)
    gate = x @ layer.gate_proj.weight.T
    gelu = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    torch.testing.assert_close(layer(x), (gelu * (x @ layer.up_proj.weight.T)) @ layer.down_proj.weight.T)
    assert not torch.allclose(gelu, F.gelu(gate), rtol=1e-6), "the exact form must be another one"


# Scores of attention


def written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, rule: AttentionScale
) -> torch.Tensor:
    G = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(G, dim=2), v.repeat_interleave(G, dim=2)
    scores = torch.einsum("bqnh,bknh->bnqk", q, k) * (q.shape[-1] ** -0.5 if rule.scale is None else rule.scale)
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(~mask[:, None], -math.inf) if mask.dtype == torch.bool else scores + mask
    return torch.einsum("bnqk,bknh->bqnh", torch.softmax(scores, dim=-1), v)


def tensors(length: int, width: int = 4, queries: int | None = None) -> list[torch.Tensor]:
    shapes = [(2, queries or length, 4, width), (2, length, 2, width), (2, length, 2, width)]
    return [(2.0 * torch.randn(shape, dtype=torch.float64)).requires_grad_() for shape in shapes]


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
def test_scale_and_cap_written_out(
    backend: AttentionBackend, rule: AttentionScale, pattern: AttentionPattern, queries: int | None
) -> None:
    length = 280
    q, k, v = tensors(length, queries=queries)
    for window in (None, 20):
        expected = written_out(q, k, v, pattern.dense_mask(length, window=window)[:, : q.shape[1]], rule)
        ours = prepare_attention(pattern, length, "cpu", backend, window, rule)(q, k, v)
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-11)
        cotangent = torch.randn_like(expected)
        gradients = [torch.autograd.grad(output, (q, k, v), cotangent) for output in (ours, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rule", [CAPPED, AttentionScale(scale=0.7)], ids=str)
@pytest.mark.parametrize("pattern", [Bidirectional(), BlockDiffusion(7)], ids=str)
def test_flex_scales_and_caps(pattern: AttentionPattern, rule: AttentionScale) -> None:
    q, k, v = (tensor.detach().float() for tensor in tensors(280, width=16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That it is slow without the compiler.
        ours = prepare_attention(pattern, 280, "cpu", "flex", 20, rule)(q, k, v)
    torch.testing.assert_close(
        ours, written_out(q, k, v, pattern.dense_mask(280, window=20), rule), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_a_bias_of_the_user_is_added_to_capped_scores(backend: AttentionBackend) -> None:
    q, k, v = tensors(9)
    bias = 3.0 * torch.randn(2, 1, 9, 9, dtype=torch.float64)
    ours = prepare_attention(DenseBias(bias), 9, "cpu", backend, None, CAPPED)(q, k, v)
    torch.testing.assert_close(ours, written_out(q, k, v, bias, CAPPED))


@pytest.mark.parametrize("backend", ["sdpa", "tiled"])
def test_a_backend_without_soft_cap_is_an_error(backend: Any, tiny_model: MakeModel) -> None:
    message = rf'"{backend}" cannot cap scores.*attn_logit_softcapping = 1\.3.*"eager"'
    for pattern in (Bidirectional(), Causal()):
        with pytest.raises(ValueError, match=message):
            prepare_attention(pattern, 600, "cpu", backend, None, CAPPED)
    with pytest.raises(ValueError, match=message):
        tiny_model(backend=backend, attn_logit_softcapping=1.3)
    if backend == "sdpa":
        q, k, v = tensors(9)
        with pytest.raises(ValueError, match=message):
            attend(q, k, v, None, "sdpa", CAPPED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern", [Bidirectional(), Causal(), BlockCausal(32)], ids=str)
def test_auto_selects_a_backend_with_soft_cap(pattern: AttentionPattern, dtype: torch.dtype) -> None:
    for length in (64, 2048):
        for window in (None, 100):
            q = torch.zeros(1, length, 1, 16, dtype=dtype)
            assert prepare_attention(pattern, length, "cpu", "auto", window, CAPPED).backend_for(q) == "eager"


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
        q, k, v = wide = tensors(length, width=16)
        ours = [tensor.detach().to("cuda", torch.float32).requires_grad_() for tensor in wide]
        expected = written_out(q, k, v, pattern.dense_mask(length, window=window), rule)
        attention = prepare_attention(pattern.to("cuda"), length, "cuda", "auto", window, rule)
        assert attention.backend_for(ours[0]) == choice
        out = attention(*ours)
        cotangent = torch.randn_like(expected)
        theirs = (expected, *torch.autograd.grad(expected, wide, cotangent))
        for our, their in zip((out, *torch.autograd.grad(out, ours, cotangent.to(out))), theirs, strict=True):
            assert (our.cpu().double() - their).norm() < 5e-3 * their.norm()


# The model


def test_names_of_the_parameters(make_config: MakeConfig) -> None:
    plain = {name for name, _ in Transformer(make_config()).named_parameters()}
    options = Transformer(make_config(sandwich_norms=True, attention_output_bias=True))
    extra = {name for name, _ in options.named_parameters()} - plain
    kinds = ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight", "self_attn.o_proj.bias")
    assert extra == {f"model.layers.{layer}.{kind}" for layer in range(2) for kind in kinds}


def test_the_factor_of_embeddings_is_rounded_like_them(tiny_model: MakeModel) -> None:
    """sqrt(24) = 4.898979...: 4.90625 in bf16, and a float32 in double, as in transformers. Given ones stay."""
    for dtype, factor in ((torch.bfloat16, 4.90625), (torch.float64, float(torch.tensor(24**0.5)))):
        model = tiny_model(dtype=dtype, scale_embeddings=True)
        embedded = model.model.embed_tokens(TOKENS)
        inputs = model(TOKENS, pattern=Causal(), inputs_embeds_BLD=embedded * factor)
        assert torch.equal(model(TOKENS, pattern=Causal()), inputs)
        assert not torch.equal(model(TOKENS, pattern=Causal(), inputs_embeds_BLD=embedded), inputs)


def test_the_query_scalar_of_the_head_is_the_default(tiny_model: MakeModel) -> None:
    plain, same, other = (tiny_model(query_pre_attn_scalar=value) for value in (None, 6.0, 12.0))
    logits = plain(TOKENS, pattern=Causal())
    torch.testing.assert_close(same(TOKENS, pattern=Causal()), logits)
    assert not torch.allclose(other(TOKENS, pattern=Causal()), logits, atol=1e-3)


def test_logits_are_capped_last(tiny_model: MakeModel) -> None:
    plain, capped = tiny_model(), tiny_model(final_logit_softcapping=2.0)
    logits = plain(TOKENS, pattern=Causal())
    assert logits.abs().max() > 2.0
    torch.testing.assert_close(capped(TOKENS, pattern=Causal()), 2.0 * torch.tanh(logits / 2.0))


def test_output_positions_equal_all_logits(tiny_model: MakeModel) -> None:
    model = tiny_model(dtype=torch.float64, **GEMMA2)
    rows = torch.tensor([0, 5, 11, 13, 35])
    whole = model(TOKENS, pattern=BlockCausal(3)).flatten(0, 1)[rows]
    torch.testing.assert_close(
        model(TOKENS, pattern=BlockCausal(3), output_positions=rows), whole, rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.2, 0.03)])
def test_the_loss_is_that_of_the_logits(tiny_model: MakeModel, smoothing: float, z_loss: float) -> None:
    model = tiny_model(dtype=torch.float64, **GEMMA2)
    rows = torch.arange(0, 36, 2)
    targets, weights = TOKENS.flatten()[rows], torch.rand(18, dtype=torch.float64)
    loss_inputs = LossInputs(targets, weights, 18, label_smoothing=smoothing, z_loss=z_loss)
    output = model(TOKENS, pattern=Bidirectional(), output_positions=rows, loss_inputs=loss_inputs)
    logits = model(TOKENS, pattern=Bidirectional()).flatten(0, 1)[rows][:, :18]
    loss = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    expected = ((loss + z_loss * logits.logsumexp(-1).square()) * weights).sum()
    torch.testing.assert_close(output.loss_sum, expected, rtol=1e-10, atol=0.0)
    torch.testing.assert_close(output.nll_N, F.cross_entropy(logits, targets, reduction="none"))
    parameters = list(model.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(output.loss_sum, parameters),
        torch.autograd.grad(expected, parameters),
        rtol=1e-8,
        atol=1e-10,
    )


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
