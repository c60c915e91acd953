"""The next step's batch on its way to a GPU while the present one is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diffusionlm.data.loader import LoaderMetrics, StepLoader
from diffusionlm.diffusion.noised_batch import Draw


@dataclass(frozen=True)
class _Ahead:
    """A step that was asked for before its time."""

    step: int
    draws: list[Draw]
    metrics: LoaderMetrics


class Prefetcher:
    """A loader one step ahead of what it says: its state is that behind the last step that was taken.

    Batches go through pinned memory on a stream of their own. On a CPU nothing is copied.
    """

    def __init__(self, loader: StepLoader, device: torch.device) -> None:
        self.loader = loader
        self.device = device
        self._ahead: _Ahead | None = None
        self._state: dict[str, Any] | None = None
        self._metrics: LoaderMetrics | None = None
        self._stream = _stream_of(device)

    def next_step(self, step: int) -> list[Draw]:
        """The micro-batches of a step, on the device."""
        if self._ahead is None:
            self.look_ahead(step)
        assert self._ahead is not None and self._ahead.step == step, "steps are taken in order"
        draws, self._metrics = self._ahead.draws, self._ahead.metrics
        self._ahead, self._state = None, self.loader.state_dict()
        if self._stream is not None:
            present = torch.cuda.current_stream(self.device)
            present.wait_stream(self._stream)
            for tensor in _tensors(draws):
                tensor.record_stream(present)
        return draws

    def look_ahead(self, step: int) -> None:
        """Ask for the step that is taken next; while the device computes."""
        if self._ahead is not None:
            return
        draws = self.loader.next_step(step)
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                draws = [_pinned(draw).to(self.device) for draw in draws]
        self._ahead = _Ahead(step, draws, self.loader.metrics())

    def state_dict(self) -> dict[str, Any]:
        """Behind the last step that was taken."""
        return self.loader.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; before the first step."""
        assert self._ahead is None, "a step was asked for already"
        self.loader.load_state_dict(state)

    def metrics(self) -> LoaderMetrics:
        """Of the last step that was taken."""
        return self.loader.metrics() if self._metrics is None else self._metrics

    def close(self) -> None:
        """No more steps are asked for."""
        self.loader.close()


def _tensors(draws: list[Draw]) -> list[Tensor]:
    """All that was copied to the device; what stays on the CPU is not."""
    held = [value for draw in draws for each in (draw, draw.pattern) for value in vars(each).values()]
    return [value for value in held if isinstance(value, Tensor) and value.is_cuda]


def _pinned(draw: Draw) -> Draw:
    return replace(
        draw,
        inputs_BS=draw.inputs_BS.pin_memory(),
        rows_R=draw.rows_R.pin_memory(),
        targets_R=draw.targets_R.pin_memory(),
        weights_R=draw.weights_R.pin_memory(),
    )


def _stream_of(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
