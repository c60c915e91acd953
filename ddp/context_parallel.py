"""Context parallelism: the ranks of an axis divide each sequence of a training step.

The tokens are cut into 2 C chunks of equal length, for C ranks. Rank r has chunks r and 2 C - 1 - r, so that all ranks
compute equally many pairs of a causal or block-causal pattern; of two streams it has these chunks of both halves. A
rank computes everything at its own positions. In each layer its queries attend to the keys of all ranks: an all-gather
of keys and values in the forward, a reduce-scatter of their gradients in the backward.

Loss weights are those of the whole batch, so losses and gradients are to be summed over the ranks. All ranks of an axis
make the same forwards and backwards, also those that have no output position.

Shapes: B sequences, S positions of whole sequences, I inputs of a rank (S / C), N output positions, K key-value heads,
H width of a head, R ranges of keys, P positions per token (2 with two streams).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.mesh import Axis
from diffusionlm.diffusion.noised_batch import FORWARD_TENSORS, NoisedBatch
from diffusionlm.models.patterns import AttentionPattern, Intervals
from diffusionlm.models.tensors import copy_to_device


def split_batch(noised_batch: NoisedBatch, axis: Axis) -> NoisedBatch:
    """This rank's part of a batch: its inputs, the output positions among them, and a pattern that gathers keys.

    Call it on the CPU, before the batch is copied to a device. Targets, weights and other tensors of output positions
    are selected, in order. The rest is that of the whole batch: counts, denominators, `NoisedBatch.number_rows` and
    what belongs to the clean batch.

    Raises:
        ValueError: the tokens of a sequence cannot be cut into 2 C chunks of equal length.
    """
    if axis.size == 1:
        return noised_batch
    assert noised_batch.on_host is None, "a batch is split before it is copied to a device"
    S, pattern = noised_batch.inputs_BS.shape[1], PatternShard(noised_batch.pattern, axis)
    num_chunks, num_tokens = 2 * axis.size, S // pattern.positions_per_token
    if num_tokens % num_chunks:
        raise ValueError(
            f"sequences of {num_tokens} tokens cannot be divided over parallel.context = {axis.size} ranks: set "
            f"data.row_length to a multiple of 2 * parallel.context = {num_chunks}"
        )
    own_I = pattern.select(torch.arange(S), dim=0)
    local_N = _find_local_positions(noised_batch.positions_N, S, pattern)
    is_own_N = local_N >= 0
    tensors = {name: getattr(noised_batch, name) for name in FORWARD_TENSORS if name.endswith("_N")}
    own_tensors: dict[str, Any] = {name: tensor[is_own_N] for name, tensor in tensors.items() if tensor is not None}
    own_tensors["positions_N"] = own_tensors["positions_N"] // S * len(own_I) + local_N[is_own_N]
    masked_BS = None if noised_batch.masked_BS is None else noised_batch.masked_BS[:, own_I]
    inputs_BS = noised_batch.inputs_BS[:, own_I]
    return replace(noised_batch, inputs_BS=inputs_BS, masked_BS=masked_BS, pattern=pattern, **own_tensors)


def gather_losses(own_nll: Tensor, noised_batch: NoisedBatch, axis: Axis) -> Tensor:
    """Losses of all output positions of a whole batch, [N], of those that each rank computed of its part."""
    host = noised_batch.on_host or noised_batch
    local_N = _find_local_positions(host.positions_N, host.inputs_BS.shape[1], PatternShard(host.pattern, axis))
    indices = copy_to_device((local_N >= 0).nonzero()[:, 0], own_nll.device)
    nll_N = own_nll.new_zeros(len(local_N)).index_copy_(0, indices, own_nll)
    dist.all_reduce(nll_N, group=axis.group)
    return nll_N


def _find_local_positions(positions_N: Tensor, num_positions: int, pattern: PatternShard) -> Tensor:
    """Index of each output position among this rank's inputs of its sequence, [N]; -1: another rank has it."""
    own_I = pattern.select(torch.arange(num_positions), dim=0)
    local_S = torch.full((num_positions,), -1).index_copy(0, own_I, torch.arange(len(own_I)))
    return local_S[positions_N % num_positions]


@dataclass(frozen=True)
class PatternShard:
    """The part of an attention pattern that a rank computes: queries at its own positions, keys at all positions.

    It is an `AttentionPattern` of sequences with I inputs, whose masks and intervals have I queries and S keys.
    """

    whole: AttentionPattern
    """Pattern of the whole sequences."""
    axis: Axis
    """Ranks that divide the sequences."""

    @property
    def documents_BL(self) -> Tensor | None:
        """Document number of each token of the whole sequences."""
        return self.whole.documents_BL

    @property
    def positions_per_token(self) -> int:
        return self.whole.positions_per_token

    @property
    def is_unrestricted(self) -> bool:
        return self.whole.is_unrestricted

    def with_documents(self, documents_BL: Tensor) -> Self:
        return replace(self, whole=self.whole.with_documents(documents_BL))

    def to(self, device: torch.device | str) -> Self:
        return replace(self, whole=self.whole.to(device))

    def pin_memory(self) -> Self:
        return replace(self, whole=self.whole.pin_memory())

    def num_keys(self, length: int) -> int:
        return length * self.axis.size

    def default_positions(self, length: int, device: torch.device | str) -> Tensor:
        return self.select(self.whole.default_positions(self.num_keys(length), device), dim=-1)

    def intervals(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Intervals | None:
        """Ranges of keys of this rank's queries, each int64 [B or 1, I, R]."""
        intervals = self.whole.intervals(self.num_keys(length), device, window)
        if intervals is None:
            return None
        starts_BSR, ends_BSR = intervals
        return self.select(starts_BSR, dim=1), self.select(ends_BSR, dim=1)

    def dense_mask(self, length: int, device: torch.device | str = "cpu", window: int | None = None) -> Tensor:
        """Mask of this rank's queries, [B or 1, I, S]; a `DenseBias` may have heads and a floating-point dtype."""
        intervals = self.intervals(length, device, window)
        if intervals is None:
            return self.select(self.whole.dense_mask(self.num_keys(length), device, window), dim=-2)
        keys_S = torch.arange(self.num_keys(length), device=device)
        starts_RBI1, ends_RBI1 = (tensor.movedim(-1, 0)[..., None] for tensor in intervals)
        mask_BIS = (keys_S >= starts_RBI1[0]) & (keys_S < ends_RBI1[0])
        for starts_BI1, ends_BI1 in zip(starts_RBI1[1:], ends_RBI1[1:], strict=True):
            mask_BIS |= (keys_S >= starts_BI1) & (keys_S < ends_BI1)
        return mask_BIS

    def select(self, whole: Tensor, dim: int) -> Tensor:
        """Copy this rank's positions of a dimension of S positions: I, ascending."""
        dim %= whole.dim()
        sizes = (self.positions_per_token, 2 * self.axis.size, -1)
        chunks: Tensor = whole.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
        own = [chunks.select(dim + 1, chunk) for chunk in _chunks_of_rank(self.axis.rank, self.axis.size)]
        return torch.stack(own, dim + 1).flatten(dim, dim + 2)

    def gather_keys(self, k_BIKH: Tensor, v_BIKH: Tensor) -> tuple[Tensor, Tensor]:
        """All-gather the keys and values of all positions, each [B, S, K, H], in the order of the sequence."""
        keys: tuple[Tensor, Tensor] = _AllGatherKeys.apply(k_BIKH, v_BIKH, self.axis, self.positions_per_token)
        return keys


def _chunks_of_rank(rank: int, num_ranks: int) -> tuple[int, int]:
    """The two chunks of a rank, in order."""
    return rank, 2 * num_ranks - 1 - rank


class _AllGatherKeys(torch.autograd.Function):
    """All-gather of keys and values in one collective; the backward is a reduce-scatter of their gradients.

    A rank sends its two chunks of keys, then those of values: [4, B, P, positions of a chunk, K, H].
    """

    @staticmethod
    def forward(ctx: Any, k_BIKH: Tensor, v_BIKH: Tensor, axis: Axis, positions_per_token: int) -> tuple[Tensor, ...]:
        ctx.axis, ctx.positions_per_token = axis, positions_per_token
        own = _stack_chunks((k_BIKH, v_BIKH), positions_per_token, [(0, 1)])
        gathered = own.new_empty(axis.size * 4, *own.shape[1:])
        dist.all_gather_into_tensor(gathered, own, group=axis.group)
        first_k, second_k, first_v, second_v = (gathered[index::4] for index in range(4))
        k_BSKH = _concatenate_chunks(*first_k, *reversed(second_k.unbind()))
        return k_BSKH, _concatenate_chunks(*first_v, *reversed(second_v.unbind()))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads_BSKH: Tensor) -> tuple[Tensor | None, ...]:
        chunks_of_ranks = [_chunks_of_rank(rank, ctx.axis.size) for rank in range(ctx.axis.size)]
        grads = _stack_chunks(grads_BSKH, ctx.positions_per_token, chunks_of_ranks)
        own = grads.new_empty(4, *grads.shape[1:])
        dist.reduce_scatter_tensor(own, grads, group=ctx.axis.group)
        return _concatenate_chunks(*own[:2]), _concatenate_chunks(*own[2:]), None, None


def _stack_chunks(
    tensors: Sequence[Tensor], positions_per_token: int, chunks_of_ranks: Sequence[tuple[int, int]]
) -> Tensor:
    """Copy the chunks of each rank of tensors [B, positions, K, H], which have two chunks for each rank.

    Returns [ranks * tensors * 2, B, P, positions of a chunk, K, H].
    """
    sizes = (positions_per_token, 2 * len(chunks_of_ranks), -1)
    views = [tensor.unflatten(1, sizes) for tensor in tensors]  # type: ignore[no-untyped-call]
    return torch.stack([view[:, :, chunk] for chunks in chunks_of_ranks for view in views for chunk in chunks])


def _concatenate_chunks(*chunks: Tensor) -> Tensor:
    """Put chunks [B, P, positions of a chunk, K, H] one after the other: [B, positions, K, H]."""
    return torch.cat(chunks, dim=2).flatten(1, 2)
