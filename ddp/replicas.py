"""Strategies in which every rank has all weights: what they share, and the check that the weights are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.buckets import ParameterUnit
from ddp.mesh import Shard
from ddp.process_group import World

INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by size in bytes."""


class Replicated:
    """Base of a `parallelism.Parallelism` in which every rank has all weights and, by default, updates all of them."""

    row_exchange = None
    has_all_weights, has_all_updates = True, True

    def __init__(self, model: nn.Module, world: World, units: Sequence[ParameterUnit] | None = None) -> None:
        """``units``: its parameters are those that they name. None: all of the model's."""
        self.model = model
        self.world = world
        names = None if units is None else {name for _, names in units for name in names}
        self.parameters = {name: value for name, value in model.named_parameters() if names is None or name in names}
        self._trainable = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @property
    def whole_shapes(self) -> dict[str, torch.Size]:
        return {name: parameter.shape for name, parameter in self.parameters.items()}

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        return self._trainable

    def shard_of(self, name: str) -> Shard:
        return Shard.whole(self.parameters[name].shape)

    def count_copies(self, name: str) -> int:
        return self.world.size

    def start_weight_gather(self) -> None:
        """Do nothing: every rank has made all updates."""

    def wait_for_weights(self) -> None:
        """Do nothing: every rank has made all updates."""

    def on_weights_replaced(self) -> None:
        """Do nothing: the optimizer updates the model's own parameters."""

    @torch.no_grad()
    def set_weights(self, whole: Mapping[str, Tensor]) -> None:
        self.wait_for_weights()
        parameters = {name: value for name, value in self.parameters.items() if value.requires_grad}
        check_names(whole, parameters)
        for name, parameter in parameters.items():
            parameter.copy_(whole[name])
        self.on_weights_replaced()

    def iterate_whole_parameters(
        self, values: Mapping[str, Tensor] | None = None, destinations: Mapping[str, Tensor] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        self.wait_for_weights()
        if self.world.is_first:
            parameters: Mapping[str, Tensor] = self.parameters
            yield from (parameters if values is None else values).items()

    def slice_own_rows(self, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return whole

    def materialize(self, values: Callable[[], Callable[[str], Tensor]]) -> None:
        """Do nothing: the model was built with its values."""

    @torch.no_grad()
    def check_replicas_equal(self) -> None:
        """Compare fingerprints of all weights over the ranks. Waits for the device.

        Raises:
            ValueError: on every rank; names the first parameter that differs.
        """
        self.wait_for_weights()
        check_equal(self.parameters, self.world)


def check_equal(parameters: Mapping[str, Tensor], world: World) -> None:
    """Compare fingerprints of parameters that all ranks have.

    Raises:
        ValueError: on every rank; names the first parameter that differs.
    """
    if world.is_single_process or not parameters:
        return
    own = torch.stack([_fingerprint(parameter) for parameter in parameters.values()]).cpu()
    all_ranks = [torch.empty_like(own) for _ in range(world.size)]
    dist.all_gather(all_ranks, own, group=world.group)
    differs = torch.stack([(of_rank != all_ranks[0]).any(1) for of_rank in all_ranks])  # [ranks, parameters]
    if not differs.any():
        return
    first = int(differs.any(0).nonzero()[0])
    ranks = ", ".join(str(rank) for rank in range(world.size) if differs[rank, first])
    raise ValueError(
        f"the ranks have different weights: {list(parameters)[first]} of rank {ranks} differs from rank 0, as do "
        f"{int(differs.any(0).sum())} parameters of {len(parameters)} in all. Resume from an earlier checkpoint; a "
        "processor or a link may be faulty"
    )


def check_names(whole: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """
    Raises:
        ValueError: the names of the weights are not those of the model.
    """
    if whole.keys() != expected.keys():
        raise ValueError(f"weights do not fit the model: {sorted(whole.keys() ^ expected.keys())}")


@torch.no_grad()
def broadcast_from_first(parameters: Iterable[Tensor], model: nn.Module, world: World) -> None:
    """Copy parameters, and the buffers of a model, of rank 0 to all ranks, in place."""
    if world.is_single_process:
        return
    pending: list[tuple[Any, Tensor, Tensor]] = []
    for tensor in (*parameters, *model.buffers()):
        sent = tensor.detach().contiguous()
        pending.append((dist.broadcast(sent, group_src=0, group=world.group, async_op=True), sent, tensor))
    for work, sent, tensor in pending:
        work.wait()
        if sent.data_ptr() != tensor.data_ptr():
            tensor.copy_(sent)


def _fingerprint(tensor: Tensor) -> Tensor:
    """Return two sums of the tensor's bits modulo 2^64, [2]: plain, and weighted by row so that order counts."""
    if not tensor.numel():
        return torch.zeros(2, dtype=torch.int64, device=tensor.device)
    bits = tensor.detach().contiguous().view(INTEGER_DTYPES[tensor.element_size()])
    by_row = bits.reshape(len(bits) if bits.dim() and len(bits) else 1, -1).sum(1, dtype=torch.int64)
    weights = torch.arange(1, len(by_row) + 1, device=by_row.device)
    return torch.stack([by_row.sum(), (by_row * weights).sum()])
