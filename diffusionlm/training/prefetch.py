"""Load the next step's batch and copy it to the GPU while the current step is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from diffusionlm.data.loader import LoaderMetrics, StepLoader
from diffusionlm.diffusion.noised_batch import NoisedBatch


@dataclass(frozen=True)
class _PrefetchedStep:
    step: int
    noised_batches: list[NoisedBatch]
    metrics: LoaderMetrics


class Prefetcher:
    """A loader that is one step ahead. Its state and metrics are those after the last step that `next_step` returned.

    Batches are copied to a GPU through pinned memory: the host does not wait for the copies, which follow the work of
    the step. On a CPU nothing is copied.
    """

    def __init__(self, loader: StepLoader, device: torch.device) -> None:
        self.loader = loader
        self.device = device
        self._prefetched: _PrefetchedStep | None = None
        self._state: dict[str, Any] | None = None
        self._metrics: LoaderMetrics | None = None

    def next_step(self, step: int) -> list[NoisedBatch]:
        """The micro-batches of a step, on the device."""
        if self._prefetched is None:
            self.prefetch(step)
        assert self._prefetched is not None and self._prefetched.step == step, "steps come in order"
        noised_batches, self._metrics = self._prefetched.noised_batches, self._prefetched.metrics
        self._prefetched, self._state = None, self.loader.state_dict()
        return noised_batches

    def prefetch(self, step: int) -> None:
        """Load the next step, unless it is loaded already, and start its copy to the device."""
        if self._prefetched is not None:
            return
        noised_batches = self.loader.next_step(step)
        if self.device.type == "cuda":
            noised_batches = [noised_batch.pin_memory().to(self.device) for noised_batch in noised_batches]
        self._prefetched = _PrefetchedStep(step, noised_batches, self.loader.metrics())

    def state_dict(self) -> dict[str, Any]:
        """Loader state after the last returned step, not after the prefetched one."""
        return self.loader.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, before the first step."""
        assert self._prefetched is None, "a step was prefetched already"
        self.loader.load_state_dict(state)

    def metrics(self) -> LoaderMetrics:
        """Metrics of the last returned step."""
        return self.loader.metrics() if self._metrics is None else self._metrics

    def close(self) -> None:
        """Stop prefetching and close the loader."""
        self.loader.close()
