"""Weights that every rank has: made the same at the start, and whether they still are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.process_group import World


class Replicated:
    """A model of which every rank has all weights: what the strategies that keep it so have in common."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self.model = model
        self.world = world

    def wait_for_weights(self) -> None:
        """Nothing is under way."""

    def on_weights_replaced(self) -> None:
        """The model's weights were set from outside, on all ranks alike: nothing else has to know."""

    @torch.no_grad()
    def set_weights(self, whole: Mapping[str, Tensor]) -> None:
        """Go on with these weights, the same on all ranks.

        Raises:
            ValueError: they are not those of the model's names.
        """
        self.wait_for_weights()
        parameters = dict(self.model.named_parameters())
        check_names(whole, parameters)
        for name, parameter in parameters.items():
            parameter.copy_(whole[name])
        self.on_weights_replaced()

    def iterate_whole_parameters(self, values: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """The model's parameters, or ``values`` in place of them, on the first rank; nothing elsewhere."""
        self.wait_for_weights()
        if self.world.is_first:
            named: Mapping[str, Tensor] = dict(self.model.named_parameters())
            yield from (named if values is None else values).items()

    def slice_own_rows(self, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """All of them."""
        return whole

    def check_replicas_equal(self) -> None:
        """Compare all weights over the ranks, bit by bit as far as sums can. Waits for the device.

        Raises:
            ValueError: on every rank, and names the first parameter of which a rank has another value.
        """
        self.wait_for_weights()
        check_replicas_equal(self.model, self.world)


def check_names(whole: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """
    Raises:
        ValueError: weights and model differ in names.
    """
    if whole.keys() != expected.keys():
        raise ValueError(f"weights do not fit the model: {sorted(whole.keys() ^ expected.keys())}")


INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by size in bytes."""


@torch.no_grad()
def broadcast_from_first(model: nn.Module, world: World) -> None:
    """Parameters and buffers of rank 0 become those of all ranks, in place."""
    if world.is_single_process:
        return
    pending: list[tuple[Any, Tensor, Tensor]] = []
    for tensor in (*model.parameters(), *model.buffers()):
        sent = tensor.detach().contiguous()
        pending.append((dist.broadcast(sent, src=0, async_op=True), sent, tensor))
    for work, sent, tensor in pending:
        work.wait()
        if sent.data_ptr() != tensor.data_ptr():
            tensor.copy_(sent)


@torch.no_grad()
def check_replicas_equal(model: nn.Module, world: World) -> None:
    """Compare all weights over the ranks, bit by bit as far as sums can. Waits for the device.

    Raises:
        ValueError: on every rank, and names the first parameter of which a rank has another value.
    """
    named = dict(model.named_parameters())
    if world.is_single_process or not named:
        return
    mine = torch.stack([_fingerprint(parameter) for parameter in named.values()]).cpu()
    all_ranks = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(all_ranks, mine)
    differs = torch.stack([(theirs != all_ranks[0]).any(1) for theirs in all_ranks])  # by rank and parameter
    if not differs.any():
        return
    first = int(differs.any(0).nonzero()[0])
    others = [rank for rank in range(world.size) if differs[rank, first]]
    raise ValueError(
        f"the ranks have different weights: {list(named)[first]} of rank {', '.join(map(str, others))} is not that of "
        f"rank 0, and so are {int(differs.any(0).sum())} parameters of {len(named)}. Resume from a checkpoint that was "
        "written before; a processor or a link may be faulty"
    )


def _fingerprint(tensor: Tensor) -> Tensor:
    """Two sums of its bits, in whole numbers modulo 2 to the 64: plain, and weighted by row."""
    bits = tensor.detach().contiguous().view(INTEGER_DTYPES[tensor.element_size()])
    by_row = bits.reshape(len(bits) if bits.dim() and len(bits) else 1, -1).sum(1, dtype=torch.int64)
    weights = torch.arange(1, len(by_row) + 1, device=by_row.device)
    return torch.stack([by_row.sum(), (by_row * weights).sum()])
