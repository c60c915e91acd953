"""Buckets: gradients of several parameters in one piece of memory, which travels as one.

The memory is a table of one row for each of the W ranks that share the work on it, [W, segment]. A parameter's rows are
cut into consecutive pieces, one a rank, or all belong to one rank. Where nothing is shared, W is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

ParameterUnit = tuple[nn.Module, list[str]]
"""A module, and the names of the parameters that its forward is the first to read."""

ALIGNMENT = 16
"""Elements; where pieces begin, so that kernels can read several at once."""


@dataclass(frozen=True)
class BucketSlice:
    """Consecutive rows of a parameter, and where they are in a bucket."""

    rank: int
    offset: int
    """Of its first element in the rank's segment."""
    start: int
    end: int
    """Rows, the last one excluded. A parameter without dimensions has one."""


@dataclass
class BucketLayout:
    """What is where in one bucket."""

    dtype: torch.dtype
    num_elements_by_rank: list[int]
    """Elements that each rank has."""
    slices: dict[str, list[BucketSlice]] = field(default_factory=dict)
    """By parameter, in the order of rows."""
    whole: set[str] = field(default_factory=set)
    """Parameters that belong to one rank."""

    @property
    def segment(self) -> int:
        """Elements of a rank's row of the table, padding included."""
        return max(self.num_elements_by_rank)

    def with_parameter(
        self, name: str, parameter: Tensor, is_whole: bool, num_elements_before: Sequence[int]
    ) -> BucketLayout:
        """A longer plan. A whole parameter goes to the rank that has least here, then least in ``num_elements_before``."""
        num_elements_by_rank, world_size = list(self.num_elements_by_rank), len(self.num_elements_by_rank)
        rows = len(parameter) if parameter.dim() else 1
        row_size = parameter.numel() // max(1, rows)
        if is_whole:
            owner = min(range(world_size), key=lambda rank: (num_elements_by_rank[rank], num_elements_before[rank]))
            cuts = [(owner, 0, rows)]
        else:
            each = -(-rows // world_size)  # as torch.chunk and DTensor's Shard(0)
            cuts = [(rank, rank * each, min(rows, (rank + 1) * each)) for rank in range(world_size)]
        slices = []
        for rank, start, end in cuts:
            if start < end:
                slices.append(BucketSlice(rank, num_elements_by_rank[rank], start, end))
                num_elements_by_rank[rank] += -(-(end - start) * row_size // ALIGNMENT) * ALIGNMENT
        whole = self.whole | {name} if is_whole else self.whole
        return BucketLayout(self.dtype, num_elements_by_rank, {**self.slices, name: slices}, whole)


def lay_out_buckets(
    parameters: Mapping[str, Tensor],
    world_size: int,
    max_bytes: float,
    requires_whole_matrix: Callable[[str], bool] = lambda name: False,
) -> list[BucketLayout]:
    """Parameters in the order given, in buckets of one dtype and at most ``max_bytes``.

    A parameter that is larger has a bucket for itself, but for those that only fill its padding: whole matrices of
    equal size come in buckets of one for each rank.
    """
    plans: list[BucketLayout] = []
    before = [0] * world_size  # what each rank has in the buckets that are closed
    for name, parameter in parameters.items():
        is_whole = not parameter.dim() or requires_whole_matrix(name)
        if plans:
            last = plans[-1]
            longer = last.with_parameter(name, parameter, is_whole, before)
            fits = longer.segment * world_size * parameter.element_size() <= max_bytes
            if last.dtype == parameter.dtype and (fits or longer.segment == last.segment):
                plans[-1] = longer
                continue
            before = [mine + more for mine, more in zip(before, last.num_elements_by_rank, strict=True)]
        empty = BucketLayout(parameter.dtype, [0] * world_size)
        plans.append(empty.with_parameter(name, parameter, is_whole, before))
    return plans


class Bucket:
    """Memory by a plan, and the gradients in it."""

    def __init__(self, layout: BucketLayout, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
        self.layout = layout
        self.parameters = {name: parameters[name] for name in layout.slices}
        self.memory = torch.zeros(len(layout.num_elements_by_rank), layout.segment, dtype=layout.dtype, device=device)
        self.has_gradient: set[str] = set()
        """Parameters that have had a gradient in this step."""
        self.work: Any = None
        """The collective under way."""
        self._views = {
            name: [view_of_slice(self.memory[piece.rank], piece, self.parameters[name]) for piece in slices]
            for name, slices in layout.slices.items()
        }
        self._rows = {name: [piece.end - piece.start for piece in slices] for name, slices in layout.slices.items()}

    def views(self, name: str) -> list[Tensor]:
        """The pieces of a parameter in the memory."""
        return self._views[name]

    @torch.no_grad()
    def add(self, name: str, gradient: Tensor) -> None:
        """Copy the first gradient of a step, add the later ones."""
        views = self._views[name]
        slices = [gradient] if len(views) == 1 else list(torch.split(gradient, self._rows[name]))
        if name in self.has_gradient:
            torch._foreach_add_(views, slices)
        else:
            self.has_gradient.add(name)
            torch._foreach_copy_(views, slices)

    @torch.no_grad()
    def zero_missing_gradients(self) -> None:
        """Parameters without a gradient in this step count as zeros."""
        missing = [view for name in self._views if name not in self.has_gradient for view in self._views[name]]
        if missing:
            torch._foreach_zero_(missing)

    @torch.no_grad()
    def copy_to_parameters(self) -> None:
        """What the memory holds becomes the values of the parameters."""
        targets: list[Tensor] = []
        for name, parameter in self.parameters.items():
            rows = self._rows[name]
            value = parameter.detach()
            targets += torch.split(value, rows) if len(rows) > 1 else [value]
        torch._foreach_copy_(targets, [view for views in self._views.values() for view in views])

    def wait(self) -> None:
        """For the collective under way: on a GPU its stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
            self.work = None


def view_of_slice(segment: Tensor, piece: BucketSlice, parameter: Tensor) -> Tensor:
    """The piece in a rank's flat segment, in the shape of the parameter's rows."""
    shape = (piece.end - piece.start, *parameter.shape[1:]) if parameter.dim() else ()
    return segment[piece.offset : piece.offset + num_elements(shape)].view(shape)


def num_elements(shape: Sequence[int]) -> int:
    """Elements."""
    return torch.Size(shape).numel()


def trainable_by_unit(model: nn.Module, units: Sequence[ParameterUnit]) -> list[dict[str, nn.Parameter]]:
    """The parameters that require gradients, by the first unit that names them, under the model's names.

    Two names of one parameter (a head that is the embedding) count as one.
    """
    name_of = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    aliases = dict(model.named_parameters(remove_duplicate=False))
    found: list[dict[str, nn.Parameter]] = []
    for _, names in units:
        mine = {name_of.pop(aliases[name]): aliases[name] for name in names if aliases[name] in name_of}
        found.append(mine)
    assert not name_of, f"parameters of no unit: {', '.join(name_of.values())}"
    return found


def reversed_units(by_unit: Sequence[dict[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """All of them, the last executed first."""
    return {name: unit[name] for unit in reversed(by_unit) for name in reversed(unit)}
