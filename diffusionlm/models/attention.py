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
"""``eager``: two batched matrix products and a softmax. ``sdpa``: torch's fused kernels. ``auto``: `choose_backend`."""
Backend = Literal["auto", "eager", "sdpa", "tiled", "flex"]
"""How a pattern is computed: with a dense mask (``eager``, ``sdpa``), or without the hidden keys (``tiled``, ``flex``).
``auto``: what is fastest for pattern, device, dtype and length (`lowering.py`)."""

EAGER_MAX_LENGTH = 512
"""Up to this length the eager lowering is the faster one for bf16 on a CPU (benchmarking/bench_attention.py)."""


@dataclass(frozen=True)
class Scoring:
    """How the product of a query and a key becomes their score."""

    scale: float | None = None
    """Factor of the product. None: 1 / sqrt(H)."""
    softcap: float | None = None
    """Then the score is ``c tanh(score / c)``, before anything is hidden or added (Gemma 2). None: as it is."""

    def check(self, backend: Backend) -> None:
        """Refuse what cannot cap.

        Raises:
            ValueError: a soft cap for a backend that has no place for it.
        """
        if self.softcap is not None and backend in ("sdpa", "tiled"):
            raise ValueError(
                f'attention backend "{backend}" cannot cap scores, and the model has attn_logit_softcapping = '
                f'{self.softcap}: use "auto", "eager" or "flex"'
            )


PLAIN = Scoring()
"""Scale 1 / sqrt(H), no cap."""


class Lowered(Protocol):
    """The attention of one pattern, ready for the layers of a forward."""

    def __call__(self, q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
        """Softmax attention, [B, Q, N, H]; the queries are those of the first Q positions."""


def choose_backend(backend: DenseBackend, q: Tensor, scoring: Scoring = PLAIN) -> Literal["eager", "sdpa"]:
    """What ``auto`` means for queries [B, L, N, H]: eager for soft caps and short bf16 sequences on a CPU, else SDPA.

    Raises:
        ValueError: SDPA is asked for, which cannot cap, and there is a soft cap.
    """
    scoring.check(backend)
    if scoring.softcap is not None:
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
    scoring: Scoring = PLAIN,
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
    if choose_backend(backend, q_BQNH, scoring) == "eager":
        return _attend_eager(q_BQNH, k_BSKH, v_BSKH, mask, scoring)
    out_BNQH = F.scaled_dot_product_attention(
        q_BQNH.transpose(1, 2),
        k_BSKH.transpose(1, 2),
        v_BSKH.transpose(1, 2),
        attn_mask=mask,
        scale=scoring.scale,
        enable_gqa=q_BQNH.shape[2] != k_BSKH.shape[2],
    )
    return out_BNQH.transpose(1, 2)


def _attend_eager(q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    B, Q, N, H = q_BQNH.shape
    S, K = k_BSKH.shape[1:3]
    G = N // K
    # The G query heads of a group are stacked along the length, so that one product per group serves them all.
    scale = H**-0.5 if scoring.scale is None else scoring.scale
    q = (q_BQNH * scale).view(B, Q, K, G, H).permute(0, 2, 3, 1, 4).reshape(B * K, G * Q, H)
    k = k_BSKH.transpose(1, 2).reshape(B * K, S, H)
    v = v_BSKH.transpose(1, 2).reshape(B * K, S, H)
    scores = torch.bmm(q, k.transpose(1, 2))
    if scoring.softcap is not None:
        scores = soft_cap(scores, scoring.softcap)
    if mask is not None:
        # Added in place, as a bias: neither a product nor a sum needs its result for its gradient.
        bias = additive(mask, scores.dtype) if mask.dtype == torch.bool else mask
        heads = (1, 1) if bias.shape[1] == 1 else (K, G)
        scores.view(B, K, G, Q, S).add_(bias.reshape(bias.shape[0], *heads, Q, S))
    out = torch.bmm(torch.softmax(scores, dim=-1).to(v.dtype), v)
    return out.view(B, K, G, Q, H).permute(0, 3, 1, 2, 4).reshape(B, Q, N, H)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
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
        self, x_BLD: Tensor, rope: tuple[Tensor, Tensor], attention: Lowered, *, rows: Tensor | None = None
    ) -> Tensor:
        """Attention output [B, L, D], or [R, D] of the flat ``rows`` alone; keys and values are those of all."""
        B, L, _ = x_BLD.shape
        k = rotate(self.k_norm(self.k_proj(x_BLD).unflatten(-1, (-1, self.head_dim))), rope)
        v = self.v_proj(x_BLD).unflatten(-1, (-1, self.head_dim))
        if rows is None:
            q = rotate(self.q_norm(self.q_proj(x_BLD).unflatten(-1, (-1, self.head_dim))), rope)
            return self.o_proj(attention(q, k, v).flatten(2))  # type: ignore[no-any-return]
        q_RNH = self.q_norm(self.q_proj(x_BLD.flatten(0, 1)[rows]).unflatten(-1, (-1, self.head_dim)))
        q_RNH = rotate(q_RNH, (_rows_of(rope[0], rows, B), _rows_of(rope[1], rows, B)))
        # The other queries are zeros: rows differ in number from sequence to sequence, the lowerings want a rectangle.
        Q = _queries_needed(rows, L)
        places = rows // L * Q + rows % L
        q = q_RNH.new_zeros(B * Q, *q_RNH.shape[1:]).index_copy(0, places, q_RNH).reshape(B, Q, *q_RNH.shape[1:])
        out_RA = attention(q, k, v).flatten(2).flatten(0, 1)[places]
        return self.o_proj(out_RA)  # type: ignore[no-any-return]


def _queries_needed(rows: Tensor, length: int) -> int:
    """How far into their sequence the rows reach, at least 1; without waiting for a device: there, the whole length."""
    if rows.device.type != "cpu":
        return length
    return int((rows % length).max()) + 1 if len(rows) else 1


def _rows_of(table: Tensor, rows: Tensor, batch: int) -> Tensor:
    """Rows of a [B or 1, L, 1, H / 2] table, flat."""
    return table.expand(batch, *table.shape[1:]).flatten(0, 1)[rows]
