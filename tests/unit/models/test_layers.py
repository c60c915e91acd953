"""Linear, norm, rotation and feed-forward against formulas written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from config.model import YarnRope
from diffusionlm.kernels import cpu_linear
from diffusionlm.models.layers import Linear, RMSNorm, RotaryEmbedding, SwiGLU, normalize_and_rotate, rotate


def naive_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain


def make_norm(width: int, eps: float, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(width, eps)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(width) * 0.5 + 1.0)
    return norm.to(dtype)


@pytest.mark.parametrize("uses_onednn", [False, True])
@pytest.mark.parametrize("shape", [(1,), (2,), (1, 3), (2, 2), (5,), (0,), ()], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_without_gradient_is_linear(
    shape: tuple[int, ...], bias: bool, uses_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffusionlm.kernels.cpu_linear.prefers_onednn", lambda: uses_onednn)
    layer, x = Linear(12, 7, bias=bias), torch.randn(*shape, 12)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    with torch.no_grad():
        ours = layer(x)
        expected = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0.0)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
    assert ours.is_contiguous()
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer(x), ours, rtol=1e-5, atol=1e-5)


def test_onednn_multiplies_on_cpus_of_amd_in_fp32_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    num_products, vendor, product = 0, "AuthenticAMD", cpu_linear.multiply_by_onednn

    def count_product(*values: torch.Tensor) -> torch.Tensor:
        nonlocal num_products
        num_products += 1
        return product(*values)

    monkeypatch.setattr(cpu_linear, "multiply_by_onednn", count_product)
    monkeypatch.setattr(cpu_linear, "read_processor_vendor", lambda root: vendor)
    monkeypatch.setattr(cpu_linear, "prefers_onednn", cpu_linear.prefers_onednn.__wrapped__)
    layer, x = Linear(12, 7), torch.randn(5, 12)
    torch.nn.init.normal_(layer.weight)
    layer(x)
    with torch.no_grad():
        layer.double()(x.double())
        assert num_products == 0
        layer.float()(x)
        assert num_products == 1
        vendor = "GenuineIntel"
        layer(x)
    assert num_products == 1


def test_without_gradient_norm_and_rotation_are_the_same() -> None:
    norm, x = make_norm(12, 1e-3, torch.float32), torch.randn(2, 3, 4, 12)
    rope = RotaryEmbedding(12, 100.0)(torch.arange(3)[None])
    with torch.inference_mode():
        ours = norm(x), rotate(x, rope)
    assert torch.equal(ours[0], norm(x)) and torch.equal(ours[1], rotate(x, rope))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-13)])
def test_norm_and_its_gradients_equal_the_formula(dtype: torch.dtype, tolerance: float) -> None:
    norm = make_norm(12, 1e-2, dtype)
    x = torch.randn(3, 5, 12, dtype=dtype, requires_grad=True)
    cotangent = torch.randn(3, 5, 12, dtype=dtype)
    out = norm(x)
    x64 = x.detach().double().requires_grad_()
    gain64 = norm.weight.detach().double().requires_grad_()
    expected = naive_norm(x64, gain64, 1e-2)
    ours = (out, *torch.autograd.grad(out, (x, norm.weight), cotangent))
    theirs = (expected, *torch.autograd.grad(expected, (x64, gain64), cotangent.double()))
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == dtype
        torch.testing.assert_close(our.double(), their, rtol=tolerance, atol=tolerance)


def test_norm_dtypes_with_and_without_autocast() -> None:
    norm = make_norm(12, 1e-3, torch.float32)
    x = torch.randn(3, 12, requires_grad=True)
    assert norm(x).dtype == torch.float32
    assert norm(x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = norm(x)
    assert out.dtype == torch.bfloat16
    # The statistics were taken in fp32: only the output is rounded.
    torch.testing.assert_close(out, norm(x).bfloat16(), rtol=0, atol=0)
    out.float().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert norm.weight.grad is not None and norm.weight.grad.dtype == torch.float32


def naive_rotation(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """x [B, L, N, H] as H / 2 complex numbers (x_i, x_{i + H/2}), each turned by position * theta^(-2i/H)."""
    half = x.shape[-1] // 2
    speeds = theta ** (-2.0 * torch.arange(half, dtype=torch.float64) / x.shape[-1])
    turn = torch.polar(torch.ones(1, dtype=torch.float64), positions.double()[..., None] * speeds)
    z = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn[..., None, :]
    return torch.cat([z.real, z.imag], dim=-1)


@pytest.mark.parametrize("shape", [(1, 9), (2, 9)])
def test_rotation_equals_complex_formula(shape: tuple[int, int]) -> None:
    x = torch.randn(2, 9, 3, 8)
    positions = torch.randint(0, 60, shape)
    rope = RotaryEmbedding(8, 50.0)(positions)
    torch.testing.assert_close(rotate(x, rope).double(), naive_rotation(x, positions, 50.0), rtol=1e-5, atol=1e-5)


def test_rotation_gradient_of_a_view() -> None:
    """Queries arrive as views of a projection; the function must not assume contiguity."""
    x = torch.randn(2, 4, 3, 5, dtype=torch.float64).transpose(1, 3).requires_grad_()  # [2, 5, 3, 4]
    rope = RotaryEmbedding(4, 10.0)(torch.arange(5)[None])
    torch.testing.assert_close(rotate(x, rope), rotate(x.contiguous(), rope))
    assert torch.autograd.gradcheck(lambda x: rotate(x, rope), (x,))


def test_normalized_rotation_is_norm_then_rotation() -> None:
    """Bit for bit, with gradients of x and of the gain; also where the gradient has the layout of heads."""
    norm, rope = make_norm(8, 1e-3, torch.float32), RotaryEmbedding(8, 50.0)(torch.arange(9)[None])
    x = torch.randn(2, 9, 3, 8, requires_grad=True)
    grad = torch.randn(2, 3, 9, 8).transpose(1, 2)
    both, one = rotate(norm(x), rope), normalize_and_rotate(x, norm, rope)
    assert torch.equal(one, both)
    expected = torch.autograd.grad(both, (x, norm.weight), grad)
    for ours, theirs in zip(torch.autograd.grad(one, (x, norm.weight), grad), expected, strict=True):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        assert torch.equal(normalize_and_rotate(x, norm, rope), both)
    assert torch.equal(normalize_and_rotate(x, torch.nn.Identity(), rope), rotate(x, rope))


def test_normalized_rotation_rounds_once() -> None:
    """With bfloat16 autocast nothing is rounded between norm and rotation."""
    norm, rope = make_norm(8, 1e-3, torch.float32), RotaryEmbedding(8, 50.0)(torch.arange(9)[None])
    rope = (rope[0].bfloat16(), rope[1].bfloat16())
    x = torch.randn(2, 9, 3, 8).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        ours = normalize_and_rotate(x, norm, rope)
        with torch.no_grad():
            assert torch.equal(normalize_and_rotate(x, norm, rope), ours), "in validation as in training"
    exact = rotate(norm(x.double().detach()), (rope[0].double(), rope[1].double()))
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), exact, rtol=2.0**-8, atol=1e-5)
    ours.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh"])
def test_feed_forward_equals_formula(act: Any) -> None:
    layer = SwiGLU(6, 10, act).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 6, dtype=torch.float64)
    gate, up = x @ layer.gate_proj.weight.T, x @ layer.up_proj.weight.T
    if act == "silu":
        activated = gate / (1 + torch.exp(-gate))
    else:
        activated = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        assert not torch.allclose(activated, F.gelu(gate), rtol=1e-6), "the exact form must be another one"
    torch.testing.assert_close(layer(x), (activated * up) @ layer.down_proj.weight.T)


def test_queries_are_scaled_by_position_and_keys_are_not() -> None:
    """By the published formula: 1 up to the original context, then by its logarithm."""
    scaling = YarnRope(
        factor=16.0, original_max_position_embeddings=16384, attention_factor=1.0, llama_4_scaling_beta=0.1
    )
    positions = torch.tensor([[0, 16383, 16384, 32767, 32768, 262143]])
    tables = RotaryEmbedding(8, 1e6, scaling)(positions, heads=2)
    plain = RotaryEmbedding(8, 1e6, scaling.model_copy(update={"llama_4_scaling_beta": None}))(positions, heads=2)
    scale = torch.tensor([1.0, 1.0, *(1 + 0.1 * math.log(factor) for factor in (2, 2, 3, 16))])[None, :, None, None]
    assert len(tables) == 4 and len(plain) == 2
    for keys, queries, expected in zip(tables[:2], tables[2:], plain, strict=True):
        assert torch.equal(keys, expected)
        torch.testing.assert_close(queries, expected * scale, rtol=1e-6, atol=0.0)
