"""The next step's batch on its way to a GPU while the present one is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diffusionlm.data.loader import LoaderMetrics, StepLoader
from diffusionlm.diffusion.noised_batch import NoisedBatch


@dataclass(frozen=True)
class _PrefetchedStep:
    """A step that was asked for before its time."""

    step: int
    noised_batches: list[NoisedBatch]
    metrics: LoaderMetrics


class Prefetcher:
    """A loader one step ahead of what it says: its state is that behind the last step that was taken.

    Batches go through pinned memory on a stream of their own. On a CPU nothing is copied.
    """

    def __init__(self, loader: StepLoader, device: torch.device) -> None:
        self.loader = loader
        self.device = device
        self._prefetched: _PrefetchedStep | None = None
        self._state: dict[str, Any] | None = None
        self._metrics: LoaderMetrics | None = None
        self._stream = _create_stream(device)

    def next_step(self, step: int) -> list[NoisedBatch]:
        """The micro-batches of a step, on the device."""
        if self._prefetched is None:
            self.prefetch(step)
        assert self._prefetched is not None and self._prefetched.step == step, "steps are taken in order"
        noised_batches, self._metrics = self._prefetched.noised_batches, self._prefetched.metrics
        self._prefetched, self._state = None, self.loader.state_dict()
        if self._stream is not None:
            present = torch.cuda.current_stream(self.device)
            present.wait_stream(self._stream)
            for tensor in _cuda_tensors(noised_batches):
                tensor.record_stream(present)
        return noised_batches

    def prefetch(self, step: int) -> None:
        """Ask for the step that is taken next; while the device computes."""
        if self._prefetched is not None:
            return
        noised_batches = self.loader.next_step(step)
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                noised_batches = [_pin_memory(noised_batch).to(self.device) for noised_batch in noised_batches]
        self._prefetched = _PrefetchedStep(step, noised_batches, self.loader.metrics())

    def state_dict(self) -> dict[str, Any]:
        """Behind the last step that was taken."""
        return self.loader.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; before the first step."""
        assert self._prefetched is None, "a step was asked for already"
        self.loader.load_state_dict(state)

    def metrics(self) -> LoaderMetrics:
        """Of the last step that was taken."""
        return self.loader.metrics() if self._metrics is None else self._metrics

    def close(self) -> None:
        """No more steps are asked for."""
        self.loader.close()


def _cuda_tensors(noised_batches: list[NoisedBatch]) -> list[Tensor]:
    """All that was copied to the device; what stays on the CPU is not."""
    held = [
        value
        for noised_batch in noised_batches
        for each in (noised_batch, noised_batch.pattern)
        for value in vars(each).values()
    ]
    return [value for value in held if isinstance(value, Tensor) and value.is_cuda]


def _pin_memory(noised_batch: NoisedBatch) -> NoisedBatch:
    return replace(
        noised_batch,
        inputs_BS=noised_batch.inputs_BS.pin_memory(),
        positions_N=noised_batch.positions_N.pin_memory(),
        targets_N=noised_batch.targets_N.pin_memory(),
        weights_N=noised_batch.weights_N.pin_memory(),
    )


def _create_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
