"""Choose the strategy of a run; and plain data parallelism, where every rank has everything and gradients are summed
during the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import assert_never

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config.training.parallel import DDP, FSDP, Parallel, SingleProcess
from ddp.buckets import Bucket, ParameterUnit, lay_out_buckets, reversed_units, trainable_by_unit
from ddp.gradient_reducer import GradientReducer, scale_to_norm
from ddp.parallelism import NoParallel, Parallelism
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
    """Apply the strategy of the ``[parallel]`` section to a model.

    Args:
        units: modules in execution order, each with the names of the parameters that it is the first to read. Every
            parameter is in a unit; one that several units name belongs to the first.
        requires_whole_matrix: whether the optimizer updates the parameter of a name as a whole matrix; others may be
            cut by rows.
        dtype: dtype of matrix products, in which FSDP gathers weights.

    Raises:
        ValueError: the backend does not support the strategy; names the key.
    """

    def build_strategy(replicas: World, own_units: Sequence[ParameterUnit]) -> Parallelism:
        if replicas.is_single_process:
            return NoParallel(model, replicas, own_units)
        return apply_parallelism(
            model, parallel, replicas, device, own_units, requires_whole_matrix=requires_whole_matrix, dtype=dtype
        )

    match parallel:
        case _ if world.mesh.is_divided:
            from ddp.mesh_parallel import MeshParallel

            assert not isinstance(parallel, SingleProcess)
            return MeshParallel(model, parallel, world, device, units, build_strategy)
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
            return DataParallel(model, parallel, world, device, units)
        case FSDP():
            from ddp.fully_sharded import FullySharded

            return FullySharded(model, parallel, world, device, units, dtype=dtype)
        case _:
            assert_never(parallel)
