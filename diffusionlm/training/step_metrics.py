"""Metrics of training steps: read from the device late, counted over the run, and related to the device's peak
FLOPs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from config.finetune.lora import LoraConfig
from config.model import ModelConfig
from diffusionlm.diffusion.noised_batch import NoisedBatch
from diffusionlm.training.monitor import DeviceNumbers
from diffusionlm.training.step import DeviceStepMetrics
from profiling.adapter_size import measure_adapter
from profiling.flops import peak_flops, step_flops

MAX_PENDING_STEPS = 16
"""Steps whose metrics are not read: their batches are held, in case that they were skipped."""

LOSS_AVERAGE_DECAY, LOSS_AVERAGE_GAIN = 0.98, 0.02


@dataclass(frozen=True)
class StepMetrics:
    """`DeviceStepMetrics` as Python numbers."""

    step: int
    """From 1."""
    loss: float
    grad_norm: float
    load_balancing_loss: float
    is_accepted: bool

    @property
    def is_finite(self) -> bool:
        """True if loss and gradient norm are finite. Otherwise the step is never accepted."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class StepMetricsQueue:
    """Metrics of past steps, in order, which the device may still be computing."""

    def __init__(self) -> None:
        self._pending: list[tuple[int, DeviceNumbers]] = []

    def put(self, step: int, metrics: DeviceStepMetrics) -> None:
        """Add the metrics of a step, from 1."""
        loss = metrics.loss
        values_4 = torch.stack(
            [loss, metrics.grad_norm, metrics.load_balancing_loss, metrics.is_accepted.to(loss.dtype)]
        )
        self._pending.append((step, DeviceNumbers(values_4)))

    def pop_all(self) -> list[StepMetrics]:
        """Remove and return all metrics; waits for the device."""
        return self._pop(len(self._pending))

    def pop_until(self, last_step: int) -> list[StepMetrics]:
        """Remove and return the metrics of steps up to ``last_step``; a device may still compute the later ones."""
        return self._pop(sum(step <= last_step for step, _ in self._pending))

    def pop_oldest(self) -> list[StepMetrics]:
        """Of `MAX_PENDING_STEPS` or more steps remove and return the older half, which a device has long computed."""
        return self._pop(MAX_PENDING_STEPS // 2 if len(self._pending) >= MAX_PENDING_STEPS else 0)

    def _pop(self, count: int) -> list[StepMetrics]:
        finished = []
        for step, numbers in self._pending[:count]:
            loss, grad_norm, load_balancing_loss, is_accepted = numbers.read()
            finished.append(StepMetrics(step, loss, grad_norm, load_balancing_loss, bool(is_accepted)))
        del self._pending[:count]
        return finished


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
