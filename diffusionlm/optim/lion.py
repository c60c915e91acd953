"""Lion: the sign of an average of gradients (Chen et al. 2023, arXiv:2302.06675, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from diffusionlm.optim.conditional_step import (
    decay_unless_skipped,
    replace_gradients_if_skipped,
    zero_updates_if_skipped,
)


class Lion(torch.optim.Optimizer):
    """Lion with decoupled weight decay; keeps one moment of each parameter, ``exp_avg``.

    Parameters without a gradient are left as they are, and nothing waits for the device.

    Where ``found_inf`` is set, as torch's gradient scaler does, a step in which it is not zero changes nothing; the
    device decides that, and gradients are overwritten.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        """``betas`` are the decays of the average that gives the sign, and of the one that is kept."""
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None, "gradients are there before the step"
        for group in self.param_groups:
            ready = [each for each in group["params"] if each.grad is not None]
            on_cpu = [each for each in ready if each.device.type == "cpu"]
            # A processor has a parameter in its cache for all of the update, a GPU fewer launches for all at once.
            for parameters in (*([each] for each in on_cpu), [each for each in ready if each.device.type != "cpu"]):
                if parameters:
                    self._update(parameters, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        rate, (first, second) = group["lr"], group["betas"]
        gradients = [each.grad for each in parameters if each.grad is not None]
        moments = [self._get_moment(each) for each in parameters]
        replace_gradients_if_skipped(self.found_inf, gradients, moments)
        updates = torch._foreach_lerp(moments, gradients, 1 - first)
        torch._foreach_sign_(updates)
        zero_updates_if_skipped(self.found_inf, list(updates))
        decay_unless_skipped(self.found_inf, parameters, 1 - rate * group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=-rate)
        torch._foreach_lerp_(moments, gradients, 1 - second)

    def _get_moment(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        moment: Tensor = state["exp_avg"]
        return moment
