"""Exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """Averaged copies of a model's parameters, in fp32.

    The decay warms up as (1 + n) / (10 + n), so that the start of the run is forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.live = dict(model.named_parameters())
        self.average = {name: parameter.detach().float().clone() for name, parameter in self.live.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the weights, once a step."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        live = [parameter.detach().float() for parameter in self.live.values()]
        torch._foreach_lerp_(list(self.average.values()), live, 1.0 - decay)

    def restore(self, average: dict[str, Tensor], updates: int) -> None:
        """What a checkpoint kept."""
        for name, value in self.average.items():
            value.copy_(average[name])
        self.updates = updates

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averaged weights meanwhile."""
        kept = {name: parameter.detach().clone() for name, parameter in self.live.items()}
        self._write(self.average)
        try:
            yield
        finally:
            self._write(kept)

    @torch.no_grad()
    def _write(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self.live.items():
            parameter.copy_(values[name])
