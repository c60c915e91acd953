"""Data parallelism: every rank has the whole model, and gradients are summed over the ranks while the backward runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config.parallel import DDP
from ddp.buckets import Bucket, ParameterUnit, lay_out_buckets, reversed_units, trainable_by_unit
from ddp.gradient_reducer import GradientReducer
from ddp.process_group import World
from ddp.replicas import Replicated, broadcast_from_first


class DataParallel(Replicated):
    """A model whose gradients are those of the batches of all ranks together; a `parallelism.Parallelism`.

    Gradients are summed, never averaged: the loss is divided by the count of the whole step beforehand.
    """

    def __init__(
        self, model: nn.Module, config: DDP, world: World, device: torch.device, units: Sequence[ParameterUnit]
    ) -> None:
        super().__init__(model, world)
        self._trainable = {name: each for name, each in model.named_parameters() if each.requires_grad}
        broadcast_from_first(model, world)
        parameters = reversed_units(trainable_by_unit(model, units))
        plans = lay_out_buckets(parameters, 1, config.bucket_mib * 2**20)
        self.reducer = GradientReducer([Bucket(layout, parameters, device) for layout in plans], self._reduce)
        self.on_gradient_ready = self.reducer.on_gradient_ready

    @staticmethod
    def _reduce(bucket: Bucket) -> None:
        bucket.work = dist.all_reduce(bucket.memory, async_op=True)

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
        """Around forward and backward of a micro-batch: gradients travel during the last one."""
        return self.reducer.backward(is_last)

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Wait for the gradients, put them into the parameters, and scale them to this norm if theirs is larger.

        Returns their norm before, over all parameters, 0-d on the device.
        """
        used = self.reducer.wait()
        memories = [bucket.memory for bucket in self.reducer.buckets]
        norm = torch.nn.utils.get_total_norm(memories)
        scale_to_norm(memories, norm, max_norm)
        for bucket in self.reducer.buckets:
            for name, parameter in bucket.parameters.items():
                parameter.grad = bucket.views(name)[0] if name in used else None
        return norm

    def start_weight_gather(self) -> None:
        """Nothing: each rank has made all updates itself."""

    def to_checkpoint_state(self, state: dict[str, Tensor]) -> dict[str, Any]:
        """As it is: all ranks have all of it."""
        return dict(state)


def scale_to_norm(gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """As torch clips: by a factor of one at most, and without waiting for the device to know whether."""
    if gradients:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
