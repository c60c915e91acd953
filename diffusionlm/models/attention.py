"""Grouped-query attention on a given mask, and the module around it. `lowering.py` chooses how a pattern is computed.

Shapes: B rows, L positions, Q queries and S keys of them, D hidden, N query heads, K key-value heads, H width of a
head, R chosen rows of B * L.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.model import Architecture
from diffusionlm.models.layers import Linear, RMSNorm, rotate, soft_cap

DenseBackend = Literal["auto", "eager", "sdpa"]
"""``eager``: two batched matrix products and a softmax. ``sdpa``: torch's fused kernels. ``auto``: `select_dense_backend`."""
AttentionBackend = Literal["auto", "eager", "sdpa", "tiled", "flex"]
"""How a pattern is computed: with a dense mask (``eager``, ``sdpa``), or without the hidden keys (``tiled``, ``flex``).
``auto``: what is fastest for pattern, device, dtype and length (`lowering.py`)."""

EAGER_MAX_LENGTH = 512
"""Up to this length the eager lowering is the faster one for bf16 on a CPU (benchmarking/bench_attention.py)."""


@dataclass(frozen=True)
class AttentionScale:
    """How the product of a query and a key becomes their score."""

    scale: float | None = None
    """Factor of the product. None: 1 / sqrt(H)."""
    softcap: float | None = None
    """Then the score is ``c tanh(score / c)``, before anything is hidden or added (Gemma 2). None: as it is."""

    def check_backend(self, backend: AttentionBackend) -> None:
        """Refuse what cannot cap.

        Raises:
            ValueError: a soft cap for a backend that has no place for it.
        """
        if self.softcap is not None and backend in ("sdpa", "tiled"):
            raise ValueError(
                f'attention backend "{backend}" cannot cap scores, and the model has attn_logit_softcapping = '
                f'{self.softcap}: use "auto", "eager" or "flex"'
            )


DEFAULT_SCALE = AttentionScale()
"""Scale 1 / sqrt(H), no cap."""


class PreparedAttention(Protocol):
    """The attention of one pattern, ready for the layers of a forward."""

    def __call__(self, q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, /) -> Tensor:
        """Softmax attention, [B, Q, N, H]; the queries are those of the first Q positions."""

    def at_positions(self, q_PNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, output_positions: Tensor, /) -> Tensor:
        """The same for queries of flat ``rows`` of B * S alone, [R, N, H]."""


def select_dense_backend(
    backend: DenseBackend, q: Tensor, scale_options: AttentionScale = DEFAULT_SCALE
) -> Literal["eager", "sdpa"]:
    """What ``auto`` means for queries [B, L, N, H]: eager for soft caps and short bf16 sequences on a CPU, else SDPA.

    Raises:
        ValueError: SDPA is asked for, which cannot cap, and there is a soft cap.
    """
    scale_options.check_backend(backend)
    if scale_options.softcap is not None:
        return "eager"
    if backend != "auto":
        return backend
    short = q.shape[1] <= EAGER_MAX_LENGTH
    return "eager" if q.device.type == "cpu" and q.dtype == torch.bfloat16 and short else "sdpa"


def attend(
    q_BQNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    mask: Tensor | None,
    backend: DenseBackend = "auto",
    scale_options: AttentionScale = DEFAULT_SCALE,
) -> Tensor:
    """Softmax attention.

    Args:
        q_BQNH: queries; k_BSKH, v_BSKH: keys and values, N a multiple of K.
        mask: [B or 1, Q, S] or [B or 1, N or 1, Q, S]. Boolean: True where a query may see a key. Float: added to the
            scores. None: all may see all.
        backend: which lowering computes it.
        scoring: scale and soft cap of the scores.

    Returns:
        [B, Q, N, H]

    Raises:
        ValueError: SDPA is asked for, which cannot cap, and there is a soft cap.
    """
    if mask is not None:
        mask = mask[:, None] if mask.dim() == 3 else mask
        mask = mask if mask.dtype == torch.bool else mask.to(q_BQNH.dtype)
    if select_dense_backend(backend, q_BQNH, scale_options) == "eager":
        return _attend_eager(q_BQNH, k_BSKH, v_BSKH, mask, scale_options)
    out_BNQH = F.scaled_dot_product_attention(
        q_BQNH.transpose(1, 2),
        k_BSKH.transpose(1, 2),
        v_BSKH.transpose(1, 2),
        attn_mask=mask,
        scale=scale_options.scale,
        enable_gqa=q_BQNH.shape[2] != k_BSKH.shape[2],
    )
    return out_BNQH.transpose(1, 2)


def attend_cached(
    q_BQNH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    bias: Tensor | None,
    backend: DenseBackend,
    scale_options: AttentionScale,
) -> Tensor:
    """`attend` without gradient for keys and values as a cache has them, a head's side by side.

    Args:
        q_BQNH: queries; k_BKSH, v_BKSH: keys and values, N a multiple of K.
        bias: [B or 1, 1, N / K * Q, S], added to the scores: once for each query head of a group. None: all may see
            all.
        backend: which lowering computes it.
        scoring: scale and soft cap of the scores.

    Returns:
        [B, Q, N, H]
    """
    Q, N = q_BQNH.shape[1:3]
    K, S = k_BKSH.shape[1:3]
    if not Q:
        return q_BQNH
    q = _stack_groups(q_BQNH, K)
    if select_cached_backend(backend, q, scale_options) == "eager":
        bias = None if bias is None else bias.view(-1, 1, N // K, Q, S)
        out = _attend_groups(q, k_BKSH, v_BKSH, bias, scale_options)
    else:
        out = F.scaled_dot_product_attention(q, k_BKSH, v_BKSH, attn_mask=bias, scale=scale_options.scale)
    return _unstack_groups(out, N)


def select_cached_backend(
    backend: DenseBackend, q_BKUH: Tensor, scale_options: AttentionScale
) -> Literal["eager", "sdpa"]:
    """What ``auto`` means for decoding, with U queries of each key-value head.

    Measured with 8 query and 4 key-value heads of width 64, 1 to 64 queries and up to 4096 keys on one core: SDPA with
    the query heads of a group stacked is faster than with ``enable_gqa`` (up to 1.4 times in fp32, 7 in bf16) and not
    slower than products for each group, but for bf16 with many queries (half the speed) or a single one.

    Raises:
        ValueError: SDPA is asked for, which cannot cap, and there is a soft cap.
    """
    scale_options.check_backend(backend)
    if scale_options.softcap is not None:
        return "eager"
    if backend != "auto":
        return backend
    is_eager = q_BKUH.shape[2] == 1 or 32 <= q_BKUH.shape[2] <= EAGER_MAX_LENGTH
    return "eager" if q_BKUH.device.type == "cpu" and q_BKUH.dtype == torch.bfloat16 and is_eager else "sdpa"


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
    """Two products for each key-value head, whose U queries are those of its group, stacked: [B, K, U, H]."""
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
    """[B, K, N / K * Q, H]: the query heads that share keys are stacked, so that one product serves them all."""
    B, Q, N, H = q_BQNH.shape
    return q_BQNH.view(B, Q, groups, N // groups, H).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _unstack_groups(out_BKUH: Tensor, heads: int) -> Tensor:
    """[B, Q, N, H] again."""
    B, K, U, H = out_BKUH.shape
    return out_BKUH.view(B, K, heads // K, U * K // heads, H).permute(0, 3, 1, 2, 4).flatten(2, 3)


def mask_to_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Bias of a boolean mask: 0 where True, -inf where False."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


class Attention(nn.Module):
    """Self-attention of one block, with optional norms on queries and keys and optional biases."""

    def __init__(self, config: Architecture) -> None:
        super().__init__()
        D, H = config.hidden_size, config.head_dim
        self.head_dim = H
        self.q_proj = Linear(D, config.num_attention_heads * H, bias=config.attention_bias)
        self.k_proj = Linear(D, config.num_key_value_heads * H, bias=config.attention_bias)
        self.v_proj = Linear(D, config.num_key_value_heads * H, bias=config.attention_bias)
        self.o_proj = Linear(config.num_attention_heads * H, D, bias=config.attention_output_bias)
        eps, offset = config.rms_norm_eps, config.norm_offset
        self.q_norm = RMSNorm(H, eps, offset=offset) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(H, eps, offset=offset) if config.qk_norm else nn.Identity()

    def forward(
        self,
        x_BLD: Tensor,
        rope: tuple[Tensor, Tensor],
        attention: PreparedAttention,
        *,
        output_positions: Tensor | None = None,
    ) -> Tensor:
        """Attention output [B, L, D], or [R, D] of the flat ``rows`` alone; keys and values are those of all."""
        B = len(x_BLD)
        k = rotate(self.k_norm(self.k_proj(x_BLD).unflatten(-1, (-1, self.head_dim))), rope)
        v = self.v_proj(x_BLD).unflatten(-1, (-1, self.head_dim))
        if output_positions is None:
            q = rotate(self.q_norm(self.q_proj(x_BLD).unflatten(-1, (-1, self.head_dim))), rope)
            return self.o_proj(attention(q, k, v).flatten(2))  # type: ignore[no-any-return]
        q_PNH = self.q_norm(self.q_proj(x_BLD.flatten(0, 1)[output_positions]).unflatten(-1, (-1, self.head_dim)))
        q_PNH = rotate(
            q_PNH, (_gather_positions(rope[0], output_positions, B), _gather_positions(rope[1], output_positions, B))
        )
        return self.o_proj(attention.at_positions(q_PNH, k, v, output_positions).flatten(1))  # type: ignore[no-any-return]


def attend_at_positions(
    attention: PreparedAttention, q_PNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, output_positions: Tensor
) -> Tensor:
    """Attention of flat ``rows`` alone, [R, N, H], by a lowering that wants a rectangle of queries.

    The others are zeros: rows differ in number from sequence to sequence.
    """
    B, L = k_BSKH.shape[:2]
    Q = _num_queries_needed(output_positions, L)
    places = output_positions // L * Q + output_positions % L
    q = q_PNH.new_zeros(B * Q, *q_PNH.shape[1:]).index_copy(0, places, q_PNH).reshape(B, Q, *q_PNH.shape[1:])
    return attention(q, k_BSKH, v_BSKH).flatten(0, 1)[places]


def _num_queries_needed(output_positions: Tensor, length: int) -> int:
    """How far into their sequence the rows reach, at least 1; without waiting for a device: there, the whole length."""
    if output_positions.device.type != "cpu":
        return length
    return int((output_positions % length).max()) + 1 if len(output_positions) else 1


def _gather_positions(table: Tensor, output_positions: Tensor, batch: int) -> Tensor:
    """Rows of a [B or 1, L, heads, H] table of equal heads, flat, for one of them."""
    return table[:, :, :1].expand(batch, -1, -1, -1).flatten(0, 1)[output_positions]
