"""The small modules: linear, RMSNorm, rotary embedding, SwiGLU.

Shapes: B rows, L positions, D hidden, N heads, H width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """The one projection of the project: LoRA and quantisation enter here. Left uninitialised: `init.py` fills it."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Nothing: initialisation lives in one place, `init.init_weights`."""


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019), computed in at least fp32, with a gain."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Shape as given; dtype as given, or autocast's, so that the projections behind it share one cast."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        if device == "cpu":
            return _RMSNorm.apply(x, self.weight, self.eps, dtype)  # type: ignore[no-any-return]
        wide = _at_least_fp32(x)
        normed: Tensor = F.rms_norm(wide, self.weight.shape, self.weight.to(wide.dtype), self.eps)
        return normed.to(dtype)


class _RMSNorm(torch.autograd.Function):
    """The norm in few passes: torch has no fused one on the CPU, and autograd would keep each temporary."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = _at_least_fp32(x)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, gain, scale)
        normed: Tensor = (wide * scale).mul_(gain)
        return normed.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, gain, scale = ctx.saved_tensors
        normed = _at_least_fp32(x) * scale
        grad = grads[0].to(normed.dtype)
        product = grad * normed
        grad_gain = product.flatten(0, -2).sum(0)
        along = (product @ gain.to(normed.dtype)).unsqueeze(-1).div_(x.shape[-1])
        grad_x = (grad * gain).sub_(normed.mul_(along)).mul_(scale)
        return grad_x.to(x.dtype), grad_gain.to(gain.dtype), None, None


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (Su et al. 2021), half-split layout as in Hugging Face's Llama and Qwen."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines in fp32, each [..., 1, H / 2], for `rotate`."""
        exponents = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=torch.float32) / self.head_dim
        angles = positions[..., None].float() * self.theta**-exponents
        return angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)


class _Rotate(torch.autograd.Function):
    """Rotation without the concatenation and the temporaries that autograd would keep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, sign=1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, sign=-1.0), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, sign: float) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = torch.empty_like(x)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin, value=sign)
    return out


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + H / 2) of the last dimension of x [..., N, H] by its position's angle."""
    cos, sin = rope
    return _Rotate.apply(x, cos.to(x.dtype), sin.to(x.dtype))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """Feed-forward ``down(silu(gate(x)) * up(x))`` (Shazeer 2020)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]
