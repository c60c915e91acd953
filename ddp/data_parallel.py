"""Data parallelism: every rank has the whole model, and gradients are summed over the ranks during the backward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config.training.parallel import DDP
from ddp.buckets import Bucket, ParameterUnit, lay_out_buckets, reversed_units, trainable_by_unit
from ddp.gradient_reducer import GradientReducer, scale_to_norm
from ddp.process_group import World
from ddp.replicas import Replicated, broadcast_from_first


class DataParallel(Replicated):
    """A `parallelism.Parallelism` that all-reduces gradients in buckets.

    Gradients are summed, never averaged: the loss is already divided by the denominator of all ranks.
    """

    def __init__(
        self, model: nn.Module, config: DDP, world: World, device: torch.device, units: Sequence[ParameterUnit]
    ) -> None:
        super().__init__(model, world, units)
        broadcast_from_first(self.parameters.values(), model, world)
        parameters = reversed_units(trainable_by_unit(model, units))
        layouts = lay_out_buckets(parameters, 1, config.bucket_mib * 2**20)
        self.reducer = GradientReducer([Bucket(layout, parameters, device) for layout in layouts], self._reduce, world)

    def _reduce(self, bucket: Bucket) -> None:
        bucket.work = dist.all_reduce(bucket.memory, async_op=True, group=self.world.group)

    def backward(self, is_last: bool) -> AbstractContextManager[None]:
        return self.reducer.backward(is_last)

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        used = self.reducer.wait()
        memories = [bucket.memory for bucket in self.reducer.buckets]
        norm = torch.nn.utils.get_total_norm(memories)
        scale_to_norm(memories, norm, max_norm)
        for bucket in self.reducer.buckets:
            for name, parameter in bucket.parameters.items():
                parameter.grad = bucket.views(name)[0] if name in used else None
        return norm
