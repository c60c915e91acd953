"""Grouped-query attention and its lowerings.

Shapes: B rows, L positions, D hidden, N query heads, K key-value heads, H width of a head, R chosen rows of B * L.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.model import Architecture
from diffusionlm.models.layers import Linear, RMSNorm, rotate

Backend = Literal["auto", "eager", "sdpa"]
"""``eager``: two batched matrix products and a softmax. ``sdpa``: torch's fused kernels. ``auto``: `choose_backend`."""

EAGER_MAX_LENGTH = 512
"""Up to this length the eager lowering is the faster one for bf16 on a CPU (benchmarking/bench_attention.py)."""


def choose_backend(backend: Backend, q: Tensor) -> Literal["eager", "sdpa"]:
    """What ``auto`` means for queries [B, L, N, H]: eager for short bf16 sequences on a CPU, else SDPA."""
    if backend != "auto":
        return backend
    short = q.shape[1] <= EAGER_MAX_LENGTH
    return "eager" if q.device.type == "cpu" and q.dtype == torch.bfloat16 and short else "sdpa"


def attend(q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, mask: Tensor | None, backend: Backend = "auto") -> Tensor:
    """Softmax attention, scale 1 / sqrt(H).

    Args:
        q_BLNH: queries; k_BLKH, v_BLKH: keys and values, N a multiple of K.
        mask: boolean [B or 1, L, L], True where a query may see a key; None where all may.
        backend: which lowering computes it.

    Returns:
        [B, L, N, H]
    """
    if choose_backend(backend, q_BLNH) == "eager":
        return _attend_eager(q_BLNH, k_BLKH, v_BLKH, mask)
    out_BNLH = F.scaled_dot_product_attention(
        q_BLNH.transpose(1, 2),
        k_BLKH.transpose(1, 2),
        v_BLKH.transpose(1, 2),
        attn_mask=None if mask is None else mask[:, None],
        enable_gqa=q_BLNH.shape[2] != k_BLKH.shape[2],
    )
    return out_BNLH.transpose(1, 2)


def _attend_eager(q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, mask: Tensor | None) -> Tensor:
    B, L, N, H = q_BLNH.shape
    S, K = k_BLKH.shape[1:3]
    G = N // K
    # The G query heads of a group are stacked along the length, so that one product per group serves them all.
    q = (q_BLNH * H**-0.5).view(B, L, K, G, H).permute(0, 2, 3, 1, 4).reshape(B * K, G * L, H)
    k = k_BLKH.transpose(1, 2).reshape(B * K, S, H)
    v = v_BLKH.transpose(1, 2).reshape(B * K, S, H)
    scores = torch.bmm(q, k.transpose(1, 2))
    if mask is not None:
        # Added in place, as a bias: a product does not need its result for its gradient, nor does a sum.
        bias = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device).masked_fill_(~mask, float("-inf"))
        scores.view(B, K, G, L, S).add_(bias[:, None, None])
    out = torch.bmm(torch.softmax(scores, dim=-1).to(v.dtype), v)
    return out.view(B, K, G, L, H).permute(0, 3, 1, 2, 4).reshape(B, L, N, H)


class Attention(nn.Module):
    """Self-attention of one block, with optional norms on queries and keys and optional biases."""

    def __init__(self, config: Architecture) -> None:
        super().__init__()
        D, H = config.hidden_size, config.head_dim
        self.head_dim = H
        self.q_proj = Linear(D, config.num_attention_heads * H, bias=config.attention_bias)
        self.k_proj = Linear(D, config.num_key_value_heads * H, bias=config.attention_bias)
        self.v_proj = Linear(D, config.num_key_value_heads * H, bias=config.attention_bias)
        self.o_proj = Linear(config.num_attention_heads * H, D)
        self.q_norm = RMSNorm(H, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(H, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self,
        x_BLD: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor | None,
        *,
        rows: Tensor | None = None,
        backend: Backend = "auto",
    ) -> Tensor:
        """Attention output [B, L, D], or [R, D] of the flat ``rows`` alone; keys and values are those of all."""
        B, L, _ = x_BLD.shape
        k = rotate(self.k_norm(self.k_proj(x_BLD).unflatten(-1, (-1, self.head_dim))), rope)
        v = self.v_proj(x_BLD).unflatten(-1, (-1, self.head_dim))
        if rows is None:
            q = rotate(self.q_norm(self.q_proj(x_BLD).unflatten(-1, (-1, self.head_dim))), rope)
            return self.o_proj(attend(q, k, v, mask, backend).flatten(2))  # type: ignore[no-any-return]
        q_RNH = self.q_norm(self.q_proj(x_BLD.flatten(0, 1)[rows]).unflatten(-1, (-1, self.head_dim)))
        q_RNH = rotate(q_RNH, (_rows_of(rope[0], rows, B), _rows_of(rope[1], rows, B)))
        # The other queries are zeros: rows differ in number from sequence to sequence, the lowerings want a rectangle.
        q = q_RNH.new_zeros(B * L, *q_RNH.shape[1:]).index_copy(0, rows, q_RNH).reshape(B, L, *q_RNH.shape[1:])
        out_RA = attend(q, k, v, mask, backend).flatten(2).flatten(0, 1)[rows]
        return self.o_proj(out_RA)  # type: ignore[no-any-return]


def _rows_of(table: Tensor, rows: Tensor, batch: int) -> Tensor:
    """Rows of a [B or 1, L, 1, H / 2] table, flat."""
    return table.expand(batch, *table.shape[1:]).flatten(0, 1)[rows]
