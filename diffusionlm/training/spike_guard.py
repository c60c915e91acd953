"""Which steps change the weights: not those whose loss or gradient is no number, nor spikes far above the last ones."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from logger import RunLogger


class SpikeGuard:
    """Judges a step by its loss and its gradient norm, where they were computed: nobody waits for a device.

    A step is good if both are finite and neither is more than ``max_deviations`` sample standard deviations above the
    mean of the last ``window`` good steps (as OLMo's SkipStepOptimizer, whose window has the skipped ones too). Nothing
    is a spike before half of the window is filled. Loss and norm are those of all ranks, so all judge alike.

    W is the window; each row of two is for losses, then for gradient norms.
    """

    def __init__(self, max_deviations: float | None, window: int, device: torch.device) -> None:
        """``max_deviations`` None: only what is not finite is bad, and nothing is kept."""
        self.max_deviations = max_deviations
        self.window = window
        self._accepted_2W = torch.full((2, window), float("nan"), dtype=torch.float64, device=device)
        self._num_accepted = torch.zeros((), dtype=torch.int64, device=device)
        self._slots_W = torch.arange(window, device=device)

    @torch.no_grad()
    def is_accepted(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Whether the step may change the weights: a boolean of no dimension, on the device of both numbers."""
        is_finite = torch.isfinite(loss) & torch.isfinite(grad_norm)
        if self.max_deviations is None:
            return is_finite
        is_kept_2W = ~self._accepted_2W.isnan()
        count = is_kept_2W[0].sum()
        means_2 = self._accepted_2W.nansum(dim=1) / count.clamp(min=1)
        squares_2 = torch.where(is_kept_2W, self._accepted_2W - means_2[:, None], 0.0).square().sum(dim=1)
        limits_2 = means_2 + self.max_deviations * (squares_2 / (count - 1).clamp(min=1)).sqrt()
        is_spike = (_pair(loss, grad_norm) > limits_2).any() & (count >= max(2, (self.window + 1) // 2))
        return is_finite & ~is_spike

    @torch.no_grad()
    def update_window(self, loss: Tensor, grad_norm: Tensor, is_accepted: Tensor) -> None:
        """Remember the numbers of a step, if it was good."""
        if self.max_deviations is None:
            return
        is_here_W = (self._slots_W == self._num_accepted % self.window) & is_accepted
        self._accepted_2W = torch.where(is_here_W, _pair(loss, grad_norm)[:, None], self._accepted_2W)
        self._num_accepted = self._num_accepted + is_accepted

    def state_dict(self) -> dict[str, Any]:
        """What the window holds, oldest first, and how many good steps there were; JSON. Waits for the device."""
        if self.max_deviations is None:
            return {}
        count = int(self._num_accepted)
        places_W = [(count + place) % self.window for place in range(self.window)]
        losses, grad_norms = self._accepted_2W[:, places_W].tolist()
        kept = [not each.isnan() for each in self._accepted_2W[0, places_W]]
        return {
            "count": count,
            "losses": [value for value, is_kept in zip(losses, kept, strict=True) if is_kept],
            "grad_norms": [value for value, is_kept in zip(grad_norms, kept, strict=True) if is_kept],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, to the last bit. Of a longer window the newest steps are taken; of a guard that was off,
        nothing."""
        if self.max_deviations is None or not state:
            return
        values_2N = torch.tensor([state["losses"], state["grad_norms"]], dtype=torch.float64)[:, -self.window :]
        number = values_2N.shape[1]
        places_N = [(state["count"] - number + index) % self.window for index in range(number)]
        self._accepted_2W.fill_(float("nan"))
        self._accepted_2W[:, places_N] = values_2N.to(self._accepted_2W.device)
        self._num_accepted.fill_(state["count"])


def _pair(loss: Tensor, grad_norm: Tensor) -> Tensor:
    return torch.stack([loss.double(), grad_norm.double()])


class Counters(Protocol):
    """What a run counts."""

    skipped: int
    skipped_in_a_row: int
    loss_average: float
    """Exponential average of the loss, decay 0.98, not yet corrected for its start."""


class Numbers(Protocol):
    """What a step came to, once it was read."""

    @property
    def step(self) -> int:
        """From 1."""

    @property
    def loss(self) -> float:
        """Nats per token, unless the objective divides otherwise."""

    @property
    def grad_norm(self) -> float:
        """Before it was cut."""

    @property
    def is_finite(self) -> bool:
        """Both of them."""

    @property
    def is_accepted(self) -> bool:
        """What `SpikeGuard.is_good` said."""


class Batches(Protocol):
    """Who keeps the batches of the steps whose numbers are still to come."""

    def release(self, step: int) -> None:
        """It was good."""

    def record(self, numbers: Numbers) -> str:
        """It was skipped: keep it for a person to look at. Returns where it is, or why it could not be kept."""


def count_step(
    progress: Counters, logger: RunLogger, numbers: Numbers, skipped_batches: Batches, max_consecutive_skips: int
) -> None:
    """Count a step by its numbers; a skipped one is recorded and said.

    Raises:
        ValueError: ``max_consecutive_skips`` (`training.max_nonfinite_steps`) steps in a row were skipped.
    """
    if numbers.is_accepted:
        progress.skipped_in_a_row = 0
        progress.loss_average = 0.98 * progress.loss_average + 0.02 * numbers.loss
        skipped_batches.release(numbers.step)
        return
    progress.skipped_in_a_row += 1
    progress.skipped += 1
    text = f"step {numbers.step}: skipped, loss {numbers.loss}, gradient norm {numbers.grad_norm}"
    if numbers.is_finite:
        text += ", a spike (training.max_spike_deviations)"
    logger.event(numbers.step, "skipped", f"{text}; {skipped_batches.record(numbers)}")
    if progress.skipped_in_a_row < max_consecutive_skips:
        return
    last = f"{text}; {max_consecutive_skips} steps in a row were"
    if numbers.is_finite:
        raise ValueError(
            f"{last} spikes or not finite (training.max_nonfinite_steps). The last checkpoint stands; if the loss rose "
            "for good, try a lower optimizer.learning_rate, else a larger training.max_spike_deviations"
        )
    raise ValueError(
        f"{last} not finite (training.max_nonfinite_steps). The last checkpoint "
        'stands; try a lower optimizer.learning_rate or training.precision = "float32"'
    )
