"""Small modules: linear, RMSNorm, rotary embedding, SwiGLU and soft cap.

Shapes: B sequences, L positions, D hidden, N heads, H width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.model import LinearRope, Llama3Rope, RopeScaling, YarnRope
from diffusionlm.kernels.cpu_linear import linear_without_gradient
from diffusionlm.kernels.loss_types import HeadRows
from diffusionlm.kernels.precision import compute_dtype as compute_dtype  # also for packages above


class Linear(nn.Linear):
    """Projection: the only one of the project, where LoRA and quantization enter.

    Left uninitialized: `init.init_weights` initializes all parameters.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Do nothing: on ``meta`` torch would load its compiler to fill the weights."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        product = F.linear if torch.is_grad_enabled() else linear_without_gradient
        return product(x, self.weight, self.bias)

    def effective_weight(self) -> Tensor:
        """The whole weight [out_features, in_features]; subclasses compute it."""
        return self.weight

    def head_rows(self) -> HeadRows | None:
        """Rows that are trained while `weight` is frozen; subclasses have some."""
        return None


class Embedding(nn.Embedding):
    """Token embedding, left uninitialized like `Linear`."""

    def reset_parameters(self) -> None:
        """Do nothing: on ``meta`` torch would load its compiler to fill the weights."""


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019), computed in at least fp32, with a gain.

    The gain is the weight, or with ``offset`` 1 + the weight (Gemma), also in at least fp32.
    """

    def __init__(self, width: int, eps: float, *, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if offset else torch.ones(width))
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension. The dtype is that of x, or of autocast, so that the projections after the norm
        share one cast."""
        device, dtype = x.device.type, compute_dtype(x)
        gain = self.gain()
        if device == "cpu" and torch.is_grad_enabled():
            return _RMSNorm.apply(x, gain, self.eps, dtype)  # type: ignore[no-any-return]
        if device == "cpu":
            return _normalize(x, gain, self.eps)[0].to(dtype)
        # A GPU's kernel computes in fp32, whatever the dtypes, and needs one for both.
        wide = x if gain.dtype == x.dtype else _at_least_fp32(x)
        normed: Tensor = F.rms_norm(wide, gain.shape, gain.to(wide.dtype), self.eps)
        return normed.to(dtype)

    def gain(self) -> Tensor:
        """Factor of each normalized channel."""
        return 1.0 + _at_least_fp32(self.weight) if self.offset else self.weight


class _RMSNorm(torch.autograd.Function):
    """RMSNorm in few passes: torch has no fused one on the CPU, and autograd would save every temporary."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        normed, scale = _normalize(x, gain, eps)
        ctx.save_for_backward(x, gain, scale)
        return normed.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, gain, scale = ctx.saved_tensors
        grad_x, grad_gain = _normalize_backward(grads[0], x, gain, scale, ctx.needs_input_grad)
        return grad_x, grad_gain, None, None


def _normalize(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalized x in at least fp32, and its scale before the gain, [..., 1]."""
    wide = _at_least_fp32(x)
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).mul_(gain), scale


def _normalize_backward(
    grad: Tensor, x: Tensor, gain: Tensor, scale: Tensor, needs_input_grad: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and of the gain, from that of `_normalize`."""
    width = x.shape[-1]
    wide = _at_least_fp32(x).reshape(-1, width)
    grad = grad.to(wide.dtype).reshape(-1, width)
    scale = scale.view(-1, 1)
    # Both sums are matrix-vector products, which read the matrix once, at memory bandwidth.
    product = grad * wide
    grad_gain = (scale.mT @ product)[0].to(gain.dtype) if needs_input_grad[1] else None
    if not needs_input_grad[0]:
        return None, grad_gain
    along = torch.mv(product, gain.to(wide.dtype)).unsqueeze(1).mul_(scale.square()).div_(-width)
    # Written over the product: a new tensor of this size would not be in the cache.
    grad_x = torch.mul(grad, gain, out=product).addcmul_(wide, along).mul_(scale)
    return grad_x.view(x.shape).to(x.dtype), grad_gain


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)`` (Gemma 2): nearly x for small x, at most ``cap``. Shape and dtype are those of x."""
    return (x / cap).tanh_() * cap


RotaryTables = tuple[Tensor, ...]
"""Cosines and sines for `rotate`, each [..., heads, H]; then those of queries, where these have tables of their own."""


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (Su et al. 2021) in the half-split layout of Hugging Face's Llama and Qwen."""

    def __init__(
        self,
        head_dim: int,
        theta: float,
        scaling: RopeScaling | None = None,
        mrope_section: Sequence[int] | None = None,
    ) -> None:
        """
        Args:
            mrope_section: pairs for time, rows and columns, interleaved as in Qwen3-VL; None: no such positions.
        """
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.scaling = scaling
        self.mrope_section = mrope_section

    def forward(self, positions: Tensor, *, heads: int = 1, dtype: torch.dtype = torch.float32) -> RotaryTables:
        """Tables for `rotate`, each [..., heads, H]: (cos, cos) and (-sin, sin); angles are computed in fp32. With
        ``llama_4_scaling_beta`` two more are those of queries, multiplied by their scale.

        Args:
            positions: position ids of any shape; with ``mrope_section`` [3, B, L] are those in time, rows and columns.
            heads: number of equal copies. On a CPU a copy for each head is faster than a broadcast.
            dtype: dtype of the tables.
        """
        angles, attention_scaling = self._angles(positions)
        cos, sin = attention_scaling * angles.cos(), attention_scaling * angles.sin()
        halves = [(cos, cos), (-sin, sin)]
        if isinstance(self.scaling, YarnRope) and (beta := self.scaling.llama_4_scaling_beta) is not None:
            num_contexts = positions // self.scaling.original_max_position_embeddings
            scale = 1.0 + beta * torch.log1p(num_contexts.float())[..., None]
            halves += [(scale * cos, scale * cos), (-scale * sin, scale * sin)]
        tables = (torch.cat(pair, dim=-1).to(dtype).unsqueeze(-2) for pair in halves)
        return tuple(table.expand(*angles.shape[:-1], heads, self.head_dim).contiguous() for table in tables)

    def _angles(self, positions: Tensor) -> tuple[Tensor, float]:
        """Angle of each pair in radians, [..., H / 2], and the factor of the tables (YaRN)."""
        positions = positions[..., None]
        if self.mrope_section is not None and positions.dim() == 4:
            positions = self._select_axes(positions)
        exponents = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=torch.float32) / self.head_dim
        frequencies = self.theta**-exponents
        if isinstance(self.scaling, YarnRope):
            frequencies = _scale_frequencies_yarn(frequencies, self.theta, self.scaling)
            return positions.float() * frequencies, self.scaling.attention_scaling
        if self.scaling is not None:
            frequencies = _scale_frequencies(frequencies, self.scaling)
        return positions.float() * frequencies, 1.0

    def _select_axes(self, positions_3BL1: Tensor) -> Tensor:
        """Position of each pair in time, rows or columns, [B, L, H / 2]."""
        assert self.mrope_section is not None
        pairs = torch.arange(self.head_dim // 2, device=positions_3BL1.device)
        time, *others = positions_3BL1.unbind()
        for axis, positions_BL1 in enumerate(others, start=1):
            is_own = (pairs % 3 == axis) & (pairs < 3 * self.mrope_section[axis])
            time = torch.where(is_own, positions_BL1, time)
        return time


def _scale_frequencies_yarn(frequencies: Tensor, theta: float, scaling: YarnRope) -> Tensor:
    """Radians per position for a longer context with YaRN (Peng et al. 2023, section 3.2).

    Pairs that turn more than ``beta_fast`` times over the original context are unchanged; below ``beta_slow`` turns
    they are divided by ``factor``; in between, interpolated linearly in the index of the pair.
    """
    num_pairs = frequencies.shape[-1]

    def pair_index(turns: float) -> float:
        return num_pairs * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)

    first = max(math.floor(pair_index(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_index(scaling.beta_slow)), 2 * num_pairs - 1)
    indices = torch.arange(num_pairs, device=frequencies.device, dtype=torch.float32)
    share = ((indices - first) / ((last - first) or 0.001)).clamp(0.0, 1.0)
    return share * frequencies / scaling.factor + (1.0 - share) * frequencies


def _scale_frequencies(frequencies: Tensor, scaling: LinearRope | Llama3Rope) -> Tensor:
    """Radians per position for a longer context, divided by ``factor``.

    Llama 3.1 divides only slow frequencies: those with at least ``high_freq_factor`` turns over the original context
    are unchanged, those with at most ``low_freq_factor`` turns are divided, and those in between are interpolated
    linearly in the number of turns.
    """
    if isinstance(scaling, LinearRope):
        return frequencies / scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - share) * frequencies / scaling.factor + share * frequencies


class _Rotate(torch.autograd.Function):
    """Rotation without the temporaries that autograd would save."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _apply_rotation(x, cosines, sines, sign=1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        return _apply_rotation(grads[0], cosines, sines, sign=-1.0), None, None


def _apply_rotation(x: Tensor, cosines: Tensor, sines: Tensor, *, sign: float) -> Tensor:
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    # Out of place: the compiler of torch 2.11 loses the gradient of an in-place result.
    return torch.addcmul(x * cosines, swapped, sines.expand_as(x), value=sign)  # expanded: for symbolic sizes


def rotate(x: Tensor, rope: RotaryTables) -> Tensor:
    """Rotate each pair (i, i + H / 2) of the last dimension of x [..., N, H] by the angle of its position.

    ``rope`` are the tables of `RotaryEmbedding`, for one head or at least N heads.
    """
    cosines, sines = (table[..., : x.shape[-2], :].to(x.dtype) for table in rope)
    if torch.is_grad_enabled():
        return _Rotate.apply(x, cosines, sines)  # type: ignore[no-any-return]
    return _apply_rotation(x, cosines, sines, sign=1.0)


class _NormalizedRotation(torch.autograd.Function):
    """`_RMSNorm`, then `_Rotate`, in fewer passes over memory and without rounding between them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, cosines: Tensor, sines: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor:
        rotated, scale = _normalize_and_rotate(x, gain, cosines, sines, eps)
        ctx.save_for_backward(x, gain, scale, cosines, sines)
        return rotated.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, scale, cosines, sines = ctx.saved_tensors
        # Attention's gradient has the layout of heads, in which the tables are not contiguous.
        grad = grads[0].to(scale.dtype, memory_format=torch.contiguous_format)
        grad = _apply_rotation(grad, cosines.to(grad.dtype), sines.to(grad.dtype), sign=-1.0)
        return *_normalize_backward(grad, x, gain, scale, ctx.needs_input_grad), None, None, None, None


def _normalize_and_rotate(x: Tensor, gain: Tensor, cosines: Tensor, sines: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalized and rotated x in at least fp32, and the scale of the norm."""
    normed, scale = _normalize(x, gain, eps)
    swapped = normed.roll(x.shape[-1] // 2, dims=-1)
    return normed.mul_(cosines.to(normed.dtype)).addcmul_(swapped, sines.to(normed.dtype)), scale


def normalize_and_rotate(x: Tensor, norm: nn.Module, rope: RotaryTables) -> Tensor:
    """``rotate(norm(x), rope)`` for queries or keys x [..., N, H]; ``norm`` is a `RMSNorm` or does nothing.

    On a CPU nothing is rounded between norm and rotation, and hooks of the norm do not run.
    """
    if x.device.type != "cpu" or not isinstance(norm, RMSNorm):
        return rotate(norm(x), rope)
    cosines, sines = (table[..., : x.shape[-2], :] for table in rope)
    gain, dtype = norm.gain(), compute_dtype(x)
    if torch.is_grad_enabled():
        return _NormalizedRotation.apply(x, gain, cosines, sines, norm.eps, dtype)  # type: ignore[no-any-return]
    return _normalize_and_rotate(x, gain, cosines, sines, norm.eps)[0].to(dtype)


class SwiGLU(nn.Module):
    """Feed-forward ``down(act(gate(x)) * up(x))`` with SiLU or the tanh form of GELU (Shazeer 2020)."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, hidden_act: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    ) -> None:
        super().__init__()
        self.hidden_act = hidden_act
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.gate_proj(x)
        inner = F.silu(inner) if self.hidden_act == "silu" else F.gelu(inner, approximate="tanh")
        inner = inner * self.up_proj(x)
        return self.down_proj(inner)  # type: ignore[no-any-return]
