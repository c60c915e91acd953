"""From a pattern to its computation: which way is taken, and what is prepared once for all layers of a forward.

Shapes: B rows, Q queries, S keys, N query heads, K key-value heads, H width of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from diffusionlm.models.attention import PLAIN, Backend, Scoring, additive, attend, choose_backend
from diffusionlm.models.patterns import AttentionPattern, Intervals
from diffusionlm.models.tiled import Tile, attend_tiled, cut, density

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

TILED_MIN_LENGTH = 256
"""On the CPU, shorter sequences keep the dense mask (benchmarking/bench_attention.py)."""
BFLOAT16_TILED_MIN_LENGTH = 512
"""The same for bf16, where eager attention is fast for short ones."""
TILED_MAX_DENSITY = 0.75
"""On the CPU, a pattern whose tiles compute a larger share of all pairs keeps the dense mask."""
FLEX_MIN_LENGTH = 512
"""On a GPU, shorter sequences keep the dense mask: FlexAttention's tiles of 128 leave little to skip."""
FLEX_MIN_HEAD_DIM = 16
"""Narrower heads are refused by FlexAttention's kernels."""


def lower(
    pattern: AttentionPattern,
    length: int,
    device: torch.device | str,
    backend: Backend = "auto",
    window: int | None = None,
    scoring: Scoring = PLAIN,
) -> Lowering:
    """Prepare the attention of a pattern, once for all layers of a forward that have the same window.

    Args:
        pattern: who sees whom.
        length: positions of the whole sequence, all streams.
        device: where queries and keys will be.
        backend: which way it is computed. ``auto``: SDPA where all see all (on a CPU, eager for short bf16); else
            tiles on the CPU and FlexAttention on a GPU, where there is enough to skip; else a dense mask. With a soft
            cap: FlexAttention on a GPU for long sequences, else eager.
        window: keys must be less than this many positions away.
        scoring: scale and soft cap of the scores.

    Raises:
        ValueError: a length that does not fit the pattern, or a backend that cannot compute it or its soft cap.
    """
    scoring.check(backend)
    is_capped = scoring.softcap is not None
    if is_capped and backend == "auto" and (torch.device(device).type != "cuda" or length < FLEX_MIN_LENGTH):
        backend = "eager"
    needs_intervals = backend in ("tiled", "flex")
    window = None if window is None or window >= length // pattern.streams else window
    may_need_intervals = needs_intervals or (is_capped and backend == "auto")
    if pattern.is_unrestricted and window is None and not may_need_intervals:
        return Lowering(pattern, length, device, backend, window, None, scoring)
    intervals = None if backend in ("eager", "sdpa") else pattern.intervals(length, device, window)
    if intervals is None and needs_intervals:
        raise ValueError(
            f'attention backend "{backend}" cannot compute {type(pattern).__name__}, which may hide any pair: '
            'use "eager", "sdpa" or "auto"'
        )
    return Lowering(pattern, length, device, backend, window, intervals, scoring)


class Lowering:
    """Attention of one pattern, length and window on one device, made by `lower`.

    What depends on the dtype is made at the first call and kept for the other layers.
    """

    def __init__(
        self,
        pattern: AttentionPattern,
        length: int,
        device: torch.device | str,
        backend: Backend,
        window: int | None,
        intervals: Intervals | None,
        scoring: Scoring,
    ) -> None:
        self._pattern, self._length, self._device = pattern, length, device
        self._backend, self._window, self._intervals = backend, window, intervals
        self._scoring = scoring
        self._is_unrestricted = pattern.is_unrestricted and window is None
        self._mask = None if self._is_unrestricted or intervals is not None else pattern.dense(length, device, window)
        self._biases: dict[torch.dtype, Tensor] = {}
        self._tiles: dict[torch.dtype, tuple[Tile, ...]] = {}
        self._block_masks: dict[int, BlockMask] = {}

    def __call__(self, q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
        """Softmax attention, [B, Q, N, H]; the queries are those of the first Q positions."""
        backend, queries = self.choose(q_BQNH), q_BQNH.shape[1]
        if backend == "tiled":
            return attend_tiled(q_BQNH, k_BSKH, v_BSKH, self._tiles_of(q_BQNH.dtype), scale=self._scoring.scale)
        if backend == "flex":
            return self._attend_flex(q_BQNH, k_BSKH, v_BSKH)
        mask = self._dense_of(q_BQNH.dtype if backend == "eager" else None)
        mask = None if mask is None else mask[..., :queries, :]
        return attend(q_BQNH, k_BSKH, v_BSKH, mask, backend, self._scoring)

    def choose(self, q: Tensor) -> Literal["eager", "sdpa", "tiled", "flex"]:
        """What ``auto`` means for queries [B, Q, N, H]; another backend is itself."""
        if self._backend != "auto":
            return self._backend
        if self._intervals is None:
            return choose_backend("auto", q, self._scoring)
        if q.device.type == "cpu":
            is_bfloat16 = q.dtype == torch.bfloat16
            pays = self._length >= (BFLOAT16_TILED_MIN_LENGTH if is_bfloat16 else TILED_MIN_LENGTH)
            pays = pays and density(self._tiles_of(q.dtype), self._length) <= TILED_MAX_DENSITY
            return "tiled" if pays else choose_backend("auto", q)
        fits = q.device.type == "cuda" and q.dtype != torch.float64 and q.shape[-1] >= FLEX_MIN_HEAD_DIM
        if fits and self._length >= FLEX_MIN_LENGTH:
            return "flex"
        return "sdpa" if self._scoring.softcap is None else "eager"

    def _tiles_of(self, dtype: torch.dtype) -> tuple[Tile, ...]:
        if dtype not in self._tiles:
            assert self._intervals is not None
            self._tiles[dtype] = cut(self._intervals, self._pattern.streams, dtype)
        return self._tiles[dtype]

    def _attend_flex(self, q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
        from diffusionlm.models.flex import attend_flex, block_mask  # It loads torch's compiler: a second.

        queries = q_BQNH.shape[1]
        if queries not in self._block_masks:
            assert self._intervals is not None
            self._block_masks[queries] = block_mask(self._intervals, queries)
        return attend_flex(q_BQNH, k_BSKH, v_BSKH, self._block_masks[queries], self._scoring)

    def _dense_of(self, dtype: torch.dtype | None) -> Tensor | None:
        """The dense mask as it is, or as a bias of a dtype."""
        if self._is_unrestricted:
            return None
        if self._mask is None:
            self._mask = self._pattern.dense(self._length, self._device, self._window)
        if dtype is None or self._mask.dtype != torch.bool:
            return self._mask
        if dtype not in self._biases:
            self._biases[dtype] = additive(self._mask, dtype)
        return self._biases[dtype]
