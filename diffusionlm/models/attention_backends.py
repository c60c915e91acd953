"""From a pattern to its computation: which way is taken, and what is prepared once for all layers of a forward.

Shapes: B rows, Q queries, S keys, N query heads, K key-value heads, H width of a head, T places of a cached text, R
chosen rows of B * Q.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from diffusionlm.models.attention import (
    DEFAULT_SCALE,
    AttentionBackend,
    AttentionScale,
    DenseBackend,
    attend,
    attend_at_positions,
    attend_cached,
    mask_to_bias,
    select_dense_backend,
)
from diffusionlm.models.cache import CacheSlots, KeyValueCache
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, BlockCausal, Causal, Intervals
from diffusionlm.models.tiled import Tile, attend_tiled, build_tiles, tile_density

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


def prepare_attention(
    pattern: AttentionPattern,
    length: int,
    device: torch.device | str,
    backend: AttentionBackend = "auto",
    window: int | None = None,
    scale_options: AttentionScale = DEFAULT_SCALE,
) -> PatternAttention:
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
    scale_options.check_backend(backend)
    is_capped = scale_options.softcap is not None
    if is_capped and backend == "auto" and (torch.device(device).type != "cuda" or length < FLEX_MIN_LENGTH):
        backend = "eager"
    needs_intervals = backend in ("tiled", "flex")
    window = None if window is None or window >= length // pattern.positions_per_token else window
    may_need_intervals = needs_intervals or (is_capped and backend == "auto")
    if pattern.is_unrestricted and window is None and not may_need_intervals:
        return PatternAttention(pattern, length, device, backend, window, None, scale_options)
    intervals = None if backend in ("eager", "sdpa") else pattern.intervals(length, device, window)
    if intervals is None and needs_intervals:
        raise ValueError(
            f'attention backend "{backend}" cannot compute {type(pattern).__name__}, which may hide any pair: '
            'use "eager", "sdpa" or "auto"'
        )
    return PatternAttention(pattern, length, device, backend, window, intervals, scale_options)


class PatternAttention:
    """Attention of one pattern, length and window on one device, made by `lower`.

    What depends on the dtype is made at the first call and kept for the other layers.
    """

    def __init__(
        self,
        pattern: AttentionPattern,
        length: int,
        device: torch.device | str,
        backend: AttentionBackend,
        window: int | None,
        intervals: Intervals | None,
        scale_options: AttentionScale,
    ) -> None:
        self._pattern, self._length, self._device = pattern, length, device
        self._backend, self._window, self._intervals = backend, window, intervals
        self._scale_options = scale_options
        self._is_unrestricted = pattern.is_unrestricted and window is None
        self._mask = (
            None if self._is_unrestricted or intervals is not None else pattern.dense_mask(length, device, window)
        )
        self._biases: dict[torch.dtype, Tensor] = {}
        self._tiles: dict[torch.dtype, tuple[Tile, ...]] = {}
        self._block_masks: dict[int, BlockMask] = {}

    def __call__(self, q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
        """Softmax attention, [B, Q, N, H]; the queries are those of the first Q positions."""
        backend, queries = self.backend_for(q_BQNH), q_BQNH.shape[1]
        if backend == "tiled":
            return attend_tiled(q_BQNH, k_BSKH, v_BSKH, self._tiles_for(q_BQNH.dtype), scale=self._scale_options.scale)
        if backend == "flex":
            return self._attend_flex(q_BQNH, k_BSKH, v_BSKH)
        mask = self._dense_mask_for(q_BQNH.dtype if backend == "eager" else None)
        mask = None if mask is None else mask[..., :queries, :]
        return attend(q_BQNH, k_BSKH, v_BSKH, mask, backend, self._scale_options)

    def at_positions(self, q_PNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, output_positions: Tensor) -> Tensor:
        """The same for queries of flat ``rows`` of B * S alone, [R, N, H]."""
        return attend_at_positions(self, q_PNH, k_BSKH, v_BSKH, output_positions)

    def backend_for(self, q: Tensor) -> Literal["eager", "sdpa", "tiled", "flex"]:
        """What ``auto`` means for queries [B, Q, N, H]; another backend is itself."""
        if self._backend != "auto":
            return self._backend
        if self._intervals is None:
            return select_dense_backend("auto", q, self._scale_options)
        if q.device.type == "cpu":
            is_bfloat16 = q.dtype == torch.bfloat16
            pays = self._length >= (BFLOAT16_TILED_MIN_LENGTH if is_bfloat16 else TILED_MIN_LENGTH)
            pays = pays and tile_density(self._tiles_for(q.dtype), self._length) <= TILED_MAX_DENSITY
            return "tiled" if pays else select_dense_backend("auto", q)
        fits = q.device.type == "cuda" and q.dtype != torch.float64 and q.shape[-1] >= FLEX_MIN_HEAD_DIM
        if fits and self._length >= FLEX_MIN_LENGTH:
            return "flex"
        return "sdpa" if self._scale_options.softcap is None else "eager"

    def _tiles_for(self, dtype: torch.dtype) -> tuple[Tile, ...]:
        if dtype not in self._tiles:
            assert self._intervals is not None
            self._tiles[dtype] = build_tiles(self._intervals, self._pattern.positions_per_token, dtype)
        return self._tiles[dtype]

    def _attend_flex(self, q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
        from diffusionlm.models.flex import attend_flex, build_block_mask  # It loads torch's compiler: a second.

        queries = q_BQNH.shape[1]
        if queries not in self._block_masks:
            assert self._intervals is not None
            self._block_masks[queries] = build_block_mask(self._intervals, queries)
        return attend_flex(q_BQNH, k_BSKH, v_BSKH, self._block_masks[queries], self._scale_options)

    def _dense_mask_for(self, dtype: torch.dtype | None) -> Tensor | None:
        """The dense mask as it is, or as a bias of a dtype."""
        if self._is_unrestricted:
            return None
        if self._mask is None:
            self._mask = self._pattern.dense_mask(self._length, self._device, self._window)
        if dtype is None or self._mask.dtype != torch.bool:
            return self._mask
        if dtype not in self._biases:
            self._biases[dtype] = mask_to_bias(self._mask, dtype)
        return self._biases[dtype]


def prepare_cached_attention(
    pattern: AttentionPattern,
    slots: CacheSlots,
    windows: Sequence[int | None],
    device: torch.device | str,
    backend: AttentionBackend = "auto",
    scale_options: AttentionScale = DEFAULT_SCALE,
) -> tuple[list[CachedAttention], Tensor]:
    """Prepare the attention of a forward with a cache: one lowering for each layer's window.

    Returns:
        The lowerings, and the positions of the inputs for the rotary embedding, [B or 1, Q], on the device.

    Raises:
        ValueError: a pattern that is not said by place alone, or a backend without a cached form, or that cannot cap.
    """
    scale_options.check_backend(backend)
    if backend not in ("auto", "eager", "sdpa"):
        raise ValueError(f'attention backend "{backend}" has no form for a cache: use "auto", "eager" or "sdpa"')
    if not isinstance(pattern, Bidirectional | Causal | BlockCausal) or pattern.documents_BL is not None:
        raise ValueError(
            f"{type(pattern).__name__}{'' if pattern.documents_BL is None else ' with documents'} cannot be used with "
            "a cache, only Bidirectional, Causal and BlockCausal without documents: a text of the cache is one document"
        )
    indices = _CacheIndices(pattern, slots, device)
    sights = {window: _CacheMask(indices, window) for window in dict.fromkeys(windows)}
    lowerings = [
        CachedAttention(slots.cache, layer, sights[window], backend, scale_options)
        for layer, window in enumerate(windows)
    ]
    return lowerings, indices.rope_positions_BQ


class _CacheIndices:
    """Where the inputs of a cached forward are written and how far they see; decided on the host, without a wait."""

    def __init__(
        self, pattern: Bidirectional | Causal | BlockCausal, slots: CacheSlots, device: torch.device | str
    ) -> None:
        positions_BQ, is_padding_BQ = slots.positions_BQ, slots.positions_BQ < 0
        rope_positions_BQ = positions_BQ.clamp(min=0)
        self.num_keys = max(1, int(slots.num_visible_B.max()))
        """S: no query sees keys from here on."""
        key_limits_BQ = torch.minimum(pattern.key_limit(rope_positions_BQ), slots.num_visible_B[:, None])
        # Padding sees what there is: a softmax over nothing would be nan.
        key_limits_BQ.masked_fill_(is_padding_BQ, self.num_keys)
        self.hides_keys = bool((key_limits_BQ < self.num_keys).any())
        first, Q = int(positions_BQ[0, 0]), positions_BQ.shape[1]
        is_run = bool((positions_BQ == torch.arange(first, first + Q)).all()) and first >= 0
        self.write_slice = slice(first, first + Q) if is_run else None
        """The places of every text's inputs, if they are the same without a gap."""
        self.min_position, self.max_position = int(rope_positions_BQ.min()), int(rope_positions_BQ.max())
        write_positions_BQ = positions_BQ.masked_fill(is_padding_BQ, slots.cache.length)
        packed = torch.stack([rope_positions_BQ, write_positions_BQ, key_limits_BQ])
        if torch.device(device).type == "cuda":
            packed = packed.pin_memory()  # Otherwise the copy may wait for the device.
        rope_positions_BQ, self.write_positions_BQ, self.key_limits_BQ = packed.to(device, non_blocking=True).unbind()
        self.sequence_index_B1 = torch.arange(len(rope_positions_BQ), device=device)[:, None]
        self.rope_positions_BQ = rope_positions_BQ[:1] if is_run else rope_positions_BQ
        """[1, Q] where all texts have the same."""

    def mask(self, window: int | None) -> Tensor | None:
        """Boolean [B or 1, Q, S]: True where a query sees a key. None: everywhere."""
        if window is not None and self.max_position < window and self.num_keys - self.min_position <= window:
            window = None
        if window is None and not self.hides_keys:
            return None
        keys_S = torch.arange(self.num_keys, device=self.key_limits_BQ.device)
        mask_BQS = keys_S < self.key_limits_BQ[..., None]
        return mask_BQS if window is None else mask_BQS & ((self.rope_positions_BQ[..., None] - keys_S).abs() < window)


class _CacheMask:
    """Who sees whom in the layers of one window, as a bias that is made at the first call for the others."""

    def __init__(self, indices: _CacheIndices, window: int | None) -> None:
        self.indices = indices
        self._mask_BQS = indices.mask(window)
        self._bias: Tensor | None = None

    def bias(self, q_BQNH: Tensor, groups: int, output_positions: Tensor | None = None) -> Tensor | None:
        """[B, 1, N / K * Q, S] in the queries' dtype, for `attend_cached`. None: all see all.

        Queries are those of the first Q inputs, or of ``rows`` of a single text.
        """
        if self._mask_BQS is None:
            return None
        if output_positions is not None:
            return _build_grouped_bias(self._mask_BQS.index_select(1, output_positions), q_BQNH, groups)
        if q_BQNH.shape[1] < self._mask_BQS.shape[1]:
            return _build_grouped_bias(self._mask_BQS[:, : q_BQNH.shape[1]], q_BQNH, groups)
        if self._bias is None:
            self._bias = _build_grouped_bias(self._mask_BQS, q_BQNH, groups)
        return self._bias


def _build_grouped_bias(mask_BQS: Tensor, q_BQNH: Tensor, groups: int) -> Tensor:
    B, Q, S = mask_BQS.shape
    G, wide = q_BQNH.shape[2] // groups, -(-S // 8) * 8
    # Rows of a multiple of 8 keys, or SDPA would copy the bias in each layer on a GPU.
    bias = q_BQNH.new_zeros(B, G, Q, wide)
    bias[..., :S].masked_fill_(~mask_BQS[:, None], float("-inf"))
    return bias.view(B, 1, G * Q, wide)[..., :S]


class CachedAttention:
    """Attention of one layer and forward over the keys and values of a cache, made by `prepare_cached_attention`."""

    def __init__(
        self,
        cache: KeyValueCache,
        layer: int,
        cache_mask: _CacheMask,
        backend: DenseBackend,
        scale_options: AttentionScale,
    ) -> None:
        self._keys_BKTH, self._values_BKTH = cache.keys_BKTH[layer], cache.values_BKTH[layer]
        self._cache_mask, self._backend, self._scale_options = cache_mask, backend, scale_options

    def __call__(self, q_BQNH: Tensor, k_BQKH: Tensor, v_BQKH: Tensor) -> Tensor:
        """Write the inputs' keys and values; softmax attention over all that are seen, [B, Q, N, H]."""
        keys_BKSH, values_BKSH = self._write(k_BQKH, v_BQKH)
        bias = self._cache_mask.bias(q_BQNH, keys_BKSH.shape[1])
        return attend_cached(q_BQNH, keys_BKSH, values_BKSH, bias, self._backend, self._scale_options)

    def at_positions(self, q_PNH: Tensor, k_BQKH: Tensor, v_BQKH: Tensor, output_positions: Tensor) -> Tensor:
        """The same for queries of flat ``rows`` of B * Q alone, [R, N, H]."""
        if len(k_BQKH) > 1:
            return attend_at_positions(self, q_PNH, k_BQKH, v_BQKH, output_positions)
        keys_BKSH, values_BKSH = self._write(k_BQKH, v_BQKH)
        q_1PNH = q_PNH[None]
        bias = self._cache_mask.bias(q_1PNH, keys_BKSH.shape[1], output_positions)
        return attend_cached(q_1PNH, keys_BKSH, values_BKSH, bias, self._backend, self._scale_options)[0]

    def _write(self, k_BQKH: Tensor, v_BQKH: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values that are seen, [B, K, S, H], the inputs' among them."""
        indices = self._cache_mask.indices
        if k_BQKH.dtype != self._keys_BKTH.dtype:
            raise ValueError(f"the cache is {self._keys_BKTH.dtype}, the model's keys are {k_BQKH.dtype}: make it so")
        for stored_BKTH, new_BQKH in ((self._keys_BKTH, k_BQKH), (self._values_BKTH, v_BQKH)):
            if indices.write_slice is not None:
                stored_BKTH[:, :, indices.write_slice] = new_BQKH.transpose(1, 2)
            else:
                stored_BKTH.transpose(1, 2)[indices.sequence_index_B1, indices.write_positions_BQ] = new_BQKH
        return self._keys_BKTH[:, :, : indices.num_keys], self._values_BKTH[:, :, : indices.num_keys]
