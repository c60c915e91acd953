"""Data parallelism with sharded optimizer state (ZeRO stage 1, Rajbhandari et al. 2020, arXiv:1910.02054).

Each rank keeps and updates a shard of every bucket: gradients are reduce-scattered during the backward, the norm is
computed from all shards, and updated weights are all-gathered in the order in which the next forward reads them. That
forward waits for each unit's weights just before the unit. Over W ranks each sends and receives (W - 1) / W of all
gradients and of all weights in a step, as an all-reduce of the gradients would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config.training.parallel import DDP
from ddp.buckets import (
    Bucket,
    BucketSlice,
    ParameterUnit,
    lay_out_buckets,
    reversed_units,
    trainable_by_unit,
    view_of_slice,
)
from ddp.gradient_reducer import GradientReducer, scale_to_norm
from ddp.mesh import Shard
from ddp.process_group import World
from ddp.replicas import Replicated, broadcast_from_first


class BucketShard:
    """A rank's shard of a bucket: weights that an optimizer updates, their gradients, and the collectives of both.

    Args:
        use_all_to_all: reduce-scatter by an all-to-all and a sum here, in rank order. gloo's own reduce-scatter is an
            all-reduce, which sends twice the bytes.
    """

    def __init__(self, bucket: Bucket, world: World, *, use_all_to_all: bool) -> None:
        self.bucket, self.group, rank = bucket, world.group, world.rank
        self.weights = torch.zeros_like(bucket.memory[rank])
        self.gradients = torch.zeros_like(self.weights)
        self._received = torch.empty_like(bucket.memory) if use_all_to_all else None
        self._is_gathering = False
        self.slices = {
            name: piece for name, slices in bucket.layout.slices.items() for piece in slices if piece.rank == rank
        }
        parameters = bucket.parameters
        self.trainable_parameters = {
            name: nn.Parameter(view_of_slice(self.weights, piece, parameters[name]))
            for name, piece in self.slices.items()
        }
        self._gradient_views = {
            name: view_of_slice(self.gradients, piece, parameters[name]) for name, piece in self.slices.items()
        }

    def reduce_scatter(self) -> None:
        """Start the reduce-scatter of the bucket's gradients."""
        memory = self.bucket.memory
        if self._received is not None:
            self.bucket.work = dist.all_to_all_single(self._received, memory, async_op=True, group=self.group)
        else:
            self.bucket.work = dist.reduce_scatter_tensor(
                self.gradients, memory.view(-1), async_op=True, group=self.group
            )

    def sum_received_gradients(self) -> None:
        """Finish the reduce-scatter after its wait: sum what the all-to-all brought."""
        if self._received is not None:
            torch.sum(self._received, 0, out=self.gradients)

    def assign_gradients(self, used: set[str]) -> None:
        """Set ``grad`` of the trainable parameters in ``used``, and None on the others."""
        for name, parameter in self.trainable_parameters.items():
            parameter.grad = self._gradient_views[name] if name in used else None

    def start_weight_gather(self) -> None:
        """Start the all-gather of weights into the bucket's buffer, whose gradients are no longer needed."""
        self.finish_weight_gather()
        self.bucket.work = dist.all_gather_into_tensor(
            self.bucket.memory.view(-1), self.weights, async_op=True, group=self.group
        )
        self._is_gathering = True

    def finish_weight_gather(self) -> None:
        """Wait for a pending all-gather and copy the weights into the model's parameters."""
        if self._is_gathering:
            self._is_gathering = False
            self.bucket.wait()
            self.bucket.copy_to_parameters()

    @torch.no_grad()
    def copy_from_model(self) -> None:
        """Copy the model's weights into the shard."""
        for name, piece in self.slices.items():
            whole = self.bucket.parameters[name].detach()
            self.trainable_parameters[name].copy_(whole[piece.start : piece.end] if whole.dim() else whole)


def _make_wait_hook(shards: list[BucketShard]) -> Callable[[nn.Module, Any], None]:
    def before_forward(module: nn.Module, inputs: Any) -> None:
        for shard in shards:
            shard.finish_weight_gather()

    return before_forward


class ShardedDataParallel(Replicated):
    """A `parallelism.Parallelism` whose optimizers are built over this rank's shard of the parameters.

    Parameters are cut by rows; those that ``requires_whole_matrix`` selects stay whole and are spread over the ranks by
    size. Each rank's shard is authoritative; the model's parameters are refreshed from the shards after each step.
    """

    has_all_updates = False

    def __init__(
        self,
        model: nn.Module,
        config: DDP,
        world: World,
        device: torch.device,
        units: Sequence[ParameterUnit],
        *,
        requires_whole_matrix: Callable[[str], bool],
    ) -> None:
        """
        Raises:
            ValueError: gloo with tensors on a GPU, which it cannot reduce-scatter.
        """
        if device.type == "cuda" and config.backend == "gloo":
            raise ValueError(
                'parallel.backend = "gloo" cannot reduce-scatter gradients on a GPU: set it to "auto", or set '
                "parallel.shard_optimizer = false"
            )
        super().__init__(model, world, units)
        broadcast_from_first(self.parameters.values(), model, world)
        by_unit = trainable_by_unit(model, units)
        parameters = reversed_units(by_unit)
        layouts = lay_out_buckets(parameters, world.size, config.bucket_mib * 2**20, requires_whole_matrix)
        self.shards = [
            BucketShard(Bucket(layout, parameters, device), world, use_all_to_all=device.type != "cuda")
            for layout in layouts
        ]
        self._shard_of_parameter = {name: shard for shard in self.shards for name in shard.bucket.parameters}
        shard_of_bucket = {id(shard.bucket): shard for shard in self.shards}
        for (module, _), unit_parameters in zip(units, by_unit, strict=True):
            if unit_parameters:
                unit_shards = list(dict.fromkeys(self._shard_of_parameter[name] for name in unit_parameters))
                module.register_forward_pre_hook(_make_wait_hook(unit_shards))
        self.reducer = GradientReducer(
            [shard.bucket for shard in self.shards],
            lambda bucket: shard_of_bucket[id(bucket)].reduce_scatter(),
            world,
            before_first_gradient=self.wait_for_weights,
        )
        # Parameters of which this rank has no row are left out.
        own = {name: rows for shard in self.shards for name, rows in shard.trainable_parameters.items()}
        self._trainable = {name: own[name] for name in self.parameters if name in own}
        self.on_weights_replaced()

    def shard_of(self, name: str) -> Shard:
        shard, shape = self._shard_of_parameter[name], self.parameters[name].shape
        if name in shard.bucket.layout.whole_names:
            return Shard.whole(shape)
        piece: BucketSlice = shard.slices[name]
        return Shard.rows(shape, piece.start, piece.end)

    def backward(self, is_last: bool) -> AbstractContextManager[None]:
        return self.reducer.backward(is_last)

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        used = self.reducer.wait()
        for shard in self.shards:
            shard.sum_received_gradients()
        gradients = [shard.gradients for shard in self.shards]
        squared_norm = torch.nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(squared_norm, group=self.world.group)
        norm = squared_norm.sqrt()
        scale_to_norm(gradients, norm, max_norm)
        for shard in self.shards:
            shard.assign_gradients(used)
        return norm

    def start_weight_gather(self) -> None:
        for shard in reversed(self.shards):  # in the order in which the next forward reads them
            shard.start_weight_gather()

    def wait_for_weights(self) -> None:
        for shard in reversed(self.shards):
            shard.finish_weight_gather()

    def on_weights_replaced(self) -> None:
        """Copy the model's weights, which were replaced on all ranks, into the shards."""
        self.wait_for_weights()
        for shard in self.shards:
            shard.copy_from_model()
