"""What the training loop sees of ranks, whatever the strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, assert_never

import torch
from torch import Tensor, nn

from config.parallel import DDP, FSDP, Parallel, SingleProcess
from ddp.buckets import ParameterUnit
from ddp.process_group import SINGLE_PROCESS, World
from ddp.replicas import Replicated


class Parallelism(Protocol):
    """A model trained by one rank or many, and what the loop does around its step, in this order: each micro-batch
    within `backward`, `clip`, the optimizer over `trained`, `start_weight_gather`. All ranks make the same calls."""

    @property
    def world(self) -> World:
        """All of them."""

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """What optimizers are built over, by the model's names: the parameters that require gradients, or this rank's
        rows of them, which may be none."""

    def has_whole_parameter(self, name: str) -> bool:
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

    def start_weight_gather(self) -> None:
        """After the optimizer: new weights travel. Returns at once; the next forward waits for what it reads."""

    def wait_for_weights(self) -> None:
        """All weights of the model are those of the last update; to be called before they are read but by a forward."""

    def set_weights(self, whole: Mapping[str, Tensor]) -> None:
        """Go on with these weights, which are whole and the same on all ranks.

        Raises:
            ValueError: they are not those of the model's names.
        """

    def iterate_whole_parameters(self, values: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """All parameters of the model, or ``values`` of their names in this rank's form (averages of them, say), whole,
        one after the other: on the first rank; nothing elsewhere. All ranks iterate."""

    def slice_own_rows(self, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Whole values in the form that the model's parameters have on this rank."""

    def to_checkpoint_state(self, state: dict[str, Tensor]) -> dict[str, Any]:
        """Optimizer state of `trained` by ``parameter.key``, for `torch.distributed.checkpoint`: rows of a parameter
        become a DTensor of the whole shape; whole parameters' and scalars stay."""

    def check_replicas_equal(self) -> None:
        """Where every rank has all weights: are they equal?

        Raises:
            ValueError: on every rank, and names the first parameter that differs.
        """


class NoParallel(Replicated):
    """One process: nothing travels."""

    def __init__(self, model: nn.Module, world: World = SINGLE_PROCESS) -> None:
        super().__init__(model, world)
        self._trainable = {name: each for name, each in model.named_parameters() if each.requires_grad}

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """The model's own parameters, those that require gradients."""
        return self._trainable

    def has_whole_parameter(self, name: str) -> bool:
        """Always."""
        return True

    def row_range(self, name: str) -> tuple[int, int]:
        """All rows."""
        parameter = self._trainable[name]
        return 0, len(parameter) if parameter.dim() else 1

    def backward(self, is_last: bool) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def clip(self, max_norm: float) -> Tensor:
        """As torch does it."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def start_weight_gather(self) -> None:
        """Nothing."""

    def to_checkpoint_state(self, state: dict[str, Tensor]) -> dict[str, Any]:
        """As it is."""
        return dict(state)


def apply_parallelism(
    model: nn.Module,
    parallel: Parallel,
    world: World,
    device: torch.device,
    units: Sequence[ParameterUnit],
    *,
    requires_whole_matrix: Callable[[str], bool],
    dtype: torch.dtype = torch.float32,
) -> Parallelism:
    """Spread a model over the ranks, as the config says.

    ``units`` are modules in the order of execution, each with the names of the parameters that it is the first to
    read: a parameter of no unit is an error, and one that several name belongs to the first. ``requires_whole_matrix`` says
    which parameters are updated as whole matrices; others may be cut by rows. ``dtype`` is that of the products, in
    which FSDP gathers weights.

    Raises:
        ValueError: the strategy cannot be had with this backend.
    """
    match parallel:
        case SingleProcess():
            return NoParallel(model)
        case DDP() if world.is_single_process:
            return NoParallel(model, world)
        case DDP(shard_optimizer=True):
            from ddp.sharded_data_parallel import ShardedDataParallel

            return ShardedDataParallel(
                model, parallel, world, device, units, requires_whole_matrix=requires_whole_matrix
            )
        case DDP():
            from ddp.data_parallel import DataParallel

            return DataParallel(model, parallel, world, device, units)
        case FSDP():
            from ddp.fully_sharded import FullySharded

            return FullySharded(model, parallel, world, device, units, dtype=dtype)
        case _:
            assert_never(parallel)
