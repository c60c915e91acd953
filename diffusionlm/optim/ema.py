"""Exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class WeightAverage:
    """Averaged copies of a model's parameters, in fp32; of those that are cut over ranks, of what this rank has.

    The decay warms up as (1 + n) / (10 + n), so that the start of the run is forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.live = dict(model.named_parameters())
        device = next(iter(self.live.values())).device
        self._num_updates = torch.zeros((), dtype=torch.int64, device=device)
        self.average = {name: _local_values(parameter).float().clone() for name, parameter in self.live.items()}

    @property
    def num_updates(self) -> int:
        """How many were made; waits for the device."""
        return int(self._num_updates)

    @torch.no_grad()
    def update(self, skip: Tensor | None = None) -> None:
        """Move the averages towards the weights, once a step; nothing waits for the device.

        Args:
            skip: where this is true, 0-d on the device, nothing changes; the weights must be finite all the same.
        """
        self._num_updates += 1 if skip is None else ~skip
        count = self._num_updates.double()
        weight = 1.0 - torch.clamp((1.0 + count) / (10.0 + count), max=self.decay)
        if skip is not None:
            weight.masked_fill_(skip, 0.0)
        for average, parameter in zip(self.average.values(), self.live.values(), strict=True):
            average.lerp_(_local_values(parameter).float(), weight.float())

    def restore(self, average: Mapping[str, Tensor], num_updates: int) -> None:
        """What a checkpoint kept."""
        for name, value in self.average.items():
            value.copy_(average[name])
        self._num_updates.fill_(num_updates)

    @contextmanager
    def use_averages(self) -> Iterator[None]:
        """The model has the averaged weights meanwhile. Where parameters are cut over ranks, these must be cut here."""
        kept = {name: _local_values(parameter).clone() for name, parameter in self.live.items()}
        self._copy_into_model(self.average)
        try:
            yield
        finally:
            self._copy_into_model(kept)

    @torch.no_grad()
    def _copy_into_model(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self.live.items():
            _local_values(parameter).copy_(values[name])


def _local_values(parameter: Tensor) -> Tensor:
    """What this rank has of a parameter, in the memory of that: its rows, where it is a DTensor."""
    values: Any = parameter.detach()
    own: Tensor = values.to_local() if hasattr(values, "to_local") else values
    return own
