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
from ddp.buckets import Bucket, Piece, Unit, in_backward_order, plan_buckets, trained_by_unit, view_of_piece
from ddp.data_parallel import scale_to_norm
from ddp.gradient_reducer import GradientFlow
from ddp.process_group import Ranks
from ddp.replicas import Replicated, broadcast_from_first


class OwnPart:
    """A rank's part of a bucket: weights that an optimizer updates, their gradients, and the collectives of both."""

    def __init__(self, bucket: Bucket, rank: int, *, by_exchange: bool = False) -> None:
        """``by_exchange``: gloo's own reduce-scatter is an all-reduce, which sends twice the bytes; so parts are
        exchanged, and summed here in the order of ranks."""
        self.bucket = bucket
        self.weights = torch.zeros_like(bucket.memory[rank])
        self.gradients = torch.zeros_like(self.weights)
        self._received = torch.empty_like(bucket.memory) if by_exchange else None
        self.is_gathering = False
        self.pieces = {
            name: piece for name, pieces in bucket.plan.pieces.items() for piece in pieces if piece.rank == rank
        }
        parameters = bucket.parameters
        self.trained = {
            name: nn.Parameter(view_of_piece(self.weights, piece, parameters[name]))
            for name, piece in self.pieces.items()
        }
        self._gradient_views = {
            name: view_of_piece(self.gradients, piece, parameters[name]) for name, piece in self.pieces.items()
        }

    def reduce_scatter(self) -> None:
        """Start it."""
        memory = self.bucket.memory
        if self._received is not None:
            self.bucket.work = dist.all_to_all_single(self._received, memory, async_op=True)
        else:
            self.bucket.work = dist.reduce_scatter_tensor(self.gradients, memory.view(-1), async_op=True)

    def finish_gradients(self) -> None:
        """After the wait: the own gradients are the sums over all ranks."""
        if self._received is not None:
            torch.sum(self._received, 0, out=self.gradients)

    def assign_gradients(self, used: set[str]) -> None:
        """To the parts that are trained, of those parameters that were used on any rank."""
        for name, parameter in self.trained.items():
            parameter.grad = self._gradient_views[name] if name in used else None

    def gather(self) -> None:
        """Start it: the weights of all ranks come into the bucket's memory, whose gradients are spent."""
        self.finish_weights()
        self.bucket.work = dist.all_gather_into_tensor(self.bucket.memory.view(-1), self.weights, async_op=True)
        self.is_gathering = True

    def finish_weights(self) -> None:
        """Wait for the gather, if there is one, and give the model's parameters their values."""
        if self.is_gathering:
            self.is_gathering = False
            self.bucket.wait()
            self.bucket.copy_out()

    @torch.no_grad()
    def adopt(self) -> None:
        """The own weights become those of the model."""
        for name, piece in self.pieces.items():
            whole = self.bucket.parameters[name].detach()
            self.trained[name].copy_(whole[piece.start : piece.end] if whole.dim() else whole)


class OptimizerStateSharding:
    """Which rank updates what, and the traffic of it.

    Parameters are cut by rows, but for those that must be whole, which are spread by size.
    """

    def __init__(
        self,
        model: nn.Module,
        config: DDP,
        ranks: Ranks,
        device: torch.device,
        units: Sequence[Unit],
        must_be_whole: Callable[[str], bool],
    ) -> None:
        by_unit = trained_by_unit(model, units)
        parameters = in_backward_order(by_unit)
        plans = plan_buckets(parameters, ranks.world_size, config.bucket_mib * 2**20, must_be_whole)
        by_exchange = device.type != "cuda"
        self.parts = [OwnPart(Bucket(plan, parameters, device), ranks.rank, by_exchange=by_exchange) for plan in plans]
        self.part_of = {name: part for part in self.parts for name in part.bucket.parameters}
        self._part_of_bucket = {id(part.bucket): part for part in self.parts}
        for (module, _), mine in zip(units, by_unit, strict=True):
            if mine:
                needed = list(dict.fromkeys(self.part_of[name] for name in mine))
                module.register_forward_pre_hook(_waiting_for(needed))

    def reduce_scatter(self, bucket: Bucket) -> None:
        """Of a bucket that is complete."""
        self._part_of_bucket[id(bucket)].reduce_scatter()

    def gather(self) -> None:
        """Of all weights, the first to be read first; returns at once."""
        for part in reversed(self.parts):
            part.gather()

    def finish_weights(self) -> None:
        """Of all parts."""
        for part in reversed(self.parts):
            part.finish_weights()


def _waiting_for(parts: list[OwnPart]) -> Callable[[nn.Module, Any], None]:
    def before_forward(module: nn.Module, inputs: Any) -> None:
        for part in parts:
            part.finish_weights()

    return before_forward


class ShardedDataParallel(Replicated):
    """`data_parallel.DataParallel` whose optimizer is built over this rank's part alone; a `parallelism.Parallelism`.

    The parts are the truth; the model's parameters are copies, made anew after each step.
    """

    def __init__(
        self,
        model: nn.Module,
        config: DDP,
        ranks: Ranks,
        device: torch.device,
        units: Sequence[Unit],
        *,
        must_be_whole: Callable[[str], bool],
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
        super().__init__(model, ranks)
        self._meshes: dict[str, Any] = {}
        broadcast_from_first(model, ranks)
        self.sharding = OptimizerStateSharding(model, config, ranks, device, units, must_be_whole)
        buckets = [part.bucket for part in self.sharding.parts]
        self.flow = GradientFlow(buckets, self.sharding.reduce_scatter, begin=self.wait_weights)
        self.mark_ready = self.flow.mark_ready
        found = {name: part for each in self.sharding.parts for name, part in each.trained.items()}
        self._trained = {name: found[name] for name, _ in model.named_parameters() if name in found}
        self.adopt_weights()

    def trained(self) -> dict[str, nn.Parameter]:
        """This rank's parts, without the parameters of which it has none."""
        return self._trained

    def has_whole(self, name: str) -> bool:
        """Whether the parameter belongs to one rank."""
        return name in self.sharding.part_of[name].bucket.plan.whole

    def row_range(self, name: str) -> tuple[int, int]:
        """Rows of the parameter that this rank has, the last one excluded."""
        piece: Piece = self.sharding.part_of[name].pieces[name]
        return piece.start, piece.end

    def backward(self, is_last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch: gradients travel during the last one."""
        return self.flow.backward(is_last)

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Wait for the gradients, put them into the parts, and scale them to this norm if theirs is larger.

        Returns their norm before, over all parameters of the model, 0-d on the device.
        """
        used = self.flow.wait()
        parts = self.sharding.parts
        for part in parts:
            part.finish_gradients()
        gradients = [part.gradients for part in parts]
        squares = torch.nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(squares)
        norm = squares.sqrt()
        scale_to_norm(gradients, norm, max_norm)
        for part in parts:
            part.assign_gradients(used)
        return norm

    def start_gather(self) -> None:
        """Send the new weights to all ranks; returns at once."""
        self.sharding.gather()

    def wait_weights(self) -> None:
        """All weights of the model are those of the last update."""
        self.sharding.finish_weights()

    def adopt_weights(self) -> None:
        """The model's weights were set from outside, on all ranks alike: go on with them."""
        self.wait_weights()
        for part in self.sharding.parts:
            part.adopt()

    def state_for_saving(self, state: dict[str, Tensor]) -> dict[str, Any]:
        """Optimizer state by ``parameter.key``; what is cut as its parameter becomes a DTensor of the whole shape."""
        return {key: self._for_saving(key, value) for key, value in state.items()}

    def _for_saving(self, key: str, value: Tensor) -> Any:
        name = key.rpartition(".")[0]
        part = self.sharding.part_of[name]
        if self.has_whole(name) or not value.dim():
            return value
        whole = part.bucket.parameters[name]
        assert value.shape == self._trained[name].shape, f"{key} has another shape than its parameter"
        return self._as_rows(value, whole)

    def _as_rows(self, value: Tensor, whole: Tensor) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        kind = value.device.type
        if kind not in self._meshes:
            self._meshes[kind] = init_device_mesh(kind, (self.ranks.world_size,))
        shape = whole.shape
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(value, self._meshes[kind], [Shard(0)], run_check=False, shape=shape, stride=stride)
