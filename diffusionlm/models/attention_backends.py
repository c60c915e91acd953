"""Select the attention backend for a pattern and build its masks, once per forward for all layers.

`select_backend`, without a cache. The first line that applies counts:

| with "auto"                                                                          | backend |
|--------------------------------------------------------------------------------------|---------|
| CUDA, a mask is needed or a soft cap; >= 512 positions, head width >= 16, no float64 | flex    |
| soft cap                                                                             | eager   |
| CPU, a mask is needed; >= 256 positions (bf16: 512), tiles skip >= 25% of the pairs  | tiled   |
| CPU, bf16, <= 512 queries                                                            | eager   |
| else                                                                                 | sdpa    |

On a GPU without a C compiler, which FlexAttention's kernels need, "auto" is never flex.

`select_cached_backend`, with a cache:

| with "auto"                                             | backend |
|---------------------------------------------------------|---------|
| soft cap                                                | eager   |
| CPU, bf16, 1 or 32 to 512 queries of one key-value head | eager   |
| else                                                    | sdpa    |

A pattern without intervals (`DenseBias`) is never flex or tiled.

Shapes: B sequences, Q queries, S keys, N query heads, K key-value heads, H width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from config.training.runtime import AttentionBackend
from diffusionlm.models.attention import PreparedAttention
from diffusionlm.models.dense_attention import DEFAULT_SCALE, AttentionScale, DenseBackend, attend, mask_to_bias
from diffusionlm.models.patterns import AttentionPattern, Intervals
from diffusionlm.models.tiled import Tile, attend_tiled, build_tiles, tile_density
from profiling import triton_setup

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

EAGER_MAX_LENGTH = 512
"""Up to this number of queries eager attention is faster than SDPA for bf16 on a CPU."""
TILED_MIN_LENGTH = 256
"""On a CPU, shorter sequences use a dense mask."""
BFLOAT16_TILED_MIN_LENGTH = 512
"""The same limit for bf16, where eager attention is fast for short sequences."""
TILED_MAX_DENSITY = 0.75
"""On a CPU, a pattern whose tiles compute a larger share of all pairs uses a dense mask."""
FLEX_MIN_LENGTH = 512
"""On a GPU, shorter sequences use a dense mask: FlexAttention's tiles of 128 leave little to skip."""
FLEX_MIN_HEAD_DIM = 16
"""FlexAttention's kernels refuse narrower heads."""


def select_backend(
    requested: AttentionBackend,
    q_BQNH: Tensor,
    num_keys: int,
    softcap: float | None,
    compute_density: Callable[[], float] | None,
) -> Literal["eager", "sdpa", "tiled", "flex"]:
    """Select the backend of a forward without a cache.

    It is called in every layer: autocast and FSDP decide the dtype late, and the last layer may have fewer queries.

    Args:
        requested: everything but ``auto`` is returned as it is.
        num_keys: number of keys, S.
        softcap: cap of the scores. None: no cap.
        compute_density: returns the share of pairs that tiles compute. None: there are no intervals, because no mask
            is needed or the pattern has none.
    """
    if requested != "auto":
        return requested
    device, dtype = q_BQNH.device.type, q_BQNH.dtype
    fits_flex = device == "cuda" and dtype != torch.float64 and q_BQNH.shape[-1] >= FLEX_MIN_HEAD_DIM
    if compute_density is not None and fits_flex and num_keys >= FLEX_MIN_LENGTH:
        return "flex"
    if softcap is not None:
        return "eager"
    min_length = BFLOAT16_TILED_MIN_LENGTH if dtype == torch.bfloat16 else TILED_MIN_LENGTH
    is_long = device == "cpu" and num_keys >= min_length
    if compute_density is not None and is_long and compute_density() <= TILED_MAX_DENSITY:
        return "tiled"
    is_short_bfloat16 = device == "cpu" and dtype == torch.bfloat16 and q_BQNH.shape[1] <= EAGER_MAX_LENGTH
    return "eager" if is_short_bfloat16 else "sdpa"


def select_cached_backend(
    requested: Literal["auto", "eager", "sdpa"],
    num_stacked_queries: int,
    device: str,
    dtype: torch.dtype,
    softcap: float | None,
) -> DenseBackend:
    """Select the backend of a forward with a cache.

    Measured with 8 query and 4 key-value heads of width 64, 1 to 64 queries and up to 4096 keys on one core: SDPA with
    the query heads of a group stacked is faster than with ``enable_gqa`` (up to 1.4 times in fp32, 7 times in bf16).
    It is not slower than one product for each group, except for bf16 with one query or with many (half the speed).

    Args:
        num_stacked_queries: queries of one key-value head, N / K * Q.
        device: type of the device.
        dtype: dtype of the queries.
        softcap: cap of the scores. None: no cap.
    """
    if requested != "auto":
        return requested
    if softcap is not None:
        return "eager"
    is_eager = num_stacked_queries == 1 or 32 <= num_stacked_queries <= EAGER_MAX_LENGTH
    return "eager" if device == "cpu" and dtype == torch.bfloat16 and is_eager else "sdpa"


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
        length: number of inputs; both halves of a two-stream sequence count.
        device: device of queries and keys.
        backend: ``auto``: see `select_backend`.
        window: keys must be less than this many positions away. None: no limit.

    Raises:
        ValueError: the length does not fit the pattern, or the backend cannot compute the pattern or the soft cap.
    """
    scale_options.check_backend(backend)
    num_keys = pattern.num_keys(length)
    if window is not None and window >= num_keys // pattern.positions_per_token:
        window = None
    needs_intervals = backend in ("tiled", "flex")
    if backend != "auto":
        uses_intervals = needs_intervals
    elif torch.device(device).type == "cuda" and triton_setup.find_triton_problem() is not None:
        uses_intervals = False
    elif scale_options.softcap is not None:
        # Only FlexAttention can use intervals and cap scores.
        uses_intervals = torch.device(device).type == "cuda" and num_keys >= FLEX_MIN_LENGTH
    else:
        uses_intervals = not pattern.is_unrestricted or window is not None
    intervals = pattern.intervals(length, device, window) if uses_intervals else None
    if intervals is None and needs_intervals:
        raise ValueError(
            f'attention backend "{backend}" cannot compute {type(pattern).__name__}, which may hide any pair: '
            'use "eager", "sdpa" or "auto"'
        )
    return PatternAttention(pattern, length, device, backend, window, intervals, scale_options)


class PatternAttention(PreparedAttention):
    """Attention of one pattern, length and window on one device; built by `prepare_attention`.

    Tensors that depend on the dtype are built at the first call and shared by the other layers.
    """

    def __init__(
        self,
        pattern: AttentionPattern,
        length: int,
        device: torch.device | str,
        requested: AttentionBackend,
        window: int | None,
        intervals: Intervals | None,
        scale_options: AttentionScale,
    ) -> None:
        self._pattern, self._length, self._device = pattern, length, device
        self._requested, self._window, self._intervals = requested, window, intervals
        self._scale_options, self._num_keys = scale_options, pattern.num_keys(length)
        self._is_unrestricted = pattern.is_unrestricted and window is None
        # Built here if it will be needed for sure, so that a length that does not fit raises before the first layer.
        self._mask = (
            None if self._is_unrestricted or intervals is not None else pattern.dense_mask(length, device, window)
        )
        self._biases: dict[torch.dtype, Tensor] = {}
        self._tiles: dict[torch.dtype, tuple[Tile, ...]] = {}
        self._block_masks: dict[int, BlockMask] = {}

    def __call__(self, q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
        if self._pattern.gather_keys is not None:
            k_BSKH, v_BSKH = self._pattern.gather_keys(k_BSKH, v_BSKH)
        attention = self._attention_of_backend(q_BQNH)
        if attention is not None:
            return attention(q_BQNH, k_BSKH, v_BSKH)
        return attend_tiled(q_BQNH, k_BSKH, v_BSKH, self._tiles_for(q_BQNH.dtype), scale=self._scale_options.scale)

    def traceable(self, q_BQNH: Tensor) -> PreparedAttention | None:
        """See `PreparedAttention`; None for tiles, which the host lists, and where keys are gathered."""
        return None if self._pattern.gather_keys is not None else self._attention_of_backend(q_BQNH)

    def _attention_of_backend(self, q_BQNH: Tensor) -> PreparedAttention | None:
        """Attention of these queries and all keys. None: tiles."""
        backend, num_queries = self.backend_for(q_BQNH), q_BQNH.shape[1]
        if backend == "tiled":
            return None
        if backend == "flex":
            from diffusionlm.models.flex import is_hopper

            # Found out here, because the compiler cannot trace it.
            return _FlexAttention(self._block_mask_for(num_queries), self._scale_options, is_hopper(q_BQNH.device))
        mask = self._dense_mask_for(q_BQNH.dtype if backend == "eager" else None)
        return _DenseAttention(None if mask is None else mask[..., :num_queries, :], backend, self._scale_options)

    def backend_for(self, q_BQNH: Tensor) -> Literal["eager", "sdpa", "tiled", "flex"]:
        """Backend for these queries: see `select_backend`."""

        def compute_density() -> float:
            return tile_density(self._tiles_for(q_BQNH.dtype), self._num_keys)

        density = None if self._intervals is None else compute_density
        return select_backend(self._requested, q_BQNH, self._num_keys, self._scale_options.softcap, density)

    def _tiles_for(self, dtype: torch.dtype) -> tuple[Tile, ...]:
        if dtype not in self._tiles:
            assert self._intervals is not None
            self._tiles[dtype] = build_tiles(self._intervals, self._pattern.positions_per_token, dtype)
        return self._tiles[dtype]

    def _block_mask_for(self, num_queries: int) -> BlockMask:
        # Imported here: it loads torch's compiler, which takes a second.
        from diffusionlm.models.flex import build_block_mask

        if num_queries not in self._block_masks:
            assert self._intervals is not None
            self._block_masks[num_queries] = build_block_mask(self._intervals, num_queries, self._num_keys)
        return self._block_masks[num_queries]

    def _dense_mask_for(self, dtype: torch.dtype | None) -> Tensor | None:
        """The dense mask, or with a dtype its bias of that dtype. None: no mask is needed."""
        if self._is_unrestricted:
            return None
        if self._mask is None:
            self._mask = self._pattern.dense_mask(self._length, self._device, self._window)
        if dtype is None or self._mask.dtype != torch.bool:
            return self._mask
        if dtype not in self._biases:
            self._biases[dtype] = mask_to_bias(self._mask, dtype)
        return self._biases[dtype]


@dataclass(frozen=True)
class _DenseAttention(PreparedAttention):
    """Attention with a dense mask for a known number of queries."""

    mask: Tensor | None
    backend: DenseBackend
    scale_options: AttentionScale

    def __call__(self, q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
        return attend(q_BQNH, k_BSKH, v_BSKH, self.mask, self.backend, self.scale_options)


@dataclass(frozen=True)
class _FlexAttention(PreparedAttention):
    """FlexAttention with a block mask for a known number of queries."""

    mask: BlockMask
    scale_options: AttentionScale
    is_on_hopper: bool

    def __call__(self, q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
        from diffusionlm.models.flex import attend_flex

        return attend_flex(q_BQNH, k_BSKH, v_BSKH, self.mask, self.scale_options, is_on_hopper=self.is_on_hopper)
