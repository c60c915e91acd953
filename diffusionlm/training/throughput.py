"""Floating-point operations of the draws that a run makes, and what share of the device's peak they are.

Shapes: B rows, S positions that the model reads, R scored of the flat B * S.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from config.model import ModelConfig
from diffusionlm.diffusion.noised_batch import NoisedBatch
from profiling.flops import peak_flops, step_flops


class ThroughputMeter:
    """Model FLOPs utilisation, where the device's peak is known."""

    def __init__(self, model: ModelConfig, device: torch.device) -> None:
        self.model = model
        self.peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self._last_reading = (0, 0.0)

    def mean_step_seconds(self, step: int, seconds: float) -> float:
        """Mean seconds of a step since this was last asked: steps and seconds of the run so far in, before them out."""
        steps, before = self._last_reading
        self._last_reading = (step, seconds)
        return (seconds - before) / max(1, step - steps)

    def resume_from(self, step: int, seconds: float) -> None:
        """What a run that goes on has behind it."""
        self._last_reading = (step, seconds)

    def metrics(self, noised_batches: Sequence[NoisedBatch], seconds: float) -> dict[str, float]:
        """``mfu``: the FLOPs of these draws, as if each step had them, by a step's seconds and the peak."""
        if self.peak is None:
            return {}
        return {
            "mfu": sum(compute_batch_flops(self.model, noised_batch) for noised_batch in noised_batches)
            / (seconds * self.peak)
        }


def compute_batch_flops(model: ModelConfig, noised_batch: NoisedBatch) -> float:
    """Forward and backward of a draw: its scored rows, and the pairs of positions that see each other in it."""
    places = noised_batch.inputs_BS.numel()
    kinds = model.layer_types or ["full_attention"] * model.num_hidden_layers
    windows = [model.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    counts = {window: count_visible_keys(noised_batch, window) for window in dict.fromkeys(windows)}
    pairs = [int(counts[window].sum()) for window in windows[:-1]]
    pairs.append(int(counts[windows[-1]].flatten()[noised_batch.positions_N.to(counts[windows[-1]].device)].sum()))
    return step_flops(model, model.vocab_size, positions=places, scored=len(noised_batch.positions_N), pairs=pairs)


def count_visible_keys(noised_batch: NoisedBatch, window: int | None) -> Tensor:
    """How many keys each position sees, [B, S], on the CPU."""
    shape = noised_batch.inputs_BS.shape
    intervals = noised_batch.pattern.to("cpu").intervals(shape[1], "cpu", window)
    if intervals is None:
        return noised_batch.pattern.dense_mask(shape[1], "cpu", window).sum(dim=-1).expand(shape)
    starts_BSR, ends_BSR = intervals
    return (ends_BSR - starts_BSR).sum(dim=-1).expand(shape)
