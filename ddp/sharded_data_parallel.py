"""Optimizer state sharded over the ranks (ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054, stage 1).

Each rank keeps and updates a part of every bucket: gradients are reduce-scattered while the backward runs, the norm is
made of all parts, and the new weights are all-gathered in the order in which the next forward reads them, which waits
for each unit's weights when it comes to the unit. Over W ranks each sends and receives (W - 1) / W of all gradients and
of all weights in a step, as an all-reduce of the gradients would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config.parallel import DDP
from ddp.buckets import (
    Bucket,
    BucketSlice,
    ParameterUnit,
    lay_out_buckets,
    reversed_units,
    trainable_by_unit,
    view_of_slice,
)
from ddp.data_parallel import scale_to_norm
from ddp.gradient_reducer import GradientReducer
from ddp.process_group import World
from ddp.replicas import Replicated, broadcast_from_first


class BucketShard:
    """A rank's part of a bucket: weights that an optimizer updates, their gradients, and the collectives of both."""

    def __init__(self, bucket: Bucket, rank: int, *, use_all_to_all: bool = False) -> None:
        """``use_all_to_all``: gloo's own reduce-scatter is an all-reduce, which sends twice the bytes; so parts are
        exchanged, and summed here in the order of ranks."""
        self.bucket = bucket
        self.weights = torch.zeros_like(bucket.memory[rank])
        self.gradients = torch.zeros_like(self.weights)
        self._received = torch.empty_like(bucket.memory) if use_all_to_all else None
        self.is_gathering = False
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
        """Start it."""
        memory = self.bucket.memory
        if self._received is not None:
            self.bucket.work = dist.all_to_all_single(self._received, memory, async_op=True)
        else:
            self.bucket.work = dist.reduce_scatter_tensor(self.gradients, memory.view(-1), async_op=True)

    def sum_received_gradients(self) -> None:
        """After the wait: the own gradients are the sums over all ranks."""
        if self._received is not None:
            torch.sum(self._received, 0, out=self.gradients)

    def assign_gradients(self, used: set[str]) -> None:
        """To the parts that are trained, of those parameters that were used on any rank."""
        for name, parameter in self.trainable_parameters.items():
            parameter.grad = self._gradient_views[name] if name in used else None

    def gather(self) -> None:
        """Start it: the weights of all ranks come into the bucket's memory, whose gradients are spent."""
        self.finish_weight_gather()
        self.bucket.work = dist.all_gather_into_tensor(self.bucket.memory.view(-1), self.weights, async_op=True)
        self.is_gathering = True

    def finish_weight_gather(self) -> None:
        """Wait for the gather, if there is one, and give the model's parameters their values."""
        if self.is_gathering:
            self.is_gathering = False
            self.bucket.wait()
            self.bucket.copy_to_parameters()

    @torch.no_grad()
    def copy_from_model(self) -> None:
        """The own weights become those of the model."""
        for name, piece in self.slices.items():
            whole = self.bucket.parameters[name].detach()
            self.trainable_parameters[name].copy_(whole[piece.start : piece.end] if whole.dim() else whole)


class ShardedBuckets:
    """Which rank updates what, and the traffic of it.

    Parameters are cut by rows, but for those that must be whole, which are spread by size.
    """

    def __init__(
        self,
        model: nn.Module,
        config: DDP,
        world: World,
        device: torch.device,
        units: Sequence[ParameterUnit],
        requires_whole_matrix: Callable[[str], bool],
    ) -> None:
        by_unit = trainable_by_unit(model, units)
        parameters = reversed_units(by_unit)
        plans = lay_out_buckets(parameters, world.size, config.bucket_mib * 2**20, requires_whole_matrix)
        use_all_to_all = device.type != "cuda"
        self.parts = [
            BucketShard(Bucket(layout, parameters, device), world.rank, use_all_to_all=use_all_to_all)
            for layout in plans
        ]
        self.shard_of = {name: part for part in self.parts for name in part.bucket.parameters}
        self._shard_of_bucket = {id(part.bucket): part for part in self.parts}
        for (module, _), mine in zip(units, by_unit, strict=True):
            if mine:
                needed = list(dict.fromkeys(self.shard_of[name] for name in mine))
                module.register_forward_pre_hook(_make_wait_hook(needed))

    def reduce_scatter(self, bucket: Bucket) -> None:
        """Of a bucket that is complete."""
        self._shard_of_bucket[id(bucket)].reduce_scatter()

    def gather(self) -> None:
        """Of all weights, the first to be read first; returns at once."""
        for part in reversed(self.parts):
            part.gather()

    def finish_weight_gather(self) -> None:
        """Of all parts."""
        for part in reversed(self.parts):
            part.finish_weight_gather()


def _make_wait_hook(parts: list[BucketShard]) -> Callable[[nn.Module, Any], None]:
    def before_forward(module: nn.Module, inputs: Any) -> None:
        for part in parts:
            part.finish_weight_gather()

    return before_forward


class ShardedDataParallel(Replicated):
    """`data_parallel.DataParallel` whose optimizer is built over this rank's part alone; a `parallelism.Parallelism`.

    The parts are the truth; the model's parameters are copies, made anew after each step.
    """

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
            ValueError: gloo for tensors on a GPU, which cannot exchange parts.
        """
        if device.type == "cuda" and config.backend == "gloo":
            raise ValueError(
                'parallel.backend = "gloo" cannot scatter gradients on a GPU: set it to "auto", or '
                "parallel.shard_optimizer = false"
            )
        super().__init__(model, world)
        self._meshes: dict[str, Any] = {}
        broadcast_from_first(model, world)
        self.sharding = ShardedBuckets(model, config, world, device, units, requires_whole_matrix)
        buckets = [part.bucket for part in self.sharding.parts]
        self.reducer = GradientReducer(
            buckets, self.sharding.reduce_scatter, before_first_gradient=self.wait_for_weights
        )
        self.on_gradient_ready = self.reducer.on_gradient_ready
        found = {name: part for each in self.sharding.parts for name, part in each.trainable_parameters.items()}
        self._trainable = {name: found[name] for name, _ in model.named_parameters() if name in found}
        self.on_weights_replaced()

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parts, without the parameters of which it has none."""
        return self._trainable

    def has_whole_parameter(self, name: str) -> bool:
        """Whether the parameter belongs to one rank."""
        return name in self.sharding.shard_of[name].bucket.layout.whole

    def row_range(self, name: str) -> tuple[int, int]:
        """Rows of the parameter that this rank has, the last one excluded."""
        piece: BucketSlice = self.sharding.shard_of[name].slices[name]
        return piece.start, piece.end

    def backward(self, is_last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch: gradients travel during the last one."""
        return self.reducer.backward(is_last)

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Wait for the gradients, put them into the parts, and scale them to this norm if theirs is larger.

        Returns their norm before, over all parameters of the model, 0-d on the device.
        """
        used = self.reducer.wait()
        parts = self.sharding.parts
        for part in parts:
            part.sum_received_gradients()
        gradients = [part.gradients for part in parts]
        squares = torch.nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(squares)
        norm = squares.sqrt()
        scale_to_norm(gradients, norm, max_norm)
        for part in parts:
            part.assign_gradients(used)
        return norm

    def start_weight_gather(self) -> None:
        """Send the new weights to all ranks; returns at once."""
        self.sharding.gather()

    def wait_for_weights(self) -> None:
        """All weights of the model are those of the last update."""
        self.sharding.finish_weight_gather()

    def on_weights_replaced(self) -> None:
        """The model's weights were set from outside, on all ranks alike: go on with them."""
        self.wait_for_weights()
        for part in self.sharding.parts:
            part.copy_from_model()

    def to_checkpoint_state(self, state: dict[str, Tensor]) -> dict[str, Any]:
        """Optimizer state by ``parameter.key``; what is cut as its parameter becomes a DTensor of the whole shape."""
        return {key: self._to_checkpoint_value(key, value) for key, value in state.items()}

    def _to_checkpoint_value(self, key: str, value: Tensor) -> Any:
        name = key.rpartition(".")[0]
        part = self.sharding.shard_of[name]
        if self.has_whole_parameter(name) or not value.dim():
            return value
        whole = part.bucket.parameters[name]
        assert value.shape == self._trainable[name].shape, f"{key} has another shape than its parameter"
        return self._as_dtensor(value, whole)

    def _as_dtensor(self, value: Tensor, whole: Tensor) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        kind = value.device.type
        if kind not in self._meshes:
            self._meshes[kind] = init_device_mesh(kind, (self.world.size,))
        shape = whole.shape
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(value, self._meshes[kind], [Shard(0)], run_check=False, shape=shape, stride=stride)
