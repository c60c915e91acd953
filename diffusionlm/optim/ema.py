"""Exponential moving average (EMA) of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ddp.parallelism import local_values


class WeightAverage:
    """Averages of a model's trained parameters, in float32. Of sharded parameters it holds the averages of this rank's
    shards.

    The decay warms up as (1 + n) / (10 + n) over the updates n, so that the initial weights are soon forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
        device = next(iter(self.parameters.values())).device
        self._num_updates = torch.zeros((), dtype=torch.int64, device=device)
        self.averages = {name: local_values(parameter).float().clone() for name, parameter in self.parameters.items()}

    @property
    def num_updates(self) -> int:
        """Number of updates so far; waits for the device."""
        return int(self._num_updates)

    @torch.no_grad()
    def update(self, skip: Tensor | None = None) -> None:
        """Move the averages towards the weights, once per step, without a host sync.

        Args:
            skip: 0-d boolean on the device; where it is true nothing changes. The weights must be finite even then.
        """
        self._num_updates += 1 if skip is None else ~skip
        count = self._num_updates.double()
        weight = 1.0 - torch.clamp((1.0 + count) / (10.0 + count), max=self.decay)
        if skip is not None:
            weight.masked_fill_(skip, 0.0)
        for average, parameter in zip(self.averages.values(), self.parameters.values(), strict=True):
            average.lerp_(local_values(parameter).float(), weight.float())

    def restore(self, averages: Mapping[str, Tensor], num_updates: int) -> None:
        """Load the averages and the number of updates of a checkpoint."""
        for name, value in self.averages.items():
            value.copy_(averages[name])
        self._num_updates.fill_(num_updates)

    @contextmanager
    def use_averages(self) -> Iterator[None]:
        """Context in which the model has the averaged weights. Sharded parameters must be sharded when it is
        entered."""
        weights = {name: local_values(parameter).clone() for name, parameter in self.parameters.items()}
        self._copy_into_model(self.averages)
        try:
            yield
        finally:
            self._copy_into_model(weights)

    @torch.no_grad()
    def _copy_into_model(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            local_values(parameter).copy_(values[name])
