"""Exponential moving average (EMA) of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ddp.parallelism import local_values
from diffusionlm.optim.chunks import split_by_elements


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
        averages, values = (
            list(self.averages.values()),
            [local_values(each).float() for each in self.parameters.values()],
        )
        if averages[0].is_cuda:
            lerp_together(averages, values, weight.float())
            return
        for average, value in zip(averages, values, strict=True):
            average.lerp_(value, weight.float())

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


def lerp_together(starts: list[Tensor], ends: list[Tensor], weight: Tensor) -> None:
    """Move tensors towards others in place, as `torch.lerp` does, with a few launches for all of them.

    Args:
        weight: 0-d on their device. `torch._foreach_lerp_` takes none that is there.
    """
    for chunk in split_by_elements(starts):
        changes = torch._foreach_sub(ends[chunk], starts[chunk])
        torch._foreach_mul_(changes, weight)
        torch._foreach_add_(starts[chunk], changes)
