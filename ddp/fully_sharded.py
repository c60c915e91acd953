"""FSDP: each rank has some rows of every parameter, gradient and optimizer state (torch's FSDP2, `fully_shard`).

Shapes: R rows of a whole parameter, its dimension 0; which of them a rank has: `all_to_all_rows.row_range_of_rank`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config.training.parallel import FSDP
from ddp.all_to_all_rows import AllToAllRows, row_range_of_rank
from ddp.buckets import ParameterUnit
from ddp.gradient_reducer import scale_to_norm
from ddp.mesh import Axis, Shard
from ddp.process_group import World
from ddp.replicas import check_names

MAX_GATHER_BYTES = 64 << 20
"""Bytes of a whole parameter that are on the GPU of rank 0 at a time."""


class FullySharded:
    """A `parallelism.Parallelism` whose parameters are gathered only while their module runs.

    A block's weights are gathered before its forward and again before its backward, in the dtype of matrix products.
    Those of embedding, final norm and head are gathered once, in float32, as autocast expects. Gradients are summed in
    float32 and never divided: the loss is already divided by the denominator of all ranks.

    Every rank must run the same number of forwards and backwards, also without data.
    """

    has_all_weights, has_all_updates = False, False
    _has_gathered = False
    """Whole weights have memory, which torch allocates once."""

    def __init__(
        self,
        model: nn.Module,
        parallel: FSDP,
        world: World,
        device: torch.device,
        units: Sequence[ParameterUnit],
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Shard a model in place; it is on ``device``, or on ``meta`` until `materialize`.

        Args:
            model: has float32 parameters.
            units: modules in execution order, with their parameters: the embedding, the blocks, the final norm and
                head.
            dtype: dtype of matrix products in blocks.

        Raises:
            ValueError: gloo with tensors on a GPU, which it cannot reduce-scatter.
        """
        if device.type == "cuda" and parallel.backend == "gloo":
            raise ValueError(
                'parallel.backend = "gloo" cannot reduce-scatter gradients on a GPU: set it to "auto", or set '
                'parallel.strategy = "ddp" and parallel.shard_optimizer = false'
            )
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

        self.world, self.device = world, device
        self.model: Any = model
        cast(Any, model).has_collective_forwards = cast(Any, model).has_collective_tower = True
        self.reshards_after_forward = parallel.reshard_after_forward
        names = {name for _, names in units for name in names}
        self.whole_shapes = {name: value.shape for name, value in model.named_parameters() if name in names}
        ignored = {value for name, value in model.named_parameters() if name not in names}
        mesh = DeviceMesh.from_group(world.group or dist.distributed_c10d._get_default_group(), device.type)
        wide = MixedPrecisionPolicy(cast_forward_inputs=False)
        narrow = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        self.blocks: list[Any] = [
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=narrow,
                reshard_after_forward=self.reshards_after_forward,
                ignored_params=ignored,
            )
            for module, _ in units[1:-1]
        ]
        fully_shard(model, mesh=mesh, mp_policy=wide, reshard_after_forward=False, ignored_params=ignored)
        register_fsdp_forward_method(model, "compute_features")  # of a model with a vision tower
        for module in (self.model, *self.blocks):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        model.register_forward_hook(self._release_after_evaluation)
        self._make_local_parameters()

    def _release_after_evaluation(self, *_: object) -> None:
        """Free whole weights after a forward without gradients: no backward does it. The next forward would use them,
        though `WeightAverage.use_averages` has changed the rows, and a checkpoint would save them."""
        if not torch.is_grad_enabled():
            for module in (self.model, *self.blocks):
                module.reshard()

    def _make_local_parameters(self) -> None:
        """Wrap this rank's rows as plain parameters that share the DTensors' memory."""
        self._dtensors: dict[str, Any] = {
            name: value for name, value in self.model.named_parameters() if name in self.whole_shapes
        }
        self._local_parameters = {
            name: nn.Parameter(dtensor.detach().to_local(), requires_grad=dtensor.requires_grad)
            for name, dtensor in self._dtensors.items()
        }

    @torch.no_grad()
    def materialize(self, values: Callable[[], Callable[[str], Tensor]]) -> None:
        """Allocate the model and copy this rank's rows, one parameter after the other."""
        whole_value = values()
        self.model.to_empty(device=self.device)
        self._make_local_parameters()
        for name, parameter in self._local_parameters.items():
            whole = whole_value(name)
            shape = self.whole_shapes[name]
            assert whole.shape == shape, f"{name} is {list(whole.shape)}, not {list(shape)}"
            parameter.copy_(self.shard_of(name).select(whole))
        for name, buffer in self.model.named_buffers():
            buffer.copy_(whole_value(name))

    @property
    def row_exchange(self) -> AllToAllRows:
        ranks = Axis(self.world.size, self.world.rank, self.world.group)
        return AllToAllRows({rows: self.whole_shapes[name] for name, rows in self._local_parameters.items()}, ranks)

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's rows of every parameter that requires gradients; a parameter may have none here."""
        return {name: parameter for name, parameter in self._local_parameters.items() if parameter.requires_grad}

    def shard_of(self, name: str) -> Shard:
        shape = self.whole_shapes[name]
        return Shard.rows(shape, *row_range_of_rank(shape[0], self.world.size, self.world.rank))

    def count_copies(self, name: str) -> int:
        return 1

    def backward(self, is_last: bool) -> AbstractContextManager[None]:
        """Do nothing: FSDP reduces gradients in each micro-batch. Whole accumulated ones would take the memory it
        saves."""
        return nullcontext()

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Assign gradients to the trainable parameters and clip their norm over all ranks to ``max_norm``.

        Returns the norm before clipping, over the whole model, 0-d on the device; the host does not wait.
        """
        gradients = []
        for name, parameter in self._local_parameters.items():
            gradient = self._dtensors[name].grad
            self._dtensors[name].grad = None
            parameter.grad = None if gradient is None else gradient.to_local()
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        if gradients:
            square += torch.stack(list(torch._foreach_norm(gradients))).double().square().sum()
        dist.all_reduce(square, group=self.world.group)
        norm = square.sqrt().float()
        scale_to_norm(gradients, norm, max_norm)
        return norm

    def start_weight_gather(self) -> None:
        """Do nothing: weights are gathered where they are used."""

    def wait_for_weights(self) -> None:
        """Allocate the memory of whole weights, once: what a first forward in inference mode allocates, a forward of
        training could not write to. Each rank's rows are those of the last update already."""
        if not self._has_gathered:
            for module in (self.model, *self.blocks):
                module.unshard()
                module.reshard()
            self._has_gathered = True

    def check_replicas_equal(self) -> None:
        """Do nothing: no rank has a copy of another's rows."""

    @torch.no_grad()
    def set_weights(self, whole: Mapping[str, Tensor]) -> None:
        check_names(whole, self.trainable_parameters())
        for name, rows in self.slice_own_rows(whole).items():
            self._local_parameters[name].copy_(rows)

    def slice_own_rows(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.shard_of(name).select(tensor) for name, tensor in whole.items()}

    @torch.no_grad()
    def iterate_whole_parameters(
        self, values: Mapping[str, Tensor] | None = None, destinations: Mapping[str, Tensor] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """The parameters are float32, on the CPU. A rank that stops early still takes part in the remaining gathers."""
        own_rows = (
            {name: parameter.detach() for name, parameter in self._local_parameters.items()}
            if values is None
            else dict(values)
        )
        remaining = list(own_rows)
        try:
            while remaining:
                name = remaining[0]
                whole = self._gather(own_rows[name], self.whole_shapes[name], (destinations or {}).get(name))
                remaining.pop(0)
                if whole is not None:
                    yield name, whole
        except GeneratorExit:
            for name in remaining:
                self._gather(own_rows[name], self.whole_shapes[name])
            raise

    def _gather(self, rows: Tensor, shape: torch.Size, destination: Tensor | None = None) -> Tensor | None:
        """Gather a whole parameter on the CPU of rank 0; return None on other ranks.

        Some rows of all ranks are gathered at a time: the largest parameter, of gigabytes, is never whole on a GPU.
        """
        _, rows_per_rank = row_range_of_rank(shape[0], self.world.size, 0)  # rank 0 has the most
        row_bytes = max(1, rows.element_size() * shape[1:].numel())
        step = max(1, MAX_GATHER_BYTES // (row_bytes * self.world.size))
        whole = None
        if self.world.is_first:
            whole = torch.empty(shape, dtype=rows.dtype) if destination is None else destination
        for first in range(0, rows_per_rank, step):
            padded = rows.new_zeros(min(step, rows_per_rank - first), *shape[1:])
            own = rows[first : first + len(padded)]
            padded[: len(own)] = own
            parts = padded.new_empty(self.world.size, *padded.shape) if whole is not None else None
            dist.gather(padded, None if parts is None else list(parts), group_dst=0, group=self.world.group)
            for rank, part in enumerate(() if parts is None else parts):
                start = rank * rows_per_rank + first
                _, end = row_range_of_rank(shape[0], self.world.size, rank)
                stop = min(end, start + len(part))
                if whole is not None and start < stop:
                    whole[start:stop].copy_(part[: stop - start], non_blocking=True)
        if whole is not None and rows.is_cuda:
            torch.cuda.current_stream().synchronize()
        return whole
