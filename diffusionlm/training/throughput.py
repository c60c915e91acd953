"""Floating-point operations of the draws that a run makes, and what share of the device's peak they are.

Shapes: B rows, S positions that the model reads, R scored of the flat B * S.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from config.model import ModelConfig
from diffusionlm.diffusion.noised_batch import Draw
from profiling.flops import peak_flops, step_flops


class FlopAccount:
    """Model FLOPs utilisation, where the device's peak is known."""

    def __init__(self, model: ModelConfig, device: torch.device) -> None:
        self.model = model
        self.peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self._asked_at = (0, 0.0)

    def seconds_of_step(self, step: int, seconds: float) -> float:
        """Mean seconds of a step since this was last asked: steps and seconds of the run so far in, before them out."""
        steps, before = self._asked_at
        self._asked_at = (step, seconds)
        return (seconds - before) / max(1, step - steps)

    def start_at(self, step: int, seconds: float) -> None:
        """What a run that goes on has behind it."""
        self._asked_at = (step, seconds)

    def metrics(self, draws: Sequence[Draw], seconds: float) -> dict[str, float]:
        """``mfu``: the FLOPs of these draws, as if each step had them, by a step's seconds and the peak."""
        if self.peak is None:
            return {}
        return {"mfu": sum(draw_flops(self.model, draw) for draw in draws) / (seconds * self.peak)}


def draw_flops(model: ModelConfig, draw: Draw) -> float:
    """Forward and backward of a draw: its scored rows, and the pairs of positions that see each other in it."""
    places = draw.inputs_BS.numel()
    kinds = model.layer_types or ["full_attention"] * model.num_hidden_layers
    windows = [model.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    counts = {window: visible_keys(draw, window) for window in dict.fromkeys(windows)}
    pairs = [int(counts[window].sum()) for window in windows[:-1]]
    pairs.append(int(counts[windows[-1]].flatten()[draw.rows_R.to(counts[windows[-1]].device)].sum()))
    return step_flops(model, model.vocab_size, positions=places, scored=len(draw.rows_R), pairs=pairs)


def visible_keys(draw: Draw, window: int | None) -> Tensor:
    """How many keys each position sees, [B, S], on the CPU."""
    shape = draw.inputs_BS.shape
    intervals = draw.pattern.to("cpu").intervals(shape[1], "cpu", window)
    if intervals is None:
        return draw.pattern.dense(shape[1], "cpu", window).sum(dim=-1).expand(shape)
    starts_BSR, ends_BSR = intervals
    return (ends_BSR - starts_BSR).sum(dim=-1).expand(shape)
