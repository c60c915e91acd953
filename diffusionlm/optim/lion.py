"""Lion: the sign of an average of gradients (Chen et al. 2023, arXiv:2302.06675, algorithm 2)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from diffusionlm.optim.chunks import split_by_elements
from diffusionlm.optim.conditional_step import SkippableOptimizer


class Lion(SkippableOptimizer):
    """Lion with decoupled weight decay; its state is one moment for each parameter, ``exp_avg``."""

    moment_key = "exp_avg"

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        """``betas`` are the decays of the average that gives the sign, and of the moment."""
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update parameters one by one on a CPU, so that each stays in its cache, and many at once on a GPU."""
        cpu_parameters = [parameter for parameter in parameters if parameter.device.type == "cpu"]
        gpu_parameters = [parameter for parameter in parameters if parameter.device.type != "cpu"]
        for parameter in cpu_parameters:
            self._update_together([parameter], group)
        for chunk in split_by_elements(gpu_parameters):
            self._update_together(gpu_parameters[chunk], group)

    def _update_together(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        learning_rate, (beta_1, beta_2) = group["lr"], group["betas"]
        gradients, moments = self.gradients_and_moments(parameters)
        updates = list(torch._foreach_lerp(moments, gradients, 1 - beta_1))
        torch._foreach_sign_(updates)
        self.zero_updates_if_skipped(updates)
        self.decay_unless_skipped(parameters, 1 - learning_rate * group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=-learning_rate)
        torch._foreach_lerp_(moments, gradients, 1 - beta_2)
