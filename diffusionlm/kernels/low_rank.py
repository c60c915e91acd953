"""A frozen projection with a trained low-rank one in one function, and dropout whose masks are a hash.

Shapes: T tokens, I inputs, O outputs, r rank.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

_LOW_31_BITS, _LOW_32_BITS = 0x7FFFFFFF, 0xFFFFFFFF
_FIRST_MULTIPLIER, _SECOND_MULTIPLIER = 0x7FEB352D, 0x5A6B4A35
"""Odd factors of the hash below 2^31, the first of Wellons' triple32."""
_GOLDEN_RATIO = 0x9E3779B1


class FrozenWeight(Protocol):
    """A weight without gradient: a tensor, or quantized."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the dense weight, [out, in]."""

    def to(self, dtype: torch.dtype, /) -> Tensor:
        """The weight in a dtype."""


def low_rank_linear(
    x: Tensor,
    weight_OI: FrozenWeight,
    bias_O: Tensor | None,
    A_rI: Tensor,
    B_Or: Tensor,
    scale: float,
    keep_TI: Tensor | None,
) -> Tensor:
    """``x W^T + bias + scale (x * keep) A^T B^T``, with gradients of x, the bias, A and B.

    Autograd would compute the same with more passes over [T, O] and [T, I]: here both products are added in place.

    Args:
        x: [..., I], in the dtype of the products.
        weight_OI: frozen, in any floating dtype or quantized; a copy in the dtype of the products lives during the
            product only.
        bias_O: frozen or trained.
        A_rI: in any floating dtype.
        B_Or: like A.
        keep_TI: mask of dropout; ``scale`` has its factor 1 / (1 - p). None: no dropout.
    """
    return _LowRankLinear.apply(x, weight_OI, bias_O, A_rI, B_Or, scale, keep_TI)  # type: ignore[no-any-return]


class _LowRankLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: FrozenWeight,
        bias_O: Tensor | None,
        A_rI: Tensor,
        B_Or: Tensor,
        scale: float,
        keep_TI: Tensor | None,
    ) -> Tensor:
        x_TI = x.reshape(-1, x.shape[-1])
        A, B = A_rI.to(x.dtype), B_Or.to(x.dtype)
        # Thin products are up to three times faster on a CPU with the rank first.
        h_rT = A @ (x_TI if keep_TI is None else x_TI * keep_TI).T
        base_TO = F.linear(x_TI, weight_OI.to(x.dtype), None if bias_O is None else bias_O.to(x.dtype))
        # Selective activation checkpointing saves the result of this product, which must not change then.
        out_TO = base_TO if _get_current_dispatch_mode() is None else torch.empty_like(base_TO)
        torch.addmm(base_TO, h_rT.T, B.T, alpha=scale, out=out_TO)
        ctx.save_for_backward(x_TI, A_rI, B_Or, h_rT, keep_TI)
        ctx.weight, ctx.scale = weight_OI, scale  # without gradient, so it makes no cycle
        ctx.bias_dtype = None if bias_O is None else bias_O.dtype
        return out_TO.view(*x.shape[:-1], out_TO.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, A_rI, B_Or, h_rT, keep_TI = ctx.saved_tensors
        dtype = x_TI.dtype
        grad_TO = grads[0].reshape(-1, ctx.weight.shape[0])
        grad_h_rT = (B_Or.to(dtype).T @ grad_TO.T).mul_(ctx.scale)
        grad_B = (h_rT @ grad_TO).T.mul(ctx.scale).to(B_Or.dtype)
        grad_A = (grad_h_rT @ (x_TI if keep_TI is None else x_TI * keep_TI)).to(A_rI.dtype)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_TO @ ctx.weight.to(dtype)
            A = A_rI.to(dtype)
            if keep_TI is None:
                grad_x.addmm_(grad_h_rT.T, A)
            else:
                grad_x.addcmul_(grad_h_rT.T @ A, keep_TI.to(dtype))
            grad_x = grad_x.view(*grads[0].shape[:-1], grad_x.shape[1])
        grad_bias = grad_TO.sum(0, dtype=ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_bias, grad_A, grad_B, None, None


def hash_tokens(key: int, rows_B: Tensor, length: int) -> Tensor:
    """Hash of each token of B rows of this length, [B * length], int64 of 32 bits.

    Args:
        key: 32 bits.
        rows_B: number of each row, int64.
        length: tokens of a row.
    """
    return _mix(_mix(rows_B + key)[:, None] + _spread(length, rows_B.device)).flatten()


def dropout_mask(tokens_T: Tensor, key: int | Tensor, num_features: int, probability: float) -> Tensor:
    """Mask of dropout [T, I], true with 1 - probability: a function of token, key and feature alone.

    The masks of a token do not depend on the other tokens of the batch, and are the same on all devices.

    Args:
        tokens_T: hashes of `hash_tokens`.
        key: of the module, 32 bits; a tensor is 0-d int64, on the CPU or the device of the tokens.
        num_features: I.
        probability: of false.
    """
    features_I = _mix(_spread(num_features, tokens_T.device) + key)
    bits_TI = _to_int32(_mix(tokens_T ^ key))[:, None] ^ _to_int32(features_I)
    bits_TI.mul_(_FIRST_MULTIPLIER)
    bits_TI.bitwise_xor_((bits_TI >> 15).bitwise_and_(0x1FFFF)).mul_(_SECOND_MULTIPLIER)
    return bits_TI >= round(probability * 2**32) - 2**31


def _spread(count: int, device: torch.device) -> Tensor:
    """Multiples of the golden ratio of 2^32, [count] in int64."""
    # torch's compiler would compute a product of indices in int32, where this one overflows; after & it is int64.
    return (torch.arange(count, device=device) & _LOW_31_BITS) * _GOLDEN_RATIO


def _mix(values: Tensor) -> Tensor:
    """A hash of the lower 32 bits of int64 values."""
    values = values & _LOW_32_BITS
    values = ((values ^ (values >> 16)) * _FIRST_MULTIPLIER) & _LOW_32_BITS
    values = ((values ^ (values >> 15)) * _SECOND_MULTIPLIER) & _LOW_32_BITS
    return values ^ (values >> 16)


def _to_int32(values: Tensor) -> Tensor:
    """The same 32 bits as signed integers."""
    return (values - ((values >> 31) << 32)).to(torch.int32)
