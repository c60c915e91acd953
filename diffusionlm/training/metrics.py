"""Metrics of training steps: read from the device late, counted over the run, and related to the device's peak
FLOPs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from config.finetune.lora import LoraConfig
from config.model import ModelConfig
from diffusionlm.diffusion.noised_batch import NoisedBatch
from profiling.adapter_size import measure_adapter
from profiling.flops import peak_flops, step_flops

LOSS_AVERAGE_DECAY, LOSS_AVERAGE_GAIN = 0.98, 0.02


class AsyncHostCopy:
    """Values on their way to the host: from a GPU they are copied asynchronously, through pinned memory."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._event = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype).pin_memory()
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> list[float]:
        """Wait until the device has computed the values, which are one-dimensional, and return them. What was launched
        later is not waited for."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._values.tolist()
        return numbers


@dataclass(frozen=True)
class MonitorResults:
    """What a `StepMonitor` has computed in a step."""

    sums: AsyncHostCopy
    """Numerators of all metrics, then their denominators."""
    names: tuple[str, ...]

    def metrics(self) -> dict[str, float]:
        """Metrics of the step whose denominator is not zero; waits until the device has made it.

        ``loss_answer`` is left out if no answer has padding. ``weight_norms/...`` and ``activation_norms/...``: see
        `summarize_norms`.
        """
        sums = self.sums.read()
        pairs = zip(self.names, sums[: len(self.names)], sums[len(self.names) :], strict=True)
        metrics = {name: numerator / denominator for name, numerator, denominator in pairs if denominator}
        if "loss_eos_padding" not in metrics:
            metrics.pop("loss_answer", None)
        return summarize_norms(metrics)


def summarize_norms(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics with the root of each sum of squares ``weight_norms/...``, and before the norms of each prefix their
    ``prefix/mean``, ``/min`` and ``/max``."""
    norms = {name: value for name, value in metrics.items() if "_norms/" in name}
    summary = {name: value for name, value in metrics.items() if name not in norms}
    for prefix in dict.fromkeys(name.partition("/")[0] for name in norms):
        values = {name: value for name, value in norms.items() if name.partition("/")[0] == prefix}
        if prefix == "weight_norms":
            values = {name: math.sqrt(square) for name, square in values.items()}
        numbers = values.values()
        summary |= {f"{prefix}/mean": sum(numbers) / len(numbers)}
        summary |= {f"{prefix}/min": min(numbers), f"{prefix}/max": max(numbers), **values}
    return summary


class StepMetrics:
    """The metrics of a step. A GPU may still be computing its results: asking for one of them waits for the step."""

    def __init__(
        self, step: int, loss: Tensor, grad_norm: Tensor, load_balancing_loss: Tensor, is_accepted: Tensor
    ) -> None:
        """``step``: from 1. The tensors are 0-d, on the device."""
        self.step = step
        self.tensors = (loss, grad_norm, load_balancing_loss, is_accepted)
        self.at_launch: dict[str, Any] = {}
        """Logged metrics that are known when the step is launched; empty if it is not logged."""
        self.peak_seconds: float | None = None
        """Seconds at the peak of the device: see `ThroughputMeter.count_peak_seconds`."""
        self.monitor: MonitorResults | None = None

    @cached_property
    def _copy(self) -> AsyncHostCopy:
        loss, *others = self.tensors
        return AsyncHostCopy(torch.stack([loss, *(value.to(loss.dtype) for value in others)]))

    def start_copy(self) -> None:
        """Begin to copy the results to the host, before later steps are launched."""
        _ = self._copy

    def wait(self) -> None:
        """Wait for the device."""
        _ = self._results

    @cached_property
    def _results(self) -> list[float]:
        return self._copy.read()

    @property
    def loss(self) -> float:
        """Nats per target token, unless the objective divides by something else."""
        return self._results[0]

    @property
    def grad_norm(self) -> float:
        """L2 norm before clipping."""
        return self._results[1]

    @property
    def load_balancing_loss(self) -> float:
        """The routers' auxiliary loss with its weight. The gradient contains it, `loss` does not."""
        return self._results[2]

    @property
    def is_accepted(self) -> bool:
        """False if the step was skipped."""
        return bool(self._results[3])

    @property
    def is_finite(self) -> bool:
        """True if loss and gradient norm are finite. Otherwise the step is never accepted."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass
class TrainingProgress:
    """Counters of a run. The field names are keys of state.json."""

    step: int = 0
    tokens_seen: int = 0
    """Target tokens of all ranks."""
    seconds: float = 0.0
    """Duration of training steps, also of those before the run was resumed."""
    loss_average: float = 0.0
    """Exponential average of the loss of accepted steps, without bias correction."""
    skipped_in_a_row: int = 0
    skipped: int = 0

    def smooth_loss(self, last_step: int) -> float:
        """`loss_average` with bias correction; ``last_step`` is the last step that was counted."""
        return self.loss_average / (1.0 - LOSS_AVERAGE_DECAY ** max(1, last_step - self.skipped))

    def count(self, metrics: StepMetrics) -> None:
        """Update the loss average, or the numbers of skipped steps."""
        if metrics.is_accepted:
            self.skipped_in_a_row = 0
            self.loss_average = LOSS_AVERAGE_DECAY * self.loss_average + LOSS_AVERAGE_GAIN * metrics.loss
        else:
            self.skipped_in_a_row += 1
            self.skipped += 1


class ThroughputMeter:
    """Seconds per step, and model FLOPs utilization (MFU) where the device's peak is known."""

    def __init__(
        self,
        model: ModelConfig,
        device: torch.device,
        adapter: LoraConfig | None = None,
        *,
        has_reference: bool = False,
    ) -> None:
        """``adapter``: trained on the frozen model. None: the model is trained. ``has_reference``: of preferences."""
        self.model, self.has_reference = model, has_reference
        self.active_factors = None if adapter is None else measure_adapter(adapter, model).active_factors
        self.peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self._last_reading = (0, 0.0)

    def mean_step_seconds(self, step: int, seconds: float) -> float:
        """Mean duration of the steps since the last call; ``step`` and ``seconds`` are totals of the run."""
        last_step, last_seconds = self._last_reading
        self._last_reading = (step, seconds)
        return (seconds - last_seconds) / max(1, step - last_step)

    def resume_from(self, step: int, seconds: float) -> None:
        """Set the totals of a resumed run."""
        self._last_reading = (step, seconds)

    def count_peak_seconds(self, noised_batches: Sequence[NoisedBatch]) -> float | None:
        """Seconds that a step on these batches would take at the device's peak: the MFU is this, divided by the step's
        duration. None: the peak is unknown. The device is not read."""
        if self.peak is None:
            return None
        flops = sum(
            compute_batch_flops(self.model, batch, self.active_factors, has_reference=self.has_reference)
            for batch in noised_batches
        )
        return flops / self.peak


def compute_batch_flops(
    model: ModelConfig,
    noised_batch: NoisedBatch,
    active_factors: int | None = None,
    *,
    has_reference: bool = False,
) -> float:
    """FLOPs of a batch's forward and backward: only visible keys count, and in the last layer only output positions.
    They are counted on the host, from the batch that was copied to the device.

    ``active_factors``, ``has_reference``: see `step_flops`.
    """
    noised_batch = noised_batch.on_host or noised_batch
    layer_types = model.layer_types or ["full_attention"] * model.num_hidden_layers
    windows = [model.sliding_window if kind == "sliding_attention" else None for kind in layer_types]
    counts = {window: count_visible_keys(noised_batch, window) for window in dict.fromkeys(windows)}
    pairs = [int(counts[window].sum()) for window in windows[:-1]]
    last_counts = counts[windows[-1]]
    pairs.append(int(last_counts.flatten()[noised_batch.positions_N.to(last_counts.device)].sum()))
    return step_flops(
        model,
        model.vocab_size,
        positions=noised_batch.inputs_BS.numel(),
        scored=len(noised_batch.positions_N),
        pairs=pairs,
        active_factors=active_factors,
        has_reference=has_reference,
    )


def count_visible_keys(noised_batch: NoisedBatch, window: int | None) -> Tensor:
    """Number of keys that each input position attends to, [B, S], on the CPU."""
    shape = noised_batch.inputs_BS.shape
    intervals = noised_batch.pattern.to("cpu").intervals(shape[1], "cpu", window)
    if intervals is None:
        return noised_batch.pattern.dense_mask(shape[1], "cpu", window).sum(dim=-1).expand(shape)
    starts_BSR, ends_BSR = intervals
    return (ends_BSR - starts_BSR).sum(dim=-1).expand(shape)
