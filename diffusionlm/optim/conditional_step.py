"""Base class of optimizers whose steps a GPU can skip without a host sync."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ddp.replicas import INTEGER_DTYPES


class SkippableOptimizer(torch.optim.Optimizer):
    """Optimizer with one moment for each parameter, whose step changes nothing where ``found_inf`` is not zero.

    ``found_inf`` is a 0-d tensor on the device, set as torch's gradient scaler sets it; None: the step is made. A
    skipped step multiplies weights by one and adds zero, so no copy of the weights is needed. Its gradients need not be
    finite: they are overwritten.

    Parameters without a gradient stay as they are.
    """

    moment_key: ClassVar[str]
    """Key of the moment in the state of a parameter."""
    found_inf: Tensor | None = None
    _step_supports_amp_scaling = True

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Keys of the state of a parameter."""
        return (self.moment_key,)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None, "gradients are computed before the step"
        self._flags: dict[tuple[torch.dtype, bool], Tensor] = {}
        for group in self.param_groups:
            self.update([parameter for parameter in group["params"] if parameter.grad is not None], group)

    @abstractmethod
    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update the parameters of a group that have a gradient."""

    def gradients_and_moments(self, parameters: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients and moments of parameters that have a gradient. Moments start at zero.

        In a skipped step the gradients become the moments, so that an average of both is the moment.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        moments = [self._moment(parameter) for parameter in parameters]
        if self.found_inf is not None and gradients:
            # A product with zero would keep NaN. The product of the bits, as integers, with zero is zero.
            dtype = INTEGER_DTYPES[gradients[0].element_size()]
            torch._foreach_mul_([gradient.view(dtype) for gradient in gradients], self._flag(dtype, skips=False))
            torch._foreach_add_(gradients, torch._foreach_mul(moments, self._flag(moments[0].dtype, skips=True)))
        return gradients, moments

    def zero_updates_if_skipped(self, updates: list[Tensor]) -> None:
        """Set updates, which are finite, to zero in a skipped step."""
        if self.found_inf is not None and updates:
            torch._foreach_mul_(updates, self._flag(updates[0].dtype, skips=False))

    def decay_unless_skipped(self, parameters: list[Tensor], factor: float) -> None:
        """Multiply parameters of one dtype by ``factor``, or by one in a skipped step."""
        if self.found_inf is None:
            torch._foreach_mul_(parameters, factor)
        elif parameters and factor != 1.0:
            device_factor = torch.full_like(self.found_inf, factor, dtype=parameters[0].dtype)
            device_factor.masked_fill_(self._flag(torch.bool, skips=True), 1.0)
            torch._foreach_mul_(parameters, device_factor)

    def _flag(self, dtype: torch.dtype, *, skips: bool) -> Tensor:
        """1 in a step that is skipped, or in one that is not, else 0; 0-d on the device, computed once in a step."""
        assert self.found_inf is not None
        if (dtype, skips) not in self._flags:
            flag = self.found_inf != 0 if skips else self.found_inf == 0
            self._flags[dtype, skips] = flag if dtype == torch.bool else flag.to(dtype)
        return self._flags[dtype, skips]

    def _moment(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state[self.moment_key] = torch.zeros_like(parameter)
        moment: Tensor = state[self.moment_key]
        return moment
