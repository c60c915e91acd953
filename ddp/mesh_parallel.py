"""A model that several ranks hold together: matrices or experts are divided over a mesh, and a strategy of data
parallelism updates what the replicas of a part have in common.

Experts are outside of that strategy: each rank updates its own, whose gradients are all-reduced over the ranks that
have the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config.training.parallel import FSDP, MultiProcessOptions
from ddp.all_to_all_rows import AllToAllRows, TensorMatrixExchange
from ddp.buckets import ParameterUnit
from ddp.expert_parallel import apply_expert_parallel
from ddp.gradient_reducer import scale_to_norm
from ddp.mesh import Shard
from ddp.parallelism import Parallelism, local_values
from ddp.process_group import World
from ddp.replicas import check_equal
from ddp.tensor_parallel import apply_tensor_parallel

PARAMETERS_BETWEEN_BARRIERS = 64
"""Parameters that are gathered between two waits of all ranks, so that none waits for longer than a collective may."""
BuildStrategy = Callable[[World, Sequence[ParameterUnit]], Parallelism]
"""Applies a strategy of data parallelism to the parameters of some units, over the ranks of a world."""


class MeshParallel:
    """A `parallelism.Parallelism` over the mesh of its world. Every forward needs all ranks."""

    has_all_weights, has_all_updates = False, False

    def __init__(
        self,
        model: nn.Module,
        parallel: MultiProcessOptions,
        world: World,
        device: torch.device,
        units: Sequence[ParameterUnit],
        build_strategy: BuildStrategy,
    ) -> None:
        """Divide a model on ``meta``, which `materialize` allocates.

        Raises:
            ValueError: the mesh does not fit the model; names the key.
        """
        self.model = cast(Any, model)
        self.world, self.device, self._build_strategy = world, device, build_strategy
        # FSDP allocates the model itself.
        self._has_sharded_weights = isinstance(parallel, FSDP) and world.mesh.replicas.size > 1
        self.whole_shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        mesh, replicated = world.mesh, set(self.whole_shapes)
        if mesh.expert.size > 1:
            apply_expert_parallel(self.model, mesh.expert)
            replicated = {name for name in replicated if ".experts." not in name}
        self.shards = {name: Shard.whole(parameter.shape) for name, parameter in model.named_parameters()}
        if mesh.tensor.size > 1:
            self.shards = apply_tensor_parallel(self.model, mesh.tensor, sequence_norms=parallel.sequence_norms)
        replicas = world.along(mesh.replicas)
        self.model.has_collective_forwards = True
        # Functions, which a copy of the model shares: a process group cannot be copied.
        self.model.sum_over_ranks = lambda values: replicas.all_reduce_on_device(values)
        if mesh.expert.size > 1:
            self.model.values_of_first_rank = world.broadcast_on_device
        self.units = [(module, [name for name in names if name in replicated]) for module, names in units]
        self._replicated, self._replicas, self._expert_replicas = (
            replicated,
            replicas,
            world.along(mesh.expert_replicas),
        )
        self.strategy: Parallelism
        self.experts: dict[str, nn.Parameter] = {}

    @torch.no_grad()
    def materialize(self, values: Callable[[], Callable[[str], Tensor]]) -> None:
        """Allocate this rank's part of the model, and build the strategy that updates it."""
        whole_value = values()
        self._local_shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}

        def local_value(name: str) -> Tensor:
            whole, shape = whole_value(name), self._local_shapes.get(name)
            return whole if shape is None else self._cut(name, whole, shape)  # a buffer, or a parameter

        if not self._has_sharded_weights:
            allocate(self.model, self.device)
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
                tensor.copy_(local_value(name))
        self.strategy = self._build_strategy(self._replicas, self.units)
        self.strategy.materialize(lambda: local_value)
        experts = {name: value for name, value in self.model.named_parameters() if name not in self._replicated}
        for name, parameter in experts.items() if self._has_sharded_weights else ():
            parameter.copy_(local_value(name))
        self.experts = {name: parameter for name, parameter in experts.items() if parameter.requires_grad}

    def _cut(self, name: str, whole: Tensor, shape: torch.Size) -> Tensor:
        """This rank's part of a whole tensor, padded with rows of zeros to the shape of its parameter."""
        own = self.shards[name].select(whole)
        if own.shape == shape:
            return own
        padded = own.new_zeros(shape)
        padded[: len(own)] = own
        return padded

    @property
    def row_exchange(self) -> TensorMatrixExchange | AllToAllRows | None:
        """Gathers matrices over the tensor axis; without one, that of the strategy."""
        if self.world.mesh.tensor.size == 1:
            return self.strategy.row_exchange
        shards: dict[Tensor, Shard] = {
            parameter: self.shards[name] for name, parameter in self.trainable_parameters().items()
        }
        return TensorMatrixExchange(shards, self.world.mesh.tensor)

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        return {**self.strategy.trainable_parameters(), **self.experts}

    def shard_of(self, name: str) -> Shard:
        """Rows that the strategy cuts are rows of this rank's part."""
        shard = self.shards[name]
        if name in self.experts:
            return shard
        own = self.strategy.shard_of(name)
        if own.is_whole:
            return shard
        start = min(own.offsets[0], shard.shape[0])
        end = min(own.offsets[0] + own.shape[0], shard.shape[0])
        offsets = (shard.offsets[0] + start, *shard.offsets[1:])
        return replace(shard, offsets=offsets, shape=torch.Size((end - start, *shard.shape[1:])))

    def count_copies(self, name: str) -> int:
        holders = self.shards[name].num_holders
        if name in self._replicated:
            return holders * self.strategy.count_copies(name)
        return holders * self._expert_replicas.size

    def backward(self, is_last: bool) -> AbstractContextManager[None]:
        return self.strategy.backward(is_last)

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        self.strategy.clip(math.inf)
        for parameter in self.experts.values():
            # An expert without tokens on this rank may have none, and others on the same expert wait.
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self._expert_replicas.all_reduce_on_device(parameter.grad)
        parameters = self.trainable_parameters()
        gradients = {name: value.grad for name, value in parameters.items() if value.grad is not None}
        self._sum_partial_gradients(gradients)
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for name, gradient in gradients.items():
            copies = self.shards[name].num_holders
            if name in self.experts:
                copies *= self._expert_replicas.size
            elif self.strategy.has_all_updates:
                copies *= self._replicas.size
            square += torch.linalg.vector_norm(gradient).double().square() / copies
        norm = self.world.all_reduce_on_device(square).sqrt().float()
        scale_to_norm(list(gradients.values()), norm, max_norm)
        return norm

    def _sum_partial_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Sum gradients over the ranks of the tensor axis that hold the same part, of which each has some terms.

        These ranks have the same rows of the part, whatever the strategy. Parts of the others are zeros in a buffer of
        all parts, so that one collective over the axis serves all.
        """
        tensor, buffers, own = self.world.along(self.world.mesh.tensor), [], []
        for name, gradient in gradients.items():
            shard = self.shards[name]
            if shard.has_partial_gradient:
                buffer = gradient.new_zeros(tensor.size // shard.num_holders, *gradient.shape)
                index = shard.offsets[0] // shard.shape[0] if shard.offsets else 0
                buffer[index] = gradient
                buffers.append(buffer)
                own.append((gradient, index))
        if not buffers:
            return
        total = tensor.all_reduce_on_device(torch.cat([buffer.flatten() for buffer in buffers]))
        parts = torch.split(total, [buffer.numel() for buffer in buffers])
        for part, buffer, (gradient, index) in zip(parts, buffers, own, strict=True):
            gradient.copy_(part.view(buffer.shape)[index])

    def start_weight_gather(self) -> None:
        self.strategy.start_weight_gather()

    def wait_for_weights(self) -> None:
        self.strategy.wait_for_weights()

    def check_replicas_equal(self) -> None:
        self.strategy.check_replicas_equal()
        check_equal(self.experts, self._expert_replicas)
        parameters = dict(self.model.named_parameters())
        tensor = self.world.along(self.world.mesh.tensor)
        copies = {name for name, shard in self.shards.items() if shard.num_holders == tensor.size}
        check_equal({name: local_values(parameters[name]) for name in parameters if name in copies}, tensor)

    @torch.no_grad()
    def set_weights(self, whole: Mapping[str, Tensor]) -> None:
        trained = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        missing = [name for name in trained if name not in whole]
        if missing or not whole.keys() <= self.whole_shapes.keys():
            raise ValueError(
                f"weights do not fit the model: {sorted({*missing, *whole.keys() - self.whole_shapes.keys()})}"
            )
        own = {name: self._cut(name, whole[name], self._local_shapes[name]) for name in trained}
        self.strategy.set_weights({name: value for name, value in own.items() if name not in self.experts})
        for name, parameter in self.experts.items():
            parameter.copy_(own[name])

    def slice_own_rows(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = {
            name: self._cut(name, value, self._local_shapes[name])
            for name, value in whole.items()
            if name in self.shards
        }
        replicated = {name: value for name, value in own.items() if name in self._replicated}
        return own | dict(self.strategy.slice_own_rows(replicated))

    @torch.no_grad()
    def iterate_whole_parameters(
        self, values: Mapping[str, Tensor] | None = None, destinations: Mapping[str, Tensor] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """The parameters are on the CPU. All are gathered before the first one is returned."""
        experts = {name: value for name, value in self.model.named_parameters() if name not in self._replicated}
        selected = None
        if values is not None:
            experts = {name: values[name] for name in experts if name in values}
            selected = {name: value for name, value in values.items() if name in self._replicated}
        own = dict(self.strategy.iterate_whole_parameters(selected))  # on the first of the replicas only
        own |= experts if self._expert_replicas.rank == 0 else {}
        parts_of_ranks = self.world.all_gather_objects(
            {name: (self.shards[name], value.dtype) for name, value in own.items()}
        )
        wholes: dict[str, Tensor] = {}
        for index, name in enumerate(self.whole_shapes):
            if index % PARAMETERS_BETWEEN_BARRIERS == 0:
                self.world.barrier()
            owners = {parts[name][0].offsets: rank for rank, parts in enumerate(parts_of_ranks) if name in parts}
            for rank in owners.values():  # of equal parts the last one
                shard, dtype = parts_of_ranks[rank][name]
                piece = own[name].detach()[: shard.shape[0]].cpu().contiguous() if rank == self.world.rank else None
                if rank and piece is not None:
                    dist.send(piece, dst=0)
                if not self.world.is_first:
                    continue
                if piece is None:
                    piece = torch.empty(shard.shape, dtype=dtype)
                    dist.recv(piece, src=rank)
                if name not in wholes:
                    placed = (destinations or {}).get(name)
                    wholes[name] = torch.empty(shard.whole_shape, dtype=dtype) if placed is None else placed
                shard.select(wholes[name]).copy_(piece)
        yield from ((name, wholes[name]) for name in self.whole_shapes if name in wholes)


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give a model on ``meta`` memory; two modules that share a parameter still do."""
    memory: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in memory:
                empty = torch.empty_like(parameter, device=device)
                memory[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(module, name, memory[parameter])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))
