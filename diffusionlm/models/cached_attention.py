"""Attention of a forward with a key-value cache.

Shapes: B sequences, Q inputs of a forward, S visible keys, N query heads, K key-value heads, H width of a head, T
positions of a cache, P output positions out of B * Q.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from config.runtime import AttentionBackend
from diffusionlm.models.attention import PreparedAttention, attend_at_positions
from diffusionlm.models.attention_backends import select_cached_backend
from diffusionlm.models.cache import CacheSlots, KeyValueCache
from diffusionlm.models.dense_attention import DEFAULT_SCALE, AttentionScale, attend_cached
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, BlockCausal, Causal


def prepare_cached_attention(
    pattern: AttentionPattern,
    slots: CacheSlots,
    windows: Sequence[int | None],
    device: torch.device | str,
    backend: AttentionBackend = "auto",
    scale_options: AttentionScale = DEFAULT_SCALE,
) -> tuple[list[CachedAttention], Tensor]:
    """Prepare the attention of each layer of a forward with a cache.

    Args:
        slots: positions of the inputs in the cache.
        windows: sliding window of each layer. None: no limit.
        device: device of the model.
        backend: ``auto``: see `select_cached_backend`.

    Returns:
        The attention of each layer, and the positions of the inputs for the rotary embedding, [B or 1, Q], on the
        device.

    Raises:
        ValueError: the pattern depends on more than positions, or the backend has no cached form or no soft cap.
    """
    scale_options.check_backend(backend)
    if backend not in ("auto", "eager", "sdpa"):
        raise ValueError(
            f'attention_backend = "{backend}" has no cached form: use "auto", "eager" or "sdpa", or '
            'generation.cache = "none"'
        )
    if not isinstance(pattern, Bidirectional | Causal | BlockCausal) or pattern.documents_BL is not None:
        raise ValueError(
            f"{type(pattern).__name__}{'' if pattern.documents_BL is None else ' with documents'} cannot be used with "
            "a cache: a cached sequence is one document; use Bidirectional, Causal or BlockCausal without documents"
        )
    indices = _CacheIndices(pattern, slots, device)
    masks = {window: _CacheMask(indices, window) for window in dict.fromkeys(windows)}
    attentions = [
        CachedAttention(slots.cache, layer, masks[window], backend, scale_options)
        for layer, window in enumerate(windows)
    ]
    return attentions, indices.rope_positions_BQ


class _CacheIndices:
    """Write indices and key limits of the inputs of a cached forward, computed on the host without a device sync."""

    def __init__(
        self, pattern: Bidirectional | Causal | BlockCausal, slots: CacheSlots, device: torch.device | str
    ) -> None:
        positions_BQ, is_padding_BQ = slots.positions_BQ, slots.positions_BQ < 0
        rope_positions_BQ = positions_BQ.clamp(min=0)
        self.num_keys = max(1, int(slots.num_visible_B.max()))
        """S: no query attends to keys from here on."""
        key_limits_BQ = torch.minimum(pattern.key_limit(rope_positions_BQ), slots.num_visible_B[:, None])
        # Padding attends to all keys: a softmax over nothing is NaN.
        key_limits_BQ.masked_fill_(is_padding_BQ, self.num_keys)
        self.hides_keys = bool((key_limits_BQ < self.num_keys).any())
        first, Q = int(positions_BQ[0, 0]), positions_BQ.shape[1]
        is_slice = bool((positions_BQ == torch.arange(first, first + Q)).all()) and first >= 0
        self.write_slice = slice(first, first + Q) if is_slice else None
        """Positions of the inputs, if all sequences have the same contiguous ones."""
        self.min_position, self.max_position = int(rope_positions_BQ.min()), int(rope_positions_BQ.max())
        # Padding writes to the extra slot behind the last position.
        write_positions_BQ = positions_BQ.masked_fill(is_padding_BQ, slots.cache.max_length)
        packed = torch.stack([rope_positions_BQ, write_positions_BQ, key_limits_BQ])
        if torch.device(device).type == "cuda":
            packed = packed.pin_memory()  # a copy of pageable memory may wait for the device
        rope_positions_BQ, self.write_positions_BQ, self.key_limits_BQ = packed.to(device, non_blocking=True).unbind()
        self.sequence_index_B1 = torch.arange(len(rope_positions_BQ), device=device)[:, None]
        self.rope_positions_BQ = rope_positions_BQ[:1] if is_slice else rope_positions_BQ
        """[1, Q] if all sequences have the same positions."""

    def mask(self, window: int | None) -> Tensor | None:
        """Boolean mask [B or 1, Q, S]: True where a query attends to a key. None: no mask is needed."""
        if window is not None and self.max_position < window and self.num_keys - self.min_position <= window:
            window = None
        if window is None and not self.hides_keys:
            return None
        keys_S = torch.arange(self.num_keys, device=self.key_limits_BQ.device)
        mask_BQS = keys_S < self.key_limits_BQ[..., None]
        return mask_BQS if window is None else mask_BQS & ((self.rope_positions_BQ[..., None] - keys_S).abs() < window)


class _CacheMask:
    """Mask of the layers with one window; its bias is built at the first call and shared."""

    def __init__(self, indices: _CacheIndices, window: int | None) -> None:
        self.indices = indices
        self._mask_BQS = indices.mask(window)
        self._bias: Tensor | None = None

    def bias(self, q_BQNH: Tensor, groups: int, output_positions: Tensor | None = None) -> Tensor | None:
        """Bias [B, 1, N / K * Q, S] in the dtype of the queries, for `attend_cached`. None: no mask is needed.

        The queries are those of the first Q inputs, or those at ``output_positions`` of a single sequence.
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
    G = q_BQNH.shape[2] // groups
    # SDPA on a GPU copies the bias in each layer unless its rows are a multiple of 8 keys.
    padded = -(-S // 8) * 8
    bias = q_BQNH.new_zeros(B, G, Q, padded)
    bias[..., :S].masked_fill_(~mask_BQS[:, None], float("-inf"))
    return bias.view(B, 1, G * Q, padded)[..., :S]


class CachedAttention(PreparedAttention):
    """Attention of one layer over the keys and values of a cache; built by `prepare_cached_attention`."""

    def __init__(
        self,
        cache: KeyValueCache,
        layer: int,
        cache_mask: _CacheMask,
        requested: Literal["auto", "eager", "sdpa"],
        scale_options: AttentionScale,
    ) -> None:
        self._keys_BKTH, self._values_BKTH = cache.keys_BKTH[layer], cache.values_BKTH[layer]
        self._cache_mask, self._requested, self._scale_options = cache_mask, requested, scale_options

    def __call__(self, q_BQNH: Tensor, k_BQKH: Tensor, v_BQKH: Tensor) -> Tensor:
        """Write the keys and values of the inputs; attend to all visible keys, [B, Q, N, H]."""
        keys_BKSH, values_BKSH = self._write(k_BQKH, v_BQKH)
        return self._attend(q_BQNH, keys_BKSH, values_BKSH, self._cache_mask.bias(q_BQNH, keys_BKSH.shape[1]))

    def at_positions(self, q_PNH: Tensor, k_BQKH: Tensor, v_BQKH: Tensor, output_positions: Tensor) -> Tensor:
        """The same for queries at flat positions of B * Q, [P, N, H]."""
        if len(k_BQKH) > 1:
            return attend_at_positions(self, q_PNH, k_BQKH, v_BQKH, output_positions)
        keys_BKSH, values_BKSH = self._write(k_BQKH, v_BQKH)
        q_1PNH = q_PNH[None]
        bias = self._cache_mask.bias(q_1PNH, keys_BKSH.shape[1], output_positions)
        return self._attend(q_1PNH, keys_BKSH, values_BKSH, bias)[0]

    def _attend(self, q_BQNH: Tensor, keys_BKSH: Tensor, values_BKSH: Tensor, bias: Tensor | None) -> Tensor:
        num_stacked = q_BQNH.shape[1] * q_BQNH.shape[2] // keys_BKSH.shape[1]
        backend = select_cached_backend(
            self._requested, num_stacked, q_BQNH.device.type, q_BQNH.dtype, self._scale_options.softcap
        )
        return attend_cached(q_BQNH, keys_BKSH, values_BKSH, bias, backend, self._scale_options)

    def _write(self, k_BQKH: Tensor, v_BQKH: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of the inputs; return all visible ones, [B, K, S, H]."""
        indices = self._cache_mask.indices
        if k_BQKH.dtype != self._keys_BKTH.dtype:
            raise ValueError(
                f"the cache is {self._keys_BKTH.dtype} and the model's keys are {k_BQKH.dtype}: create the cache with "
                "the dtype of the keys"
            )
        for stored_BKTH, new_BQKH in ((self._keys_BKTH, k_BQKH), (self._values_BKTH, v_BQKH)):
            if indices.write_slice is not None:
                stored_BKTH[:, :, indices.write_slice] = new_BQKH.transpose(1, 2)
            else:
                stored_BKTH.transpose(1, 2)[indices.sequence_index_B1, indices.write_positions_BQ] = new_BQKH
        return self._keys_BKTH[:, :, : indices.num_keys], self._values_BKTH[:, :, : indices.num_keys]
