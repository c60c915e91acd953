"""FSDP: each rank has some rows of every parameter, gradient and optimizer state (torch's FSDP2, `fully_shard`).

Shapes: R rows of a whole parameter, its dimension 0; rank r has those from r * ceil(R / ranks) on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config.parallel import FSDP
from ddp.all_to_all_rows import AllToAllRows, row_range_of_rank
from ddp.buckets import ParameterUnit
from ddp.process_group import World
from ddp.replicas import check_names


class FullySharded:
    """A model whose parameters are whole only while the part of it runs that uses them.

    A block's weights are gathered before its forward and again before its backward, in the dtype of the products. Those
    of embedding, last norm and head are gathered once, in float32, which autocast expects of them. Gradients are summed
    in float32, never divided: the loss has the denominator of all ranks in it.

    Every rank must make the same forwards and backwards, whatever it has to compute.
    """

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
        """Cut a model in place, which is on ``device``, or on ``meta`` until `materialise`.

        Args:
            model: all of its parameters are float32.
            parallel: the section.
            ranks: those of the process group, which is there.
            device: of this rank.
            units: modules and the parameters that they are the first to read, in order of execution: what comes before
                the blocks, the blocks, what comes after them.
            dtype: of the products in blocks.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.world = world
        self.model: Any = model
        self.device = device
        self.reshards_after_forward = parallel.reshard_after_forward
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        mesh = init_device_mesh(device.type, (world.size,))
        wide = MixedPrecisionPolicy(cast_forward_inputs=False)
        narrow = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        self.blocks: list[Any] = [
            fully_shard(module, mesh=mesh, mp_policy=narrow, reshard_after_forward=self.reshards_after_forward)
            for module, _ in units[1:-1]
        ]
        fully_shard(model, mesh=mesh, mp_policy=wide, reshard_after_forward=False)
        for each in (self.model, *self.blocks):
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)
        self._make_local_parameters()

    def _make_local_parameters(self) -> None:
        """What this rank has, as plain parameters in the same memory."""
        self._dtensors: dict[str, Any] = dict(self.model.named_parameters())
        self._local_parameters = {
            name: nn.Parameter(each.detach().to_local(), requires_grad=each.requires_grad)
            for name, each in self._dtensors.items()
        }

    @torch.no_grad()
    def materialize(self, fill: Callable[[str], Tensor]) -> None:
        """Give a model on ``meta`` memory and values.

        Args:
            fill: the whole parameter of a name, on the CPU, of any dtype; asked for one after the other, and this
                rank's rows are kept.
        """
        self.model.to_empty(device=self.device)
        self._make_local_parameters()
        for name, part in self._local_parameters.items():
            first, end = self.row_range(name)
            whole = fill(name)
            assert whole.shape == self.shapes[name], f"{name} is {list(whole.shape)}, not {list(self.shapes[name])}"
            part.copy_(whole[first:end])

    @property
    def row_exchange(self) -> AllToAllRows:
        """What brings the rows of matrices together, for an optimizer that needs them whole."""
        return AllToAllRows({part: self.shapes[name] for name, part in self._local_parameters.items()}, self.world)

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's rows of every parameter that is trained, perhaps none; changed in place by an optimizer."""
        return {name: part for name, part in self._local_parameters.items() if part.requires_grad}

    def has_whole_parameter(self, name: str) -> bool:
        """Whether `trained` has a whole parameter; it has rows of each."""
        return False

    def row_range(self, name: str) -> tuple[int, int]:
        """This rank's first row of a parameter, and the one after its last."""
        return row_range_of_rank(self.shapes[name][0], self.world.size, self.world.rank)

    def backward(self, is_last: bool) -> AbstractContextManager[None]:
        """Nothing: gradients travel in each micro-batch, since adding them up whole would take the memory that this
        strategy saves."""
        return nullcontext()

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Give `trained` its gradients, scaled so that their norm over all ranks is ``max_norm`` at most.

        Returns:
            That norm before, 0-d on the device, which is not waited for.
        """
        gradients = []
        for name, part in self._local_parameters.items():
            gradient = self._dtensors[name].grad
            self._dtensors[name].grad = None
            part.grad = None if gradient is None else gradient.to_local()
            if part.grad is not None:
                gradients.append(part.grad)
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        if gradients:
            square += torch.stack(list(torch._foreach_norm(gradients))).double().square().sum()
        dist.all_reduce(square)
        norm = square.sqrt().float()
        if gradients:
            torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def start_weight_gather(self) -> None:
        """Nothing: weights are gathered where they are used."""

    def wait_for_weights(self) -> None:
        """Nothing: the parts are those of the last update."""

    def check_replicas_equal(self) -> None:
        """There are none."""

    @torch.no_grad()
    def set_weights(self, whole: Mapping[str, Tensor]) -> None:
        """Go on with these weights, of which each rank keeps its rows.

        Raises:
            ValueError: they are not those of the model's names.
        """
        check_names(whole, self._local_parameters)
        for name, rows in self.slice_own_rows(whole).items():
            self._local_parameters[name].copy_(rows)

    def slice_own_rows(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's rows of whole parameters, or of what has their shapes, by name."""
        return {name: each[slice(*self.row_range(name))] for name, each in whole.items()}

    @torch.no_grad()
    def iterate_whole_parameters(self, values: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every parameter in float32, whole, on the CPU of the first rank, one after the other; nothing elsewhere.

        All ranks iterate. A rank that stops before the end takes part in what the others still wait for.

        Args:
            values: this rank's rows in place of the parameters', by name: their average, for example.
        """
        given = values or {}
        left = list(self._local_parameters)
        try:
            while left:
                whole = self._gather(given.get(left[0], self._local_parameters[left[0]].detach()), self.shapes[left[0]])
                name = left.pop(0)
                if whole is not None:
                    yield name, whole
        except GeneratorExit:
            for name in left:
                self._gather(given.get(name, self._local_parameters[name].detach()), self.shapes[name])
            raise

    def _gather(self, part: Tensor, shape: torch.Size) -> Tensor | None:
        """Whole, on the CPU of the first rank; None elsewhere."""
        rows = -(-shape[0] // self.world.size)
        padded = part.new_zeros(rows, *shape[1:])
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in range(self.world.size)] if self.world.is_first else None
        dist.gather(padded, parts, dst=0)
        return None if parts is None else torch.cat(parts)[: shape[0]].cpu()

    def to_checkpoint_state(self, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """``parameter.key`` -> tensor of a part, as a DTensor of the whole shape; scalars stay as they are."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        meshes = {
            kind: init_device_mesh(kind, (self.world.size,))
            for kind in sorted({each.device.type for each in state.values()})
        }
        given: dict[str, Any] = {}
        for key, value in state.items():
            name = key.rpartition(".")[0]
            if value.shape == self._local_parameters[name].shape:
                shape = self.shapes[name]
                stride = torch.empty(shape, device="meta").stride()
                mesh = meshes[value.device.type]
                value = DTensor.from_local(value, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
            given[key] = value
        return given
