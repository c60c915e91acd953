"""Decide which steps change the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SpikeGuard:
    """Decides on the device, without a host sync, whether a step is applied.

    A step is accepted if loss and gradient norm are finite and neither is more than ``max_deviations`` sample standard
    deviations above its mean over the last ``window`` accepted steps (OLMo's SkipStepOptimizer does this too, with
    skipped steps in the window). No step counts as a spike before half of the window is filled. Loss and norm are
    those of all ranks, so all ranks decide alike.

    Shapes: W is the window. In [2, W] the first row has losses, the second gradient norms.
    """

    def __init__(self, max_deviations: float | None, window: int, device: torch.device) -> None:
        """``max_deviations`` None: skip only steps that are not finite; the window stays empty."""
        self.max_deviations = max_deviations
        self.window = window
        self._accepted_2W = torch.full((2, window), float("nan"), dtype=torch.float64, device=device)
        self._num_accepted = torch.zeros((), dtype=torch.int64, device=device)
        self._slots_W = torch.arange(window, device=device)

    @torch.no_grad()
    def is_accepted(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return a 0-d boolean on the arguments' device: the step may change the weights."""
        is_finite = torch.isfinite(loss) & torch.isfinite(grad_norm)
        if self.max_deviations is None:
            return is_finite
        is_filled_2W = ~self._accepted_2W.isnan()
        count = is_filled_2W[0].sum()
        means_2 = self._accepted_2W.nansum(dim=1) / count.clamp(min=1)
        squares_2 = torch.where(is_filled_2W, self._accepted_2W - means_2[:, None], 0.0).square().sum(dim=1)
        limits_2 = means_2 + self.max_deviations * (squares_2 / (count - 1).clamp(min=1)).sqrt()
        is_spike = (_stack(loss, grad_norm) > limits_2).any() & (count >= max(2, (self.window + 1) // 2))
        return is_finite & ~is_spike

    @torch.no_grad()
    def update_window(self, loss: Tensor, grad_norm: Tensor, is_accepted: Tensor) -> None:
        """Add a step to the window if it was accepted."""
        if self.max_deviations is None:
            return
        is_slot_W = (self._slots_W == self._num_accepted % self.window) & is_accepted
        self._accepted_2W = torch.where(is_slot_W, _stack(loss, grad_norm)[:, None], self._accepted_2W)
        self._num_accepted = self._num_accepted + is_accepted

    def state_dict(self) -> dict[str, Any]:
        """The window, oldest step first, and the number of accepted steps, as JSON values. Waits for the device."""
        if self.max_deviations is None:
            return {}
        count = int(self._num_accepted)
        slots_W = [(count + index) % self.window for index in range(self.window)]
        is_filled_W = (~self._accepted_2W[0, slots_W].isnan()).tolist()
        losses, grad_norms = self._accepted_2W[:, slots_W].tolist()
        return {
            "count": count,
            "losses": [loss for loss, is_filled in zip(losses, is_filled_W, strict=True) if is_filled],
            "grad_norms": [norm for norm, is_filled in zip(grad_norms, is_filled_W, strict=True) if is_filled],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the window bit for bit. A smaller window takes the newest steps. An empty state changes nothing."""
        if self.max_deviations is None or not state:
            return
        values_2N = torch.tensor([state["losses"], state["grad_norms"]], dtype=torch.float64)[:, -self.window :]
        num_steps = values_2N.shape[1]
        # Each step returns to its slot, so that sums over the window are rounded as before.
        slots_N = [(state["count"] - num_steps + index) % self.window for index in range(num_steps)]
        self._accepted_2W.fill_(float("nan"))
        self._accepted_2W[:, slots_N] = values_2N.to(self._accepted_2W.device)
        self._num_accepted.fill_(state["count"])


def _stack(loss: Tensor, grad_norm: Tensor) -> Tensor:
    return torch.stack([loss.double(), grad_norm.double()])
