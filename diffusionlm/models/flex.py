"""FlexAttention with a block mask in closed form.

torch's `create_block_mask` evaluates a mask at every pair of positions. Here the pattern's intervals decide
which tiles are empty, partial or full; memory is O(S + (S / 128)^2).

Shapes: B sequences, Q queries, S keys, N query heads, K key-value heads, H width of a head, R ranges of keys of a
query, I tiles of queries, J tiles of keys.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from diffusionlm.models.dense_attention import DEFAULT_SCALE, AttentionScale
from diffusionlm.models.patterns import Intervals
from profiling import triton_setup

BLOCK_SIZE = 128
"""Queries and keys of a tile: the default of FlexAttention's kernels."""

MAX_VERSIONS = 64
"""Versions of FlexAttention that a process may compile."""

HALF_PRECISION_OPTIONS = {
    64: {"fwd_num_warps": 8},
    256: {"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 32, "bwd_BLOCK_M2": 32, "bwd_BLOCK_N2": 32, "bwd_num_warps": 8},
}
"""Head width -> options of the kernels, where torch's default spills registers.

Width 64: the forward's tile of 128 queries and 128 keys is too much for 4 warps. Width 256: the backward holds the
gradients of a tile's keys and values, which are too much with 64 keys."""
HOPPER_OPTIONS = {
    128: {"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 128, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 32, "bwd_num_warps": 8},
}
"""The same for H100 and H200 alone, in half precision: torch's tile of the backward, with half the queries in a step.

No GPU has timed it. The estimate counts cycles of a multiprocessor in torch's step of 64 queries and 128 keys: the
four products are 8.4 MFLOP, 2,048 cycles at the peak of the tensor cores. They read 192 KB of shared memory, 256 KB
with half the queries, at 128 bytes a cycle: 1,536 or 2,048 cycles, so the products remain the limit. The 172 to 464
bytes that 256 threads spill with torch's options take 690 to 1,856 more cycles of the same memory if they are written
and read in each step, and none if they are not used in the loop. What comes from the L2 cache is the same, as the
keys of a tile are. Both run one program on a multiprocessor, of 256 threads with 255 registers. 116 KB of shared
memory is more than some other GPUs have."""
FLOAT32_OPTIONS = {
    64: {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32, "fwd_num_warps": 8},
    128: {"fwd_num_warps": 8, "bwd_num_warps": 8},
    256: {"fwd_num_warps": 8, "bwd_num_warps": 8},
}
"""The same for float32, whose products do not run on tensor cores and hold their factors in registers."""


def build_block_mask(intervals: Intervals, num_queries: int, num_keys: int) -> BlockMask:
    """Block mask of the first ``num_queries`` queries, with the same tiles as `create_block_mask`."""
    starts_BQR, ends_BQR = (tensor[:, :num_queries] for tensor in intervals)
    visible_BIJ = count_visible_by_tile(starts_BQR, ends_BQR, num_keys)
    is_full = visible_BIJ == BLOCK_SIZE * BLOCK_SIZE
    is_partial = (visible_BIJ > 0) & ~is_full
    return BlockMask.from_kv_blocks(
        *_list_tiles(is_partial),
        *_list_tiles(is_full),
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=_build_mask_mod(starts_BQR.int(), ends_BQR.int()),
        seq_lengths=(num_queries, num_keys),
    )


def count_visible_by_tile(starts_BQR: Tensor, ends_BQR: Tensor, length: int) -> Tensor:
    """Number of visible pairs of each tile, [B or 1, I, J].

    A range [start, end) has the keys before its end minus the keys before its start. The keys before x are x %
    BLOCK_SIZE keys of the tile of x, and all keys of the tiles before it.
    """
    B, Q, R = starts_BQR.shape
    num_tiles = -(-length // BLOCK_SIZE)
    edges = torch.cat([ends_BQR, starts_BQR], dim=-1).reshape(B, Q * 2 * R)
    signs = torch.ones(2 * R, dtype=torch.int64, device=edges.device)
    signs[R:] = -1
    signs = signs.repeat(Q).expand(B, -1)
    query_tiles = torch.arange(Q, device=edges.device).repeat_interleave(2 * R) // BLOCK_SIZE
    tile_indices = query_tiles * (num_tiles + 1) + edges // BLOCK_SIZE
    zeros = torch.zeros(B, -(-Q // BLOCK_SIZE) * (num_tiles + 1), dtype=torch.int64, device=edges.device)
    keys_in_tile = zeros.scatter_add(1, tile_indices, signs * (edges % BLOCK_SIZE)).view(B, -1, num_tiles + 1)
    edges_in_tile = zeros.scatter_add(1, tile_indices, signs).view(B, -1, num_tiles + 1)
    edges_from_tile = edges_in_tile.flip(-1).cumsum(-1).flip(-1)
    return keys_in_tile[..., :-1] + BLOCK_SIZE * edges_from_tile[..., 1:]


def _list_tiles(table_BIJ: Tensor) -> tuple[Tensor, Tensor]:
    """Number of key tiles of each query tile, [B, 1, I], and their indices, [B, 1, I, J], followed by the others."""
    table = table_BIJ[:, None].int()
    order = torch.argsort(table, dim=-1, descending=True, stable=True)
    return table.sum(dim=-1, dtype=torch.int32), order.int()


def _build_mask_mod(starts_BQR: Tensor, ends_BQR: Tensor) -> Any:
    """``mask_mod`` of FlexAttention: True where a query attends to a key."""
    # One tensor for each range: a kernel reads the bounds of neighboring queries at once.
    ranges = [
        (starts_BQ.contiguous(), ends_BQ.contiguous())
        for starts_BQ, ends_BQ in zip(starts_BQR.unbind(-1), ends_BQR.unbind(-1), strict=True)
    ]
    is_shared = starts_BQR.shape[0] == 1

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        batch = torch.zeros_like(batch) if is_shared else batch
        starts_BQ, ends_BQ = ranges[0]
        visible = (key >= starts_BQ[batch, query]) & (key < ends_BQ[batch, query])
        for starts_BQ, ends_BQ in ranges[1:]:
            visible = visible | ((key >= starts_BQ[batch, query]) & (key < ends_BQ[batch, query]))
        return visible

    return is_visible


@functools.cache
def _compiled_flex_attention() -> Any:
    # torch compiles eight versions of a function by default, and then runs the slow reference, which holds all scores.
    # Versions differ in the numbers of heads, ranges and sequences, width, dtype, soft cap and gradients.
    triton_setup.set_kernel_rounding()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_VERSIONS)
    return torch.compile(flex_attention)


def _build_score_mod(cap: float, q_BNQH: Tensor) -> Any:
    """``score_mod`` of FlexAttention: the soft cap.

    The cap is read from a tensor, by head: a number would be compiled in, and a second model with another cap in the
    same process would fail.
    """
    caps_N = q_BNQH.new_full(q_BNQH.shape[1:2], cap, dtype=torch.promote_types(q_BNQH.dtype, torch.float32))

    def apply_cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return caps_N[head] * torch.tanh(score / caps_N[head])

    return apply_cap


def attend_flex(
    q_BQNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    mask: BlockMask,
    scale_options: AttentionScale = DEFAULT_SCALE,
    *,
    is_on_hopper: bool = False,
) -> Tensor:
    """Softmax attention with a block mask: compiled on a GPU, the slow reference on a CPU.

    In a function that torch compiles it becomes a part of that function's graph.

    Args:
        is_on_hopper: kernels are those for H100 and H200: see `is_hopper`.

    Returns:
        [B, Q, N, H]

    Raises:
        ValueError: a tensor requires a gradient on a CPU, where FlexAttention has no backward.
    """
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BQNH, k_BSKH, v_BSKH))
    on_cpu = q.device.type == "cpu"
    if on_cpu:
        _check_backward(q, k, v)
        if not torch.is_grad_enabled():
            # A parameter still has requires_grad = True, which FlexAttention refuses.
            q, k, v = q.detach(), k.detach(), v.detach()
    attend = flex_attention if on_cpu or torch.compiler.is_compiling() else _compiled_flex_attention()
    out_BNQH: Tensor = attend(
        q,
        k,
        v,
        score_mod=None if scale_options.softcap is None else _build_score_mod(scale_options.softcap, q),
        block_mask=mask,
        scale=scale_options.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=_choose_kernel_options(q, is_on_hopper),
    )
    return out_BNQH.transpose(1, 2)


def _check_backward(*tensors: Tensor) -> None:
    """Raise if a backward is needed, which FlexAttention does not have on a CPU."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            'attention backend "flex" has no backward on the CPU: use "tiled" or "auto", or torch.no_grad() if no '
            "gradients are needed"
        )


def is_hopper(device: torch.device) -> bool:
    """True for H100 and H200, whose kernels have options of their own."""
    return (
        device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) == (9, 0)
    )


def _choose_kernel_options(q_BNQH: Tensor, is_on_hopper: bool) -> dict[str, int] | None:
    width = q_BNQH.shape[-1]
    if q_BNQH.dtype not in (torch.bfloat16, torch.float16):
        return FLOAT32_OPTIONS.get(width)
    return (HALF_PRECISION_OPTIONS | (HOPPER_OPTIONS if is_on_hopper else {})).get(width)
