"""Tiled attention: a tile of queries computes only the keys that at least one of them attends to. Runs on any device;
it is made for the CPU.

Dense attention computes all pairs and then hides some: three quarters of them in block diffusion. Here the keys of a
tile are one or two slices, taken from the pattern's intervals. Only the columns that some query of the tile does not
attend to get a bias of -inf. One autograd function holds all tiles: with a function per slice, autograd would allocate
a gradient of all keys each time.

Shapes: B sequences, Q queries, S keys, N query heads, K key-value heads, G = N / K query heads of a group, H width of a
head, Z = B * K, T queries of a tile, W keys of a tile, R ranges of keys of a query. The G queries of a position are
adjacent, so that a tile of positions is a slice of Q * G rows.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffusionlm.models.patterns import Intervals

TILE_LENGTH = 64
"""Approximate number of queries of a tile."""
BFLOAT16_TILE_LENGTH = 128
"""The same for bf16: its products are so fast that fewer, larger ones win, although they compute more hidden pairs."""
MAX_SAVED_BYTES = 64 << 20
"""Softmax probabilities up to this size are saved for the backward; larger ones are recomputed (about 10% slower)."""


@dataclass(frozen=True)
class Tile:
    """A slice of queries and the keys that they are multiplied with."""

    first: int
    end: int
    ranges: tuple[tuple[int, int], ...]
    """Slices of keys, (start, end); concatenated they are the columns of the tile."""
    biases: tuple[tuple[int, Tensor], ...]
    """Columns that some query does not attend to: first column, and 0 or -inf in [B or 1, T, columns]."""

    @property
    def width(self) -> int:
        return sum(end - start for start, end in self.ranges)

    @property
    def num_pairs(self) -> int:
        """Number of scores computed, for each head and sequence."""
        return (self.end - self.first) * self.width


def tile_density(tiles: Sequence[Tile], num_keys: int) -> float:
    """Share of all pairs of queries and keys that the tiles compute; 1 is dense."""
    return sum(tile.num_pairs for tile in tiles) / (tiles[-1].end * num_keys)


def build_tiles(intervals: Intervals, positions_per_token: int, dtype: torch.dtype) -> tuple[Tile, ...]:
    """Build the tiles of all queries, in order, with biases of ``dtype``.

    A tile ends where the intervals change (at the end of a block or a document), if that is near the target length:
    then fewer of its pairs are hidden. No tile spans the noisy and the clean half.
    """
    starts_BSR, ends_BSR = intervals
    length = starts_BSR.shape[1]
    is_nonempty_BSR = starts_BSR < ends_BSR
    lowest_SR = torch.where(is_nonempty_BSR, starts_BSR, torch.iinfo(starts_BSR.dtype).max).amin(dim=0)
    highest_SR = torch.where(is_nonempty_BSR, ends_BSR, 0).amax(dim=0)
    minima_2SR = torch.stack([lowest_SR, ends_BSR.amin(dim=0)])
    maxima_2SR = torch.stack([highest_SR, starts_BSR.amax(dim=0)])
    changes_BS = ((starts_BSR[:, 1:] != starts_BSR[:, :-1]) | (ends_BSR[:, 1:] != ends_BSR[:, :-1])).any(dim=-1)
    changes = (changes_BS.any(dim=0).nonzero().flatten() + 1).tolist()
    tiles = []
    target_length = BFLOAT16_TILE_LENGTH if dtype == torch.bfloat16 else TILE_LENGTH
    for first, end in _tile_bounds(changes, length, length // positions_per_token, target_length):
        low, full_high = minima_2SR[:, first:end].amin(dim=1).tolist()
        high, full_low = maxima_2SR[:, first:end].amax(dim=1).tolist()
        bounds = list(zip(low, high, full_low, full_high, strict=True))
        tiles.append(_build_tile(first, end, bounds, intervals, dtype))
    return tuple(tiles)


def _tile_bounds(changes: list[int], length: int, half_length: int, target_length: int) -> Iterator[tuple[int, int]]:
    """First query and end of each tile.

    A tile ends at the change nearest to the target length, if there is one between half and one and a half of it.
    """
    first = 0
    while first < length:
        end_of_half = first - first % half_length + half_length
        target = first + target_length
        candidates = slice(
            bisect_right(changes, target - target_length // 2), bisect_right(changes, target + target_length // 2)
        )
        nearest = min(changes[candidates], key=lambda change: abs(change - target), default=target)
        end = min(end_of_half, nearest)
        yield first, end
        first = end


def _build_tile(
    first: int, end: int, bounds: Sequence[tuple[int, int, int, int]], intervals: Intervals, dtype: torch.dtype
) -> Tile:
    """Build a tile.

    ``bounds`` has for each range: first and end of the keys that any query attends to, first and end of those that all
    queries attend to.
    """
    ranges, biases, column = [], [], 0
    for index, (low, high, full_low, full_high) in enumerate(bounds):
        if low >= high:
            continue
        starts_BT1, ends_BT1 = (tensor[:, first:end, index, None] for tensor in intervals)
        partial = [(low, full_low), (full_high, high)] if full_low < full_high else [(low, high)]
        for start, stop in partial:
            if start < stop:
                keys = torch.arange(start, stop, device=starts_BT1.device)
                is_hidden = (keys < starts_BT1) | (keys >= ends_BT1)
                bias = torch.zeros(is_hidden.shape, dtype=dtype, device=keys.device)
                biases.append((column + start - low, bias.masked_fill_(is_hidden, float("-inf"))))
        ranges.append((low, high))
        column += high - low
    return Tile(first, end, tuple(ranges), tuple(biases))


def attend_tiled(
    q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, tiles: tuple[Tile, ...], *, scale: float | None = None
) -> Tensor:
    """Softmax attention over the pairs in ``tiles``, for the first Q queries.

    Args:
        k_BSKH: keys; N is a multiple of K.
        tiles: result of `build_tiles`.
        scale: factor of the scores. None: 1 / sqrt(H).

    Returns:
        [B, Q, N, H]
    """
    B, Q, N, H = q_BQNH.shape
    S, K = k_BSKH.shape[1:3]
    scale = H**-0.5 if scale is None else scale
    q = (q_BQNH * scale).view(B, Q, K, N // K, H).transpose(1, 2).reshape(B * K, Q * (N // K), H)
    k, v = (tensor.transpose(1, 2).reshape(B * K, S, H) for tensor in (k_BSKH, v_BSKH))
    with torch.autocast(q.device.type, enabled=False):  # a product must have the dtype of its buffer
        out: Tensor = _TiledAttention.apply(q, k, v, tiles, (B, K, N // K))
    return out.view(B, K, Q, N // K, H).transpose(1, 2).reshape(B, Q, N, H)


class _TiledAttention(torch.autograd.Function):
    """Queries [Z, Q * G, H], scaled; keys and values [Z, S, H]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tile, ...], groups: tuple[int, ...]) -> Tensor:
        tiles = tuple(itertools.takewhile(lambda tile: tile.first * groups[-1] < q.shape[1], tiles))
        out = torch.empty_like(q)
        size = q.shape[0] * groups[-1] * q.element_size() * sum(tile.num_pairs for tile in tiles)
        saves_probabilities = any(ctx.needs_input_grad[:3]) and size <= MAX_SAVED_BYTES
        saved = []
        for tile in tiles:
            rows = _query_slice(tile, q, groups)
            probabilities = _compute_probabilities(tile, q[:, rows], _gather_keys(k, tile), groups)
            torch.bmm(probabilities, _gather_keys(v, tile), out=out[:, rows])
            if saves_probabilities:
                saved.append(probabilities)
        ctx.save_for_backward(q, k, v, *saved)
        ctx.tiles, ctx.groups = tiles, groups
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *saved = ctx.saved_tensors
        # Many tiles add to the gradient of a key: sums in bf16 would lose small terms.
        sum_dtype = torch.promote_types(q.dtype, torch.float32)
        grad_q = torch.empty_like(q)
        grad_k, grad_v = torch.zeros_like(k, dtype=sum_dtype), torch.zeros_like(v, dtype=sum_dtype)
        grad = grad.contiguous()
        for index, tile in enumerate(ctx.tiles):
            rows = _query_slice(tile, q, ctx.groups)
            keys = _gather_keys(k, tile)
            p = saved[index] if saved else _compute_probabilities(tile, q[:, rows], keys, ctx.groups)
            grad_p = torch.bmm(grad[:, rows], _gather_keys(v, tile).transpose(1, 2))
            grad_scores = torch.ops.aten._softmax_backward_data(grad_p, p, -1, p.dtype)
            torch.bmm(grad_scores, keys, out=grad_q[:, rows])
            column = 0
            for start, end in tile.ranges:
                columns = slice(column, column + end - start)
                _add_product(grad_k[:, start:end], grad_scores[:, :, columns].transpose(1, 2), q[:, rows])
                _add_product(grad_v[:, start:end], p[:, :, columns].transpose(1, 2), grad[:, rows])
                column = columns.stop
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


def _query_slice(tile: Tile, q: Tensor, groups: tuple[int, ...]) -> slice:
    return slice(tile.first * groups[-1], min(tile.end * groups[-1], q.shape[1]))


def _gather_keys(x_ZSH: Tensor, tile: Tile) -> Tensor:
    """Keys or values of a tile, [Z, W, H]."""
    slices = [x_ZSH[:, start:end] for start, end in tile.ranges]
    return slices[0] if len(slices) == 1 else torch.cat(slices, dim=1)


def _compute_probabilities(tile: Tile, q: Tensor, k: Tensor, groups: tuple[int, ...]) -> Tensor:
    """Softmax of the scores of one tile, [Z, T * G, W]."""
    scores = torch.bmm(q, k.transpose(1, 2))
    B, K, G = groups
    scores_BKTGW = scores.view(B, K, -1, G, scores.shape[-1])
    for column, bias in tile.biases:
        bias = bias[:, None, : scores_BKTGW.shape[2], None]
        scores_BKTGW[..., column : column + bias.shape[-1]].add_(bias)
    return torch.softmax(scores, dim=-1)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.baddbmm_(left, right)
    else:
        total.add_(torch.bmm(left, right))
