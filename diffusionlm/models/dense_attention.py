"""Grouped-query attention with a dense mask: eager products or SDPA.

Shapes: B sequences, Q queries, S keys, N query heads, K key-value heads, H width of a head, U queries of a key-value
head (N / K * Q), G query heads of a group (N / K).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusionlm.models.layers import soft_cap

DenseBackend = Literal["eager", "sdpa"]
"""``eager``: two batched matrix products and a softmax. ``sdpa``: torch's fused kernels."""


@dataclass(frozen=True)
class AttentionScale:
    """Scale and soft cap that turn the product of a query and a key into a score."""

    scale: float | None = None
    """Factor of the product. None: 1 / sqrt(H)."""
    softcap: float | None = None
    """Scores s are replaced by ``c tanh(s / c)`` before the mask is applied (Gemma 2). None: no cap."""

    def check_backend(self, backend: str) -> None:
        """Raise if the backend has no soft cap and one is needed.

        Raises:
            ValueError: a soft cap with SDPA or tiles.
        """
        if self.softcap is not None and backend in ("sdpa", "tiled"):
            raise ValueError(
                f'attention backend "{backend}" cannot cap scores, and the model has attn_logit_softcapping = '
                f'{self.softcap}: use "auto", "eager" or "flex"'
            )


DEFAULT_SCALE = AttentionScale()
"""Scale 1 / sqrt(H), no cap."""


def attend(
    q_BQNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    mask: Tensor | None,
    backend: DenseBackend,
    scale_options: AttentionScale = DEFAULT_SCALE,
) -> Tensor:
    """Softmax attention with a dense mask.

    Args:
        k_BSKH: keys; N is a multiple of K.
        mask: [B or 1, Q, S] or [B or 1, N or 1, Q, S]. Boolean: True where a query attends to a key. Float: added to
            the scores. None: no mask.

    Returns:
        [B, Q, N, H]

    Raises:
        ValueError: SDPA with a soft cap.
    """
    scale_options.check_backend(backend)
    if mask is not None:
        mask = mask[:, None] if mask.dim() == 3 else mask
        mask = mask if mask.dtype == torch.bool else mask.to(q_BQNH.dtype)
    if backend == "eager":
        return _attend_eager(q_BQNH, k_BSKH, v_BSKH, mask, scale_options)
    if _stacks_groups(q_BQNH, k_BSKH, mask):
        return _attend_stacked(q_BQNH, k_BSKH, v_BSKH, mask, scale_options)
    out_BNQH = F.scaled_dot_product_attention(
        q_BQNH.transpose(1, 2),
        k_BSKH.transpose(1, 2),
        v_BSKH.transpose(1, 2),
        attn_mask=mask,
        scale=scale_options.scale,
        enable_gqa=q_BQNH.shape[2] != k_BSKH.shape[2],
    )
    return out_BNQH.transpose(1, 2)


def _stacks_groups(q_BQNH: Tensor, k_BSKH: Tensor, mask: Tensor | None) -> bool:
    """True on a GPU where only the memory-efficient kernel of SDPA fits, a mask or fp32, and query heads share keys.

    Up to torch 2.14 that kernel has no ``enable_gqa``, and SDPA falls back to one that holds all scores."""
    shares_keys = q_BQNH.shape[2] != k_BSKH.shape[2]
    return q_BQNH.is_cuda and shares_keys and (mask is not None or q_BQNH.dtype == torch.float32)


def _attend_stacked(
    q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask: Tensor | None, scale_options: AttentionScale
) -> Tensor:
    """SDPA of the stacked query heads of each key-value head, [B, Q, N, H]."""
    N, K = q_BQNH.shape[2], k_BSKH.shape[2]
    if mask is not None:
        heads = (1, 1) if mask.shape[1] == 1 else (K, N // K)
        mask = mask.view(len(mask), *heads, *mask.shape[2:]).expand(-1, -1, N // K, -1, -1).flatten(2, 3)
    out_BKUH = F.scaled_dot_product_attention(
        _stack_groups(q_BQNH, K),
        k_BSKH.transpose(1, 2),
        v_BSKH.transpose(1, 2),
        attn_mask=mask,
        scale=scale_options.scale,
    )
    return _unstack_groups(out_BKUH, N)


@contextlib.contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Context in which SDPA does not use cuDNN, which plans for tens of milliseconds whenever it sees a new shape.

    On Hopper and data center Blackwell it is torch's first choice for bf16, and the fastest for constant shapes.
    """
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


def attend_cached(
    q_BQNH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    bias: Tensor | None,
    backend: DenseBackend,
    scale_options: AttentionScale,
) -> Tensor:
    """Softmax attention without gradient, with keys and values in the layout of a cache.

    Args:
        k_BKSH: keys; N is a multiple of K.
        bias: [B or 1, 1, U, S], added to the scores; repeated for the N / K query heads of a group. None: no mask.

    Returns:
        [B, Q, N, H]
    """
    Q, N = q_BQNH.shape[1:3]
    K, S = k_BKSH.shape[1:3]
    if not Q:
        return q_BQNH
    q_BKUH = _stack_groups(q_BQNH, K)
    if backend == "eager":
        bias = None if bias is None else bias.view(-1, 1, N // K, Q, S)
        out_BKUH = _attend_groups(q_BKUH, k_BKSH, v_BKSH, bias, scale_options)
    else:
        out_BKUH = F.scaled_dot_product_attention(q_BKUH, k_BKSH, v_BKSH, attn_mask=bias, scale=scale_options.scale)
    return _unstack_groups(out_BKUH, N)


def mask_to_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Bias of a boolean mask: 0 where True, -inf where False."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def _attend_eager(
    q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask: Tensor | None, scale_options: AttentionScale
) -> Tensor:
    K, N = k_BSKH.shape[2], q_BQNH.shape[2]
    bias = None
    if mask is not None:
        bias = mask_to_bias(mask, q_BQNH.dtype) if mask.dtype == torch.bool else mask
        heads = (1, 1) if bias.shape[1] == 1 else (K, N // K)
        bias = bias.reshape(len(bias), *heads, *bias.shape[2:])
    k_BKSH, v_BKSH = k_BSKH.transpose(1, 2), v_BSKH.transpose(1, 2)
    return _unstack_groups(_attend_groups(_stack_groups(q_BQNH, K), k_BKSH, v_BKSH, bias, scale_options), N)


def _attend_groups(
    q_BKUH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, bias_BKGQS: Tensor | None, scale_options: AttentionScale
) -> Tensor:
    """Attention of stacked queries with two products for each key-value head, [B, K, U, H]."""
    B, K, U, H = q_BKUH.shape
    scale = H**-0.5 if scale_options.scale is None else scale_options.scale
    scores = torch.bmm((q_BKUH * scale).flatten(0, 1), k_BKSH.flatten(0, 1).transpose(1, 2))
    if scale_options.softcap is not None:
        scores = soft_cap(scores, scale_options.softcap)
    if bias_BKGQS is not None:
        # In place: neither a product nor a sum needs its result for its gradient.
        scores.view(B, K, -1, *bias_BKGQS.shape[3:]).add_(bias_BKGQS)
    v = v_BKSH.flatten(0, 1)
    return torch.bmm(torch.softmax(scores, dim=-1).to(v.dtype), v).view(B, K, U, H)


def _stack_groups(q_BQNH: Tensor, groups: int) -> Tensor:
    """Stack the query heads that share keys, [B, K, U, H], so that one product serves them all."""
    B, Q, N, H = q_BQNH.shape
    return q_BQNH.view(B, Q, groups, N // groups, H).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _unstack_groups(out_BKUH: Tensor, heads: int) -> Tensor:
    """Inverse of `_stack_groups`, [B, Q, N, H]."""
    B, K, U, H = out_BKUH.shape
    return out_BKUH.view(B, K, heads // K, U * K // heads, H).permute(0, 3, 1, 2, 4).flatten(2, 3)
