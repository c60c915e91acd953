"""Steps that the device skips, without anyone waiting for it: what an optimizer does with ``found_inf``, which torch's
gradient scaler sets, a 0-d tensor. Where it is not zero, weights and state stay as they were. None: no step is skipped.

Everything is multiplied out and never undone, so that no copies are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor


def replace_gradients_if_skipped(found_inf: Tensor | None, gradients: list[Tensor], moments: list[Tensor]) -> None:
    """In a skipped step gradients, which may not be finite, become the moments: an average of both is what it was."""
    if found_inf is not None:
        for gradient, moment in zip(gradients, moments, strict=True):
            torch.where(found_inf != 0, moment, gradient, out=gradient)


def decay_unless_skipped(found_inf: Tensor | None, parameters: list[Tensor], factor: float) -> None:
    """Multiply parameters of one dtype, which in a skipped step is by one."""
    if found_inf is None:
        torch._foreach_mul_(parameters, factor)
    elif parameters:
        full = torch.full_like(found_inf, factor, dtype=parameters[0].dtype)
        torch._foreach_mul_(parameters, full.masked_fill_(found_inf != 0, 1.0))


def zero_updates_if_skipped(found_inf: Tensor | None, updates: list[Tensor]) -> None:
    """In a skipped step updates, which are finite, become zero."""
    if found_inf is not None and updates:
        torch._foreach_mul_(updates, (found_inf == 0).to(updates[0].dtype))
