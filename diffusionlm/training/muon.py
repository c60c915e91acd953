"""Muon: momentum, orthogonalised (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

Shapes: N matrices of equal shape, R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of ``a x + b x^3 + c x^5``: steep at zero; five rounds bring singular values near one, not to it."""
ROUNDS = 5
MOST_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Of one stack, by kind of device: what a processor's cache holds, and what a GPU is busy with. Bounds the memory."""

AdjustLr = Literal["match_rms_adamw", "original"]


def orthogonalise(stack_NRC: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Each matrix with its singular values moved to about one (0.7 to 1.2), by Newton and Schulz.

    A pure function, matrix by matrix: a stack that is cut gives the same pieces. Products are in ``dtype``, and so is
    what is returned, [N, R, C]. A matrix of zeros stays one.
    """
    a, b, c = COEFFICIENTS
    is_tall = stack_NRC.shape[-2] > stack_NRC.shape[-1]
    x = stack_NRC.to(dtype, copy=True)
    # The Frobenius norm bounds the largest singular value.
    x.div_(x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None])
    if is_tall:
        x = x.mT  # the products of x x^T are then those of the shorter side
    # A product of two matrices is faster than a batch of one.
    x, add_product = (x[0], torch.addmm) if len(x) == 1 else (x, torch.baddbmm)
    for _ in range(ROUNDS):
        gram = x @ x.mT
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, polynomial, x, beta=a)
    return (x.mT if is_tall else x).view(stack_NRC.shape)


def rate_factor(adjust_lr: AdjustLr, rows: int, columns: int) -> float:
    """By how much the rate of a matrix of this shape is larger.

    match_rms_adamw: updates have the root mean square of AdamW's (Liu et al. 2025, arXiv:2502.16982, eq. 4). original:
    that of the first publication.
    """
    match adjust_lr:
        case "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        case "original":
            return math.sqrt(max(1.0, rows / columns))


def product_dtype(precision: Literal["auto", "bfloat16", "float32"], parameter: Tensor) -> torch.dtype:
    """Of the orthogonalisation; auto is bfloat16 where the device of the parameter has units for it."""
    if precision != "auto":
        return torch.bfloat16 if precision == "bfloat16" else torch.float32
    if parameter.device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


class Muon(torch.optim.Optimizer):
    """Muon for matrices, with Nesterov momentum and decoupled weight decay; keeps one ``momentum_buffer`` of each.

    Matrices of equal shape are orthogonalised together, and nothing waits for the device. Parameters without a gradient
    are left as they are. The update is that of `torch.optim.Muon`, and so is the state.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        adjust_lr: AdjustLr = "match_rms_adamw",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """``dtype`` is that of the orthogonalisation's products.

        Raises:
            ValueError: a parameter that is no matrix.
        """
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "adjust_lr": adjust_lr}
        super().__init__(params, {**defaults, "dtype": dtype})
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if parameter.dim() != 2:
                raise ValueError(f"Muon updates matrices, and a parameter has the shape {list(parameter.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None, "gradients are there before the step"
        for group in self.param_groups:
            for parameters in stacks([each for each in group["params"] if each.grad is not None]):
                self._update(parameters, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Matrices of one shape, device and dtype."""
        rate, momentum = group["lr"], group["momentum"]
        gradients = [each.grad for each in parameters if each.grad is not None]
        buffers = [self._buffer(each) for each in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        ahead = torch._foreach_lerp(gradients, buffers, momentum)
        stack_NRC = torch.stack(ahead) if len(ahead) > 1 else ahead[0][None]
        updates_NRC = orthogonalise(stack_NRC, group["dtype"])
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        factor = rate_factor(group["adjust_lr"], *parameters[0].shape)
        torch._foreach_add_(parameters, updates_NRC.unbind(), alpha=-rate * factor)

    def _buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def stacks(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Cut into lists whose matrices can be stacked: one shape, dtype and device, and not too many."""
    alike: dict[tuple[Any, ...], list[Tensor]] = {}
    for each in parameters:
        alike.setdefault((each.shape, each.dtype, each.device), []).append(each)
    for same in alike.values():
        most = max(1, MOST_ELEMENTS.get(same[0].device.type, MOST_ELEMENTS["cuda"]) // max(1, same[0].numel()))
        yield from (same[start : start + most] for start in range(0, len(same), most))
