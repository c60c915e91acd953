"""The interface between the training loop and a parallelism strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ddp.all_to_all_rows import AllToAllRows
from ddp.buckets import ParameterUnit
from ddp.mesh import Shard
from ddp.process_group import SINGLE_PROCESS, World
from ddp.replicas import Replicated


def local_values(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, else the tensor itself; it shares memory and has no gradient history."""
    values: Any = tensor.detach()
    local: Tensor = values.to_local() if hasattr(values, "to_local") else values
    return local


class Parallelism(Protocol):
    """A model that one rank or many train.

    The loop calls, in each step: `backward` around each micro-batch, `clip`, the optimizers over
    `trainable_parameters`, `start_weight_gather`. All ranks make the same calls in the same order.
    """

    @property
    def world(self) -> World:
        """The ranks of the run."""

    @property
    def row_exchange(self) -> AllToAllRows | None:
        """Gathers matrices for an optimizer that updates them whole; None: `trainable_parameters` holds them whole."""

    @property
    def has_all_weights(self) -> bool:
        """True if every rank has all weights."""

    @property
    def has_all_updates(self) -> bool:
        """True if every rank makes all updates, so that all have the same state of the optimizer."""

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that optimizers update, by the model's names.

        These are parameters that require gradients, or this rank's rows of them, which may be none.
        """

    @property
    def whole_shapes(self) -> Mapping[str, torch.Size]:
        """Shapes of the whole parameters of all ranks, by the model's names."""

    def shard_of(self, name: str) -> Shard:
        """Return the part of the whole parameter that `trainable_parameters` holds. It may have more rows than the
        part: padding, which stays zero."""

    def count_copies(self, name: str) -> int:
        """Return the number of ranks whose model has the same part of a parameter."""

    def backward(self, is_last: bool) -> AbstractContextManager[None]:
        """Wrap the forward and backward of a micro-batch; ``is_last``: it is the last one of the step."""

    def clip(self, max_norm: float) -> Tensor:
        """Wait for the gradients, summed over the ranks, and clip their norm to ``max_norm``.

        Afterwards `trainable_parameters` have their gradients; a parameter that no rank used has none.

        Returns:
            The norm before clipping, over the whole model, 0-d on the device.
        """

    def start_weight_gather(self) -> None:
        """Start to send updated weights to other ranks. Returns at once; the next forward waits for what it reads."""

    def wait_for_weights(self) -> None:
        """Wait until the model's weights are those of the last update. Call this before reading them directly."""

    def set_weights(self, whole: Mapping[str, Tensor]) -> None:
        """Replace the model's trained weights; ``whole`` has whole parameters and is the same on all ranks.

        Raises:
            ValueError: the names are not those of the trained parameters.
        """

    def iterate_whole_parameters(
        self, values: Mapping[str, Tensor] | None = None, destinations: Mapping[str, Tensor] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Iterate over whole parameters on rank 0, and over nothing on other ranks. All ranks iterate.

        Args:
            values: tensors to use in place of the parameters, by name, in this rank's form (averages, for example), of
                all or some of the parameters.
            destinations: where rank 0 gathers parameters that no rank has whole, by name, on the CPU. None: in new
                memory.
        """

    def slice_own_rows(self, whole: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return whole values in the form that the model's parameters have on this rank."""

    def materialize(self, values: Callable[[], Callable[[str], Tensor]]) -> None:
        """Allocate a model that was built on ``meta`` and set its values; do nothing for any other.

        Args:
            values: called once; returns the function from the name of a parameter or buffer to its whole value, on the
                CPU, in any dtype.
        """

    def check_replicas_equal(self) -> None:
        """Check that all ranks have equal weights, where each has all of them.

        Raises:
            ValueError: on every rank; names the first parameter that differs.
        """


class NoParallel(Replicated):
    """The `Parallelism` of a single process."""

    def __init__(
        self, model: nn.Module, world: World = SINGLE_PROCESS, units: Sequence[ParameterUnit] | None = None
    ) -> None:
        super().__init__(model, world, units)

    def backward(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def clip(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.parameters.values(), max_norm)
