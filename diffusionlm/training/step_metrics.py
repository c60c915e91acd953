"""Loss and gradient norm of steps, read from the device when they are wanted and not before."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepMetrics:
    """What a step came to."""

    step: int
    """From 1."""
    loss: float
    grad_norm: float
    """Before it was cut."""
    balance_loss: float
    """Of the routers, with its weight, which is in the gradient and not in the loss."""
    is_accepted: bool
    """Otherwise the step was skipped."""

    @property
    def is_finite(self) -> bool:
        """Loss and norm: a step that is not is never good."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class StepMetricsQueue:
    """Numbers of steps that the device may still be computing, in order."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Tensor, torch.cuda.Event | None]] = []

    def put(self, step: int, values_4: Tensor) -> None:
        """Loss, gradient norm, balance loss and whether the step was good; from a GPU they are copied without waiting
        for them."""
        if values_4.device.type != "cuda":
            self._waiting.append((step, values_4, None))
            return
        copied = torch.empty(4, dtype=values_4.dtype, pin_memory=True)
        copied.copy_(values_4, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._waiting.append((step, copied, event))

    def pop_all(self) -> list[StepMetrics]:
        """All of them; waits for the device."""
        taken = []
        for step, values_4, event in self._waiting:
            if event is not None:
                event.synchronize()
            loss, grad_norm, balance_loss, is_accepted = values_4.tolist()
            taken.append(StepMetrics(step, loss, grad_norm, balance_loss, bool(is_accepted)))
        self._waiting.clear()
        return taken
