"""Forwards of several sequences in one row, one after another, without padding; some with a paged key-value cache.

Each sequence attends to itself alone, by a computation of its own on a CPU, so no neighbor changes its attention. On a
GPU sequences with equally many inputs share their kernels.

Shapes: Q inputs of all sequences, S visible keys of a sequence, G sequences of a group, N query heads, K key-value
heads, H width of a head, T slots of a cache, P outputs out of Q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.training.runtime import AttentionBackend
from diffusionlm.models.attention import PreparedAttention
from diffusionlm.models.attention_backends import prepare_attention, select_cached_backend
from diffusionlm.models.cache import PagedCache
from diffusionlm.models.dense_attention import DEFAULT_SCALE, AttentionScale, attend_cached, without_cudnn_attention
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, BlockCausal, Causal, CausalThenBlock
from diffusionlm.models.tensors import copy_to_device

CachedBackend = Literal["auto", "eager", "sdpa"]
"""Attention backends that have a cached form."""


@dataclass(frozen=True)
class SequenceSlice:
    """The inputs of one sequence in a forward: its positions from ``start`` to ``end``.

    Raises:
        ValueError: no inputs, inputs that are not visible, or without a cache other inputs than all visible ones.
    """

    start: int
    end: int
    num_visible: int
    """Inputs attend to keys below this position, if the pattern allows it."""
    pattern: AttentionPattern
    """Attention pattern of the whole sequence."""
    pages: Sequence[int] | None = None
    """Pages of the cache for its positions, ascending. None: no cache; keys and values are those of the inputs."""
    outputs: NDArray[np.int64] | None = None
    """Inputs whose outputs are computed, by index in the sequence. None: all."""
    position_ids: NDArray[np.int64] | None = None
    """Position of each input for the rotary embedding, where it is not its index. None: start ... end."""

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end <= self.num_visible:
            raise ValueError(
                f"inputs from position {self.start} to {self.end} with {self.num_visible} visible keys: a sequence "
                "needs at least one input, and attends to its own inputs"
            )
        if self.pages is None and (self.start, self.end) != (0, self.num_visible):
            raise ValueError(
                f"inputs from position {self.start} to {self.end} of {self.num_visible}: without a cache all visible "
                "positions are inputs"
            )
        if self.position_ids is not None and len(self.position_ids) != self.num_inputs:
            raise ValueError(
                f"{len(self.position_ids)} position_ids for {self.num_inputs} inputs: a sequence with ids of its own "
                "has one for each input"
            )

    @property
    def num_positions(self) -> int:
        """Positions of the model's context that the sequence takes."""
        return self.num_visible if self.position_ids is None else int(self.position_ids.max()) + 1

    @property
    def input_positions(self) -> NDArray[np.int64]:
        """Position of each input for the rotary embedding, [Q]."""
        return np.arange(self.start, self.end) if self.position_ids is None else self.position_ids

    @property
    def num_inputs(self) -> int:
        return self.end - self.start

    @property
    def output_offsets(self) -> NDArray[np.int64]:
        """Outputs, counted from the first input."""
        return np.arange(self.num_inputs) if self.outputs is None else self.outputs - self.start


@dataclass(frozen=True)
class VarlenBatch:
    """The sequences of one forward, ``model(tokens_1Q, pattern=VarlenBatch(...))``, in place of one attention pattern.

    Raises:
        ValueError: no sequence, or pages without a cache.
    """

    sequences: Sequence[SequenceSlice]
    cache: PagedCache | None = None
    copies_keys: bool = False
    """Attention reads copies of cached keys and values, whose layout does not depend on the pages."""

    def __post_init__(self) -> None:
        if not self.sequences:
            raise ValueError("a forward needs at least one sequence")
        for part in self.sequences:
            if part.pages is None:
                continue
            if self.cache is None:
                raise ValueError("sequences with pages need a cache")
            pages, size = part.pages, self.cache.page_size
            if len(pages) * size < part.num_visible or not 0 <= min(pages) <= max(pages) < self.cache.num_pages:
                raise ValueError(
                    f"{len(pages)} pages of {size} positions, out of {self.cache.num_pages}, do not hold "
                    f"{part.num_visible} positions"
                )

    @property
    def num_inputs(self) -> int:
        """Number of inputs of all sequences together, Q."""
        return sum(part.num_inputs for part in self.sequences)

    def positions(self) -> Tensor:
        """Position of each input for the rotary embedding, [1, Q], on the CPU."""
        return torch.from_numpy(np.concatenate([part.input_positions for part in self.sequences]))[None]

    def output_positions(self) -> Tensor | None:
        """Indices of all outputs among all inputs, [P], on the CPU. None: all."""
        if all(part.outputs is None for part in self.sequences):
            return None
        firsts = np.cumsum([0, *(part.num_inputs for part in self.sequences[:-1])]).tolist()
        offsets = [first + part.output_offsets for first, part in zip(firsts, self.sequences, strict=True)]
        return torch.from_numpy(np.concatenate(offsets))


def prepare_varlen_attention(
    batch: VarlenBatch,
    windows: Sequence[int | None],
    device: torch.device,
    backend: AttentionBackend = "auto",
    scale_options: AttentionScale = DEFAULT_SCALE,
    *,
    share_kernels: bool | None = None,
) -> tuple[list[VarlenAttention], Tensor]:
    """Prepare the attention of each layer.

    Args:
        windows: sliding window of each layer. None: no limit.
        backend: ``auto``: see `attention_backends`.
        share_kernels: one computation for all sequences with a cache and equally many inputs. None: on a GPU.

    Returns:
        The attention of each layer, and the positions of the inputs for the rotary embedding, [1, Q], on the device.

    Raises:
        ValueError: a sequence has a cache and its pattern depends on more than positions, or the backend has no cached
            form or no soft cap.
    """
    scale_options.check_backend(backend)
    if backend not in ("auto", "eager", "sdpa") and any(part.pages is not None for part in batch.sequences):
        raise ValueError(
            f'attention_backend = "{backend}" has no cached form: use "auto", "eager" or "sdpa", or '
            'generation.cache = "none"'
        )
    inputs = _InputIndices(batch, device)
    groups = _group_sequences(batch.sequences, device.type == "cuda" if share_kernels is None else share_kernels)

    def prepare(group: Sequence[SequenceSlice], window: int | None) -> _UncachedSequences | _CachedSequences:
        build: Any = _UncachedSequences if group[0].pages is None else _CachedSequences
        return build(inputs, group, window, backend, scale_options)  # type: ignore[no-any-return]

    parts_of_window = {window: [prepare(group, window) for group in groups] for window in dict.fromkeys(windows)}
    attentions = [VarlenAttention(inputs, layer, parts_of_window[window]) for layer, window in enumerate(windows)]
    return attentions, inputs.positions_Q[None]


class VarlenAttention(PreparedAttention):
    """Attention of one layer; built by `prepare_varlen_attention`."""

    def __init__(
        self, inputs: _InputIndices, layer: int, parts: Sequence[_UncachedSequences | _CachedSequences]
    ) -> None:
        self._inputs, self._layer, self._parts = inputs, layer, parts

    def __call__(self, q_1QNH: Tensor, k_1QKH: Tensor, v_1QKH: Tensor) -> Tensor:
        """Write keys and values of the inputs to their pages; attend, [1, Q, N, H]."""
        self._inputs.write(self._layer, k_1QKH[0], v_1QKH[0])
        with without_cudnn_attention():  # nearly every forward has other shapes
            if len(self._parts) == 1:  # its rows are all, in their order
                return self._parts[0].attend(self._layer, q_1QNH[0], k_1QKH[0], v_1QKH[0])[None]
            out_QNH = torch.empty_like(q_1QNH[0])
            for part in self._parts:
                out_QNH[part.rows.inputs] = part.attend(self._layer, q_1QNH[0], k_1QKH[0], v_1QKH[0])
        return out_QNH[None]

    def at_positions(self, q_PNH: Tensor, k_1QKH: Tensor, v_1QKH: Tensor, output_positions: Tensor) -> Tensor:
        """The same for the queries of the outputs, [P, N, H]."""
        self._inputs.write(self._layer, k_1QKH[0], v_1QKH[0])
        out_PNH = torch.empty_like(q_PNH)
        with without_cudnn_attention():
            for part in self._parts:
                if part.rows.num_outputs:
                    out_PNH[part.rows.outputs] = part.attend_outputs(self._layer, q_PNH, k_1QKH[0], v_1QKH[0])
        return out_PNH


class _InputIndices:
    """Positions, indices in the sequence, slots and key limits of all inputs, copied to the device without waiting for
    it."""

    def __init__(self, batch: VarlenBatch, device: torch.device) -> None:
        self.cache, self.copies_keys, self.device = batch.cache, batch.copies_keys, device
        limits_Q = find_input_limits(batch.sequences)
        slots_Q, is_cached_Q = np.zeros_like(limits_Q), np.zeros(len(limits_Q), dtype=bool)
        self.limits: dict[int, NDArray[np.int64]] = {}
        """Identity of a sequence -> key limits of its inputs."""
        first_input = first_output = 0
        self.rows: dict[int, tuple[int, int]] = {}
        """Identity of a sequence -> its first row among the inputs, and among the outputs."""
        for part in batch.sequences:
            own = slice(first_input, first_input + part.num_inputs)
            if part.pages is not None:
                assert batch.cache is not None
                slots_Q[own], is_cached_Q[own] = batch.cache.slots(part.pages, part.start, part.end), True
            self.limits[id(part)] = limits_Q[own]
            self.rows[id(part)] = (first_input, first_output)
            first_input += part.num_inputs
            first_output += len(part.output_offsets)
        indices_Q = np.concatenate([np.arange(part.start, part.end) for part in batch.sequences])
        packed = torch.cat([batch.positions(), torch.from_numpy(np.stack([indices_Q, slots_Q, limits_Q]))])
        self.positions_Q, self.indices_Q, self.slots_Q, self.limits_Q = copy_to_device(packed, device).unbind()
        self._cached_rows, cached_rows = None, np.flatnonzero(is_cached_Q)
        if len(cached_rows) < batch.num_inputs:
            self._cached_rows = copy_to_device(torch.from_numpy(cached_rows), device)
            self.slots_Q = self.slots_Q[self._cached_rows]

    def write(self, layer: int, k_QKH: Tensor, v_QKH: Tensor) -> None:
        """Write keys and values of the inputs with a cache."""
        if self.cache is None or not len(self.slots_Q):
            return
        if self._cached_rows is not None:
            k_QKH, v_QKH = k_QKH[self._cached_rows], v_QKH[self._cached_rows]
        self.cache.write(layer, self.slots_Q, k_QKH, v_QKH)


def find_input_limits(sequences: Sequence[SequenceSlice]) -> NDArray[np.int64]:
    """Last visible key of all inputs, plus one: with one computation for the cached sequences of a pattern.

    Raises:
        ValueError: a sequence has a cache, and its pattern depends on more than positions.
    """
    counts = [part.num_inputs for part in sequences]
    positions_Q = np.concatenate([np.arange(part.start, part.end) for part in sequences])
    limits_Q = np.repeat([part.num_visible for part in sequences], counts)
    patterns = {id(part.pattern): part.pattern for part in sequences if part.pages is not None}
    numbers_Q = np.repeat([0 if part.pages is None else id(part.pattern) for part in sequences], counts)
    for number, pattern in patterns.items():
        if (
            not isinstance(pattern, Bidirectional | Causal | BlockCausal | CausalThenBlock)
            or pattern.documents_BL is not None
        ):
            raise ValueError(
                f"{type(pattern).__name__}{'' if pattern.documents_BL is None else ' with documents'} cannot be used "
                "with a cache: a cached sequence is one document; use Bidirectional, Causal, BlockCausal or "
                "CausalThenBlock without documents"
            )
        own = numbers_Q == number
        ends_1Q = pattern.key_limit(torch.from_numpy(positions_Q[own])[None])
        limits_Q[own] = np.minimum(limits_Q[own], ends_1Q[0].numpy())
    return limits_Q


def _group_sequences(sequences: Sequence[SequenceSlice], share_kernels: bool) -> list[list[SequenceSlice]]:
    """Sequences that are computed together: with ``share_kernels`` those with equally many inputs and either a cache
    each and similarly many visible keys, to the longest of which all are padded, or the same pattern."""
    if not share_kernels:
        return [[part] for part in sequences]
    groups: dict[tuple[int, int, int | None], list[SequenceSlice]] = {}
    for part in sequences:
        key = (part.num_inputs, part.num_visible.bit_length(), id(part.pattern) if part.pages is None else None)
        groups.setdefault(key, []).append(part)
    return list(groups.values())


class _Rows:
    """Rows of a group of G sequences with equally many inputs, Q each."""

    def __init__(self, inputs: _InputIndices, group: Sequence[SequenceSlice]) -> None:
        self.num_sequences, self.num_inputs = len(group), group[0].num_inputs
        input_rows, output_rows, offsets = [], [], []
        for index, part in enumerate(group):
            first_input, first_output = inputs.rows[id(part)]
            input_rows.append(first_input + np.arange(part.num_inputs))
            output_rows.append(first_output + np.arange(len(part.output_offsets)))
            offsets.append(index * self.num_inputs + part.output_offsets)
        self.num_outputs = sum(map(len, output_rows))
        self.inputs = _as_rows(np.concatenate(input_rows), inputs.device)
        """Among the inputs of the forward."""
        self.outputs = _as_rows(np.concatenate(output_rows), inputs.device)
        """Among the outputs of the forward."""
        self.output_offsets = copy_to_device(torch.from_numpy(np.concatenate(offsets)), inputs.device)
        """Outputs among the G * Q inputs of the group, [P]."""

    def select(self, tensor_Q: Tensor) -> Tensor:
        """Inputs of the group, [G, Q, ...]."""
        rows = tensor_Q[self.inputs]
        return rows.view(self.num_sequences, self.num_inputs, *rows.shape[1:])


class _UncachedSequences:
    """Sequences whose keys are their inputs."""

    def __init__(
        self,
        inputs: _InputIndices,
        group: Sequence[SequenceSlice],
        window: int | None,
        backend: AttentionBackend,
        scale_options: AttentionScale,
    ) -> None:
        self.rows = _Rows(inputs, group)
        pattern = group[0].pattern.to(inputs.device)
        length = self.rows.num_inputs
        self._attention = prepare_attention(pattern, length, inputs.device, backend, window, scale_options)

    def attend(self, layer: int, q_QNH: Tensor, k_QKH: Tensor, v_QKH: Tensor) -> Tensor:
        select = self.rows.select
        return self._attention(select(q_QNH), select(k_QKH), select(v_QKH)).flatten(0, 1)

    def attend_outputs(self, layer: int, q_PNH: Tensor, k_QKH: Tensor, v_QKH: Tensor) -> Tensor:
        keys, values = self.rows.select(k_QKH), self.rows.select(v_QKH)
        return self._attention.at_positions(q_PNH[self.rows.outputs], keys, values, self.rows.output_offsets)


class _CachedSequences:
    """One sequence with a cache, or several with equally many inputs."""

    def __init__(
        self,
        inputs: _InputIndices,
        group: Sequence[SequenceSlice],
        window: int | None,
        requested: CachedBackend,
        scale_options: AttentionScale,
    ) -> None:
        assert inputs.cache is not None
        self.rows = _Rows(inputs, group)
        num_keys = max(part.num_visible for part in group)
        if window is not None:
            last, first = max(part.end for part in group) - 1, min(part.start for part in group)
            window = window if last >= window or num_keys - first > window else None
        limits = [inputs.limits[id(part)] for part in group]
        self._attention = CachedAttention(
            inputs.cache,
            _gathered_slots(inputs.cache, group, num_keys, inputs.device),
            num_keys,
            self.rows.select(inputs.indices_Q),
            self.rows.select(inputs.limits_Q),
            needs_mask=window is not None or any(limit_Q.min() < num_keys for limit_Q in limits),
            window=window,
            requested=requested,
            scale_options=scale_options,
            copies_keys=inputs.copies_keys,
        )

    def attend(self, layer: int, q_QNH: Tensor, k_QKH: Tensor, v_QKH: Tensor) -> Tensor:
        return self._attention.attend(layer, self.rows.select(q_QNH)).flatten(0, 1)

    def attend_outputs(self, layer: int, q_PNH: Tensor, k_QKH: Tensor, v_QKH: Tensor) -> Tensor:
        rows = self.rows
        if rows.num_sequences == 1:
            return self._attention.attend(layer, q_PNH[None, rows.outputs], rows.output_offsets)[0]
        q_UNH = q_PNH.new_zeros(rows.num_sequences * rows.num_inputs, *q_PNH.shape[1:])
        q_UNH[rows.output_offsets] = q_PNH[rows.outputs]
        q_GQNH = q_UNH.view(rows.num_sequences, rows.num_inputs, *q_PNH.shape[1:])
        return self._attention.attend(layer, q_GQNH).flatten(0, 1)[rows.output_offsets]


def _gathered_slots(
    cache: PagedCache, group: Sequence[SequenceSlice], num_keys: int, device: torch.device
) -> Tensor | slice:
    """Slots of all keys, [G, S]; a slice for a single sequence whose pages are adjacent."""
    size, num_pages = cache.page_size, -(-num_keys // cache.page_size)
    if len(group) == 1:
        pages = list(group[0].pages or ())[:num_pages]
        if pages == list(range(pages[0], pages[0] + num_pages)):
            return slice(pages[0] * size, pages[0] * size + num_keys)
    tables = [pad_pages(part, size, num_pages) for part in group]
    num_visible = [[part.num_visible] for part in group]
    return find_key_slots(
        copy_to_device(torch.tensor(tables), device), copy_to_device(torch.tensor(num_visible), device), size, num_keys
    )


def pad_pages(part: SequenceSlice, page_size: int, num_pages: int) -> list[int]:
    """Pages of the visible keys of a sequence, and its first page for all others: what the pages of other sequences
    hold may not even be finite."""
    own = list(part.pages or ())[: -(-part.num_visible // page_size)]
    return own + [own[0]] * (num_pages - len(own))


def find_key_slots(tables_GP: Tensor, num_visible_G1: Tensor, page_size: int, num_keys: int) -> Tensor:
    """Slots of all keys of sequences with these pages, [G, S]; of keys that are not visible the first slot."""
    device = tables_GP.device
    slots_GPS = tables_GP[:, :, None] * page_size + torch.arange(page_size, device=device)
    slots_GS = slots_GPS.flatten(1)[:, :num_keys]
    return torch.where(torch.arange(num_keys, device=device) < num_visible_G1, slots_GS, slots_GS[:, :1])


@dataclass(frozen=True, eq=False)
class CachedAttention:
    """Attention of G sequences with Q inputs each to the S keys of each in a cache."""

    cache: PagedCache
    slots_GS: Tensor | slice
    """Slots of the keys; a slice for a single sequence."""
    num_keys: int
    """S: no query attends to keys from here on."""
    positions_GQ: Tensor
    limits_GQ: Tensor
    """Last visible key of each input, plus one."""
    needs_mask: bool = True
    window: int | None = None
    requested: CachedBackend = "auto"
    scale_options: AttentionScale = DEFAULT_SCALE
    copies_keys: bool = False
    _biases: dict[tuple[torch.dtype, bool], Tensor] = field(default_factory=dict)

    def attend(self, layer: int, q_GQNH: Tensor, query_offsets: Tensor | None = None) -> Tensor:
        """Attention of the queries, [G, Q, N, H]; of a single sequence at some of its inputs, if these are named."""
        keys_GKSH, values_GKSH = (
            self._read(storage[layer]) for storage in (self.cache.keys_KTH, self.cache.values_KTH)
        )
        groups = keys_GKSH.shape[1]
        num_stacked = q_GQNH.shape[1] * q_GQNH.shape[2] // groups
        backend = select_cached_backend(
            self.requested, num_stacked, q_GQNH.device.type, q_GQNH.dtype, self.scale_options.softcap
        )
        bias = self._bias(q_GQNH, groups, query_offsets) if self.needs_mask else None
        return attend_cached(q_GQNH, keys_GKSH, values_GKSH, bias, backend, self.scale_options)

    def _read(self, storage_KTH: Tensor) -> Tensor:
        """Keys or values, [G, K, S, H]."""
        slots = self.slots_GS
        keys = storage_KTH[None, :, slots] if isinstance(slots, slice) else storage_KTH[:, slots].transpose(0, 1)
        return keys.clone(memory_format=torch.contiguous_format) if self.copies_keys else keys

    def _bias(self, q_GQNH: Tensor, groups: int, query_offsets: Tensor | None) -> Tensor:
        """Bias [G, 1, N / K * Q, S] in the dtype of the queries, shared by all layers."""
        key = (q_GQNH.dtype, query_offsets is not None)
        if key not in self._biases:
            limits_GQ, positions_GQ = self.limits_GQ, self.positions_GQ
            if query_offsets is not None:
                limits_GQ, positions_GQ = (table[:, query_offsets] for table in (limits_GQ, positions_GQ))
            keys_S = torch.arange(self.num_keys, device=limits_GQ.device)
            mask_GQS = keys_S < limits_GQ[..., None]
            if self.window is not None:
                mask_GQS = mask_GQS & ((positions_GQ[..., None] - keys_S).abs() < self.window)
            self._biases[key] = _build_stacked_bias(mask_GQS, q_GQNH, groups)
        return self._biases[key]


def _as_rows(rows: NDArray[np.int64], device: torch.device) -> slice | Tensor:
    """A slice if the rows are adjacent, else an index."""
    if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
        return slice(int(rows[0]), int(rows[0]) + len(rows))
    return copy_to_device(torch.from_numpy(rows), device)


def _build_stacked_bias(mask_GQS: Tensor, q_GQNH: Tensor, groups: int) -> Tensor:
    G, Q, S = mask_GQS.shape
    heads = q_GQNH.shape[2] // groups
    # SDPA on a GPU copies the bias in each layer unless its rows are a multiple of 8 keys.
    padded = -(-S // 8) * 8
    bias = q_GQNH.new_zeros(G, heads, Q, padded)
    bias[..., :S].masked_fill_(~mask_GQS[:, None], float("-inf"))
    return bias.view(G, 1, heads * Q, padded)[..., :S]
