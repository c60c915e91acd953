"""Gradient buckets: the gradients of several parameters in one buffer, for one collective.

The buffer is [W, segment size]: one segment for each of the W ranks that share the optimizer's work. A parameter's rows
are cut into consecutive slices, one for each rank, or all belong to one rank. Without sharding W is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ddp.all_to_all_rows import row_range_of_rank

ParameterUnit = tuple[nn.Module, list[str]]
"""A module and the names of the parameters that its forward is the first to read."""

ALIGNMENT = 16
"""Slices begin at multiples of this many elements, so that kernels can use vector loads."""


@dataclass(frozen=True)
class BucketSlice:
    """Consecutive rows of a parameter and their place in a bucket."""

    rank: int
    offset: int
    """Index of its first element in the rank's segment."""
    start: int
    end: int
    """Rows ``start`` to ``end``, exclusive. A 0-d parameter has one row."""


@dataclass
class BucketLayout:
    """The layout of a bucket: which rows of each parameter belong to which rank."""

    dtype: torch.dtype
    num_elements_by_rank: list[int]
    """Number of elements in each rank's segment, without padding at its end."""
    slices: dict[str, list[BucketSlice]] = field(default_factory=dict)
    """Slices of each parameter, in row order."""
    whole_names: set[str] = field(default_factory=set)
    """Names of parameters that belong to one rank."""

    @property
    def segment_size(self) -> int:
        """Number of elements in a segment, with padding."""
        return max(self.num_elements_by_rank)

    def with_parameter(
        self, name: str, parameter: Tensor, is_whole: bool, num_elements_before: Sequence[int]
    ) -> BucketLayout:
        """Return the layout with one more parameter.

        A whole parameter goes to the rank with the fewest elements in this bucket, then in ``num_elements_before``.
        """
        num_elements_by_rank, world_size = list(self.num_elements_by_rank), len(self.num_elements_by_rank)
        rows = len(parameter) if parameter.dim() else 1
        row_size = parameter.numel() // max(1, rows)
        if is_whole:
            owner = min(range(world_size), key=lambda rank: (num_elements_by_rank[rank], num_elements_before[rank]))
            cuts = [(owner, 0, rows)]
        else:
            cuts = [(rank, *row_range_of_rank(rows, world_size, rank)) for rank in range(world_size)]
        slices = []
        for rank, start, end in cuts:
            if start < end:
                slices.append(BucketSlice(rank, num_elements_by_rank[rank], start, end))
                num_elements_by_rank[rank] += -(-(end - start) * row_size // ALIGNMENT) * ALIGNMENT
        whole_names = self.whole_names | {name} if is_whole else self.whole_names
        return BucketLayout(self.dtype, num_elements_by_rank, {**self.slices, name: slices}, whole_names)


def lay_out_buckets(
    parameters: Mapping[str, Tensor],
    world_size: int,
    max_bytes: float,
    requires_whole_matrix: Callable[[str], bool] = lambda name: False,
) -> list[BucketLayout]:
    """Assign parameters, in their order, to buckets of one dtype and at most ``max_bytes``.

    A larger parameter has a bucket of its own, shared only with parameters that fit into its padding: whole matrices of
    equal size share a bucket, one for each rank.
    """
    layouts: list[BucketLayout] = []
    num_elements_before = [0] * world_size  # of each rank, in the buckets that are full
    for name, parameter in parameters.items():
        is_whole = not parameter.dim() or requires_whole_matrix(name)
        if layouts:
            last = layouts[-1]
            longer = last.with_parameter(name, parameter, is_whole, num_elements_before)
            fits = longer.segment_size * world_size * parameter.element_size() <= max_bytes
            if last.dtype == parameter.dtype and (fits or longer.segment_size == last.segment_size):
                layouts[-1] = longer
                continue
            num_elements_before = [
                before + own for before, own in zip(num_elements_before, last.num_elements_by_rank, strict=True)
            ]
        empty = BucketLayout(parameter.dtype, [0] * world_size)
        layouts.append(empty.with_parameter(name, parameter, is_whole, num_elements_before))
    return layouts


class Bucket:
    """A buffer with a layout, and the state of its gradients in the current step.

    ``memory`` is [W, segment size]. The ``torch._foreach_*`` calls have no public names; they save a kernel launch for
    each slice.
    """

    def __init__(self, layout: BucketLayout, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
        self.layout = layout
        self.parameters = {name: parameters[name] for name in layout.slices}
        self.memory = torch.zeros(
            len(layout.num_elements_by_rank), layout.segment_size, dtype=layout.dtype, device=device
        )
        self.has_gradient: set[str] = set()
        """Names of parameters whose gradient is in the buffer."""
        self.work: Any = None
        """The pending collective, if any."""
        self._views = {
            name: [view_of_slice(self.memory[piece.rank], piece, self.parameters[name]) for piece in slices]
            for name, slices in layout.slices.items()
        }
        self._rows = {name: [piece.end - piece.start for piece in slices] for name, slices in layout.slices.items()}

    def views(self, name: str) -> list[Tensor]:
        """Return a parameter's slices of the buffer, as views in the shape of its rows."""
        return self._views[name]

    @torch.no_grad()
    def add(self, name: str, gradient: Tensor) -> None:
        """Copy the first gradient of a step into the buffer; add the later ones."""
        views = self._views[name]
        slices = [gradient] if len(views) == 1 else list(torch.split(gradient, self._rows[name]))
        if name in self.has_gradient:
            torch._foreach_add_(views, slices)
        else:
            self.has_gradient.add(name)
            torch._foreach_copy_(views, slices)

    @torch.no_grad()
    def zero_missing_gradients(self) -> None:
        """Set the gradients of parameters that have none in this step to zero."""
        missing = [view for name in self._views if name not in self.has_gradient for view in self._views[name]]
        if missing:
            torch._foreach_zero_(missing)

    @torch.no_grad()
    def copy_to_parameters(self) -> None:
        """Copy the buffer into the parameters."""
        targets: list[Tensor] = []
        for name, parameter in self.parameters.items():
            rows = self._rows[name]
            value = parameter.detach()
            targets += torch.split(value, rows) if len(rows) > 1 else [value]
        torch._foreach_copy_(targets, [view for views in self._views.values() for view in views])

    def wait(self) -> None:
        """Wait for the pending collective. On a GPU the current stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
            self.work = None


def view_of_slice(segment: Tensor, piece: BucketSlice, parameter: Tensor) -> Tensor:
    """View a slice of a rank's flat segment in the shape of the parameter's rows."""
    shape = (piece.end - piece.start, *parameter.shape[1:]) if parameter.dim() else ()
    return segment[piece.offset : piece.offset + torch.Size(shape).numel()].view(shape)


def trainable_by_unit(model: nn.Module, units: Sequence[ParameterUnit]) -> list[dict[str, nn.Parameter]]:
    """Return each unit's trainable parameters, by name; one that several units name belongs to the first.

    Two names of one parameter (tied embeddings) count as one: the first.
    """
    name_of = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    aliases = dict(model.named_parameters(remove_duplicate=False))
    return [
        {name_of.pop(aliases[name]): aliases[name] for name in names if aliases[name] in name_of} for _, names in units
    ]


def reversed_units(by_unit: Sequence[dict[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """Return all parameters, the last executed first: the order in which a backward finishes them."""
    return {name: unit[name] for unit in reversed(by_unit) for name in reversed(unit)}
