"""FlexAttention with a block mask in closed form.

`create_block_mask` of torch evaluates a mask at every pair of positions. Here the table of tiles, empty, partial or
full, is counted from the pattern's intervals: memory is O(S + (S / 128)^2).

Shapes: B rows, Q queries, S keys, N query heads, K key-value heads, H width of a head, R ranges of keys that a query
sees, I tiles of queries, J tiles of keys.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from diffusionlm.models.dense_attention import DEFAULT_SCALE, AttentionScale
from diffusionlm.models.patterns import Intervals

BLOCK_SIZE = 128
"""Queries and keys of a tile of the table: what FlexAttention's kernels are made for."""


def build_block_mask(intervals: Intervals, queries: int) -> BlockMask:
    """The mask of the first ``queries`` positions; the same tiles as from `create_block_mask`."""
    starts_BQR, ends_BQR = (each[:, :queries] for each in intervals)
    length = intervals[0].shape[1]
    visible_BIJ = count_visible_by_tile(starts_BQR, ends_BQR, length)
    is_full = visible_BIJ == BLOCK_SIZE * BLOCK_SIZE
    is_partial = (visible_BIJ > 0) & ~is_full
    return BlockMask.from_kv_blocks(
        *_list_tiles(is_partial),
        *_list_tiles(is_full),
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=_build_mask_mod(starts_BQR.int(), ends_BQR.int()),
        seq_lengths=(queries, length),
    )


def count_visible_by_tile(starts_BQR: Tensor, ends_BQR: Tensor, length: int) -> Tensor:
    """Visible pairs of each tile, [B or 1, I, J].

    A range [start, end) covers what lies before its end less what lies before its start; what lies before x is x's
    tile up to x % TILE, and the tiles before that whole.
    """
    B, Q, R = starts_BQR.shape
    tiles = -(-length // BLOCK_SIZE)
    edges = torch.cat([ends_BQR, starts_BQR], dim=-1).reshape(B, Q * 2 * R)
    signs = torch.ones(2 * R, dtype=torch.int64, device=edges.device)
    signs[R:] = -1
    signs = signs.repeat(Q).expand(B, -1)
    rows = torch.arange(Q, device=edges.device).repeat_interleave(2 * R) // BLOCK_SIZE
    places = rows * (tiles + 1) + edges // BLOCK_SIZE
    empty = torch.zeros(B, -(-Q // BLOCK_SIZE) * (tiles + 1), dtype=torch.int64, device=edges.device)
    part = empty.scatter_add(1, places, signs * (edges % BLOCK_SIZE)).view(B, -1, tiles + 1)
    whole = empty.scatter_add(1, places, signs).view(B, -1, tiles + 1)
    after = whole.flip(-1).cumsum(-1).flip(-1)
    return part[..., :-1] + BLOCK_SIZE * after[..., 1:]


def _list_tiles(table_BIJ: Tensor) -> tuple[Tensor, Tensor]:
    """How many key tiles each query tile has, [B, 1, I], and which, [B, 1, I, J], these first."""
    table = table_BIJ[:, None].int()
    order = torch.argsort(table, dim=-1, descending=True, stable=True)
    return table.sum(dim=-1, dtype=torch.int32), order.int()


def _build_mask_mod(starts_BQR: Tensor, ends_BQR: Tensor) -> Any:
    """FlexAttention's question: may this query see this key?"""
    ranges = starts_BQR.shape[-1]
    is_shared = starts_BQR.shape[0] == 1

    def may_see(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = torch.zeros_like(row) if is_shared else row
        seen = (key >= starts_BQR[row, query, 0]) & (key < ends_BQR[row, query, 0])
        if ranges == 2:
            seen = seen | ((key >= starts_BQR[row, query, 1]) & (key < ends_BQR[row, query, 1]))
        return seen

    return may_see


@functools.cache
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention)


def _build_score_mod(cap: float, q_BNQH: Tensor) -> Any:
    """FlexAttention's change of a score.

    The cap is read from a tensor, by head: a number would be part of what is compiled, which a second model with
    another cap in the same process breaks.
    """
    caps_N = q_BNQH.new_full(q_BNQH.shape[1:2], cap, dtype=torch.promote_types(q_BNQH.dtype, torch.float32))

    def capped(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return caps_N[head] * torch.tanh(score / caps_N[head])

    return capped


def attend_flex(
    q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask: BlockMask, scale_options: AttentionScale = DEFAULT_SCALE
) -> Tensor:
    """Softmax attention: compiled, except on the CPU, where it is the slow reference.

    Returns:
        [B, Q, N, H]

    Raises:
        ValueError: gradients are wanted on the CPU, where FlexAttention has no backward.
    """
    q, k, v = (each.transpose(1, 2) for each in (q_BQNH, k_BSKH, v_BSKH))
    on_cpu = q.device.type == "cpu"
    if on_cpu and torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v)):
        raise ValueError(
            'attention backend "flex" has no backward on the CPU: use "tiled" or "auto", or torch.no_grad() if no '
            "gradients are needed"
        )
    if on_cpu:  # Parameters under no_grad still say that they want a gradient, and would be refused.
        q, k, v = q.detach(), k.detach(), v.detach()
    attend = flex_attention if on_cpu else _compiled_flex_attention()
    out_BNQH: Tensor = attend(
        q,
        k,
        v,
        score_mod=None if scale_options.softcap is None else _build_score_mod(scale_options.softcap, q),
        block_mask=mask,
        scale=scale_options.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out_BNQH.transpose(1, 2)
