"""What the training loop sees of ranks, whatever the strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, assert_never

import torch
from torch import Tensor, nn

from config.parallel import DDP, FSDP, Parallel, Single
from ddp.buckets import Unit
from ddp.process_group import SINGLE, Ranks
from ddp.replicas import Replicated


class Parallelism(Protocol):
    """A model trained by one rank or many, and what the loop does around its step, in this order: each micro-batch
    within `backward`, `clip`, the optimizer over `trained`, `start_gather`. All ranks make the same calls."""

    @property
    def ranks(self) -> Ranks:
        """All of them."""

    def trained(self) -> dict[str, nn.Parameter]:
        """What optimizers are built over, by the model's names: the parameters that require gradients, or this rank's
        rows of them, which may be none."""

    def has_whole(self, name: str) -> bool:
        """Whether `trained` has the whole parameter, not consecutive rows of it."""

    def row_range(self, name: str) -> tuple[int, int]:
        """Rows of the whole parameter that `trained` has, the last one excluded."""

    def backward(self, is_last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch. Gradients travel during the last one of a step only."""

    def clip(self, max_norm: float) -> Tensor:
        """Wait for the gradients, which are sums over the ranks, and scale them to this norm if theirs is larger.

        Returns their norm before, over the whole model, 0-d on the device. The parameters of `trained` then have their
        gradients; those that no rank used have none.
        """

    def start_gather(self) -> None:
        """After the optimizer: new weights travel. Returns at once; the next forward waits for what it reads."""

    def wait_weights(self) -> None:
        """All weights of the model are those of the last update; to be called before they are read but by a forward."""

    def set_weights(self, whole: Mapping[str, Tensor]) -> None:
        """Go on with these weights, which are whole and the same on all ranks.

        Raises:
            ValueError: they are not those of the model's names.
        """

    def whole_parameters(self, values: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """All parameters of the model, or ``values`` of their names in this rank's form (averages of them, say), whole,
        one after the other: on the first rank; nothing elsewhere. All ranks iterate."""

    def own_rows(self, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Whole values in the form that the model's parameters have on this rank."""

    def state_for_saving(self, state: dict[str, Tensor]) -> dict[str, Any]:
        """Optimizer state of `trained` by ``parameter.key``, for `torch.distributed.checkpoint`: rows of a parameter
        become a DTensor of the whole shape; whole parameters' and scalars stay."""

    def check_replicas(self) -> None:
        """Where every rank has all weights: are they equal?

        Raises:
            ValueError: on every rank, and names the first parameter that differs.
        """


class Alone(Replicated):
    """One process: nothing travels."""

    def __init__(self, model: nn.Module, ranks: Ranks = SINGLE) -> None:
        super().__init__(model, ranks)
        self._trained = {name: each for name, each in model.named_parameters() if each.requires_grad}

    def trained(self) -> dict[str, nn.Parameter]:
        """The model's own parameters, those that require gradients."""
        return self._trained

    def has_whole(self, name: str) -> bool:
        """Always."""
        return True

    def row_range(self, name: str) -> tuple[int, int]:
        """All rows."""
        parameter = self._trained[name]
        return 0, len(parameter) if parameter.dim() else 1

    def backward(self, is_last: bool) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def clip(self, max_norm: float) -> Tensor:
        """As torch does it."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def start_gather(self) -> None:
        """Nothing."""

    def state_for_saving(self, state: dict[str, Tensor]) -> dict[str, Any]:
        """As it is."""
        return dict(state)


def apply_parallelism(
    model: nn.Module,
    parallel: Parallel,
    ranks: Ranks,
    device: torch.device,
    units: Sequence[Unit],
    *,
    must_be_whole: Callable[[str], bool],
    dtype: torch.dtype = torch.float32,
) -> Parallelism:
    """Spread a model over the ranks, as the config says.

    ``units`` are modules in the order of execution, each with the names of the parameters that it is the first to
    read: a parameter of no unit is an error, and one that several name belongs to the first. ``must_be_whole`` says
    which parameters are updated as whole matrices; others may be cut by rows. ``dtype`` is that of the products, in
    which FSDP gathers weights.

    Raises:
        ValueError: the strategy cannot be had with this backend.
    """
    match parallel:
        case Single():
            return Alone(model)
        case DDP() if ranks.is_alone:
            return Alone(model, ranks)
        case DDP(shard_optimizer=True):
            from ddp.sharded_data_parallel import ShardedDataParallel

            return ShardedDataParallel(model, parallel, ranks, device, units, must_be_whole=must_be_whole)
        case DDP():
            from ddp.data_parallel import DataParallel

            return DataParallel(model, parallel, ranks, device, units)
        case FSDP():
            from ddp.fully_sharded import FullySharded

            return FullySharded(model, parallel, ranks, device, units, dtype=dtype)
        case _:
            assert_never(parallel)
