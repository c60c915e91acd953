"""The attention module of a block, and the interface of the attention that it calls.

Shapes: B sequences, L positions, Q queries, S keys, D hidden, N query heads, K key-value heads, H width of a head, P
output positions out of B * L.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from config.model import Architecture
from config.training.runtime import AttentionBackend
from diffusionlm.models.dense_attention import AttentionScale
from diffusionlm.models.layers import Linear, RMSNorm, RotaryTables, normalize_and_rotate


class PreparedAttention:
    """Attention of one pattern and window, prepared for a forward and shared by its layers."""

    def __call__(self, q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, /) -> Tensor:
        """Softmax attention, [B, Q, N, H]; the queries are those of the first Q positions."""
        raise NotImplementedError

    def at_positions(self, q_PNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, output_positions: Tensor, /) -> Tensor:
        """Softmax attention at flat positions of B * S, [P, N, H]; other queries of the [B, Q] rectangle are zero.

        Q is the last output position of any sequence plus one on a CPU, and the full length on a GPU, where reading it
        would be a sync, and in a compiled graph.
        """
        B, L = k_BSKH.shape[:2]
        Q = L
        if output_positions.device.type == "cpu" and not torch.compiler.is_compiling():
            Q = int((output_positions % L).max()) + 1 if len(output_positions) else 1
        indices_P = output_positions // L * Q + output_positions % L
        q_TNH = q_PNH.new_zeros(B * Q, *q_PNH.shape[1:]).index_copy_(0, indices_P, q_PNH)
        return self(q_TNH.view(B, Q, *q_PNH.shape[1:]), k_BSKH, v_BSKH).flatten(0, 1)[indices_P]

    def traceable(self, q_BQNH: Tensor, /) -> PreparedAttention | None:
        """The same attention as tensors and constants only, which torch's compiler can trace. None: there is none.

        Args:
            q_BQNH: any tensor with the dtype, device, number and width of the queries.
        """
        return None


class PreparedBatch:
    """Sequences in one row, like a `VarlenBatch`, whose inputs are on the device already."""

    num_inputs: int
    """Inputs of all sequences; outputs are computed for all of them."""

    def prepare_attention(
        self, windows: Sequence[int | None], backend: AttentionBackend, scale_options: AttentionScale
    ) -> tuple[Sequence[PreparedAttention], Tensor]:
        """The attention of each layer, and the position of each input, [1, Q]."""
        raise NotImplementedError


class Attention(nn.Module):
    """Self-attention of one block, with optional norms of queries and keys and optional biases."""

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
        rope: RotaryTables,
        attention: PreparedAttention,
        *,
        output_positions: Tensor | None = None,
    ) -> Tensor:
        """Attention output [B, L, D], or [P, D] at ``output_positions``; keys and values are those of all positions."""
        B, k_rope, q_rope = len(x_BLD), rope[:2], rope[-2:]
        k = normalize_and_rotate(self.k_proj(x_BLD).unflatten(-1, (-1, self.head_dim)), self.k_norm, k_rope)
        v = self.v_proj(x_BLD).unflatten(-1, (-1, self.head_dim))
        if output_positions is None:
            q = normalize_and_rotate(self.q_proj(x_BLD).unflatten(-1, (-1, self.head_dim)), self.q_norm, q_rope)
            return self.o_proj(attention(q, k, v).flatten(2))  # type: ignore[no-any-return]
        q_PNH = self.q_proj(x_BLD.flatten(0, 1)[output_positions]).unflatten(-1, (-1, self.head_dim))
        # Tables are [B or 1, L, heads, H], equal for all heads.
        tables = (table[:, :, :1].expand(B, -1, -1, -1).flatten(0, 1) for table in q_rope)
        q_PNH = normalize_and_rotate(q_PNH, self.q_norm, tuple(table[output_positions] for table in tables))
        return self.o_proj(attention.at_positions(q_PNH, k, v, output_positions).flatten(1))  # type: ignore[no-any-return]
