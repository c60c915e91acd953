"""Muon: momentum, orthogonalised (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

Shapes: N matrices of equal shape, R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from diffusionlm.optim.conditional_step import (
    decay_unless_skipped,
    replace_gradients_if_skipped,
    zero_updates_if_skipped,
)
from profiling.torch_setup import has_native_bfloat16

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of ``a x + b x^3 + c x^5``: steep at zero; five rounds bring singular values near one, not to it."""
NEWTON_SCHULZ_STEPS = 5
MAX_STACK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Of one stack, by kind of device: what a processor's cache holds, and what a GPU is busy with. Bounds the memory."""

AdjustLr = Literal["match_rms_adamw", "original"]


def orthogonalize(stack_NRC: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
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
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, polynomial, x, beta=a)
    return (x.mT if is_tall else x).view(stack_NRC.shape)


def learning_rate_scale(adjust_lr: AdjustLr, rows: int, columns: int) -> float:
    """By how much the rate of a matrix of this shape is larger.

    match_rms_adamw: updates have the root mean square of AdamW's (Liu et al. 2025, arXiv:2502.16982, eq. 4). original:
    that of the first publication.
    """
    match adjust_lr:
        case "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        case "original":
            return math.sqrt(max(1.0, rows / columns))


def choose_product_dtype(precision: Literal["auto", "bfloat16", "float32"], parameter: Tensor) -> torch.dtype:
    """Of the orthogonalisation; auto is bfloat16 where the device of the parameter has units for it."""
    if precision != "auto":
        return torch.bfloat16 if precision == "bfloat16" else torch.float32
    return torch.bfloat16 if has_native_bfloat16(parameter.device.type) else torch.float32


class MatrixRowExchange(Protocol):
    """Matrices that are cut into rows, one part on each rank; all ranks call it for the same matrices, in order."""

    def whole_shape(self, part: Tensor) -> torch.Size:
        """Of the matrix that a parameter has rows of."""

    def __call__(
        self, parts: list[Tensor], rows: list[Tensor], function: Callable[[list[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        """Put the rows of all ranks together, act on whole matrices, each on one rank, and give rows of the results.

        ``parts`` are the parameters to which ``rows`` belong. ``act`` keeps shapes and dtype.
        """


class Muon(torch.optim.Optimizer):
    """Muon for matrices, with Nesterov momentum and decoupled weight decay; keeps one ``momentum_buffer`` of each.

    Matrices of equal shape are orthogonalised together, and nothing waits for the device. Parameters without a gradient
    are left as they are. The update is that of `torch.optim.Muon`, and so is the state.

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
        momentum: float,
        weight_decay: float,
        adjust_lr: AdjustLr = "match_rms_adamw",
        dtype: torch.dtype = torch.bfloat16,
        row_exchange: MatrixRowExchange | None = None,
    ) -> None:
        """``dtype`` is that of the orthogonalisation's products. With an ``exchange`` parameters are rows of matrices.

        Raises:
            ValueError: a parameter that is no matrix.
        """
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "adjust_lr": adjust_lr}
        super().__init__(params, {**defaults, "dtype": dtype})
        self.row_exchange = row_exchange
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if parameter.dim() != 2:
                raise ValueError(f"Muon updates matrices, and a parameter has the shape {list(parameter.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None, "gradients are there before the step"
        for group in self.param_groups:
            ready = [each for each in group["params"] if each.grad is not None]
            if self.row_exchange is not None:
                self._step_sharded(self.row_exchange, ready, group)
                continue
            for parameters in group_into_stacks(ready):
                updates = orthogonalize(_stack(self._nesterov_directions(parameters, group)), group["dtype"])
                self._apply(parameters, list(updates.unbind()), group, parameters[0].shape)

    def _step_sharded(self, row_exchange: MatrixRowExchange, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """All matrices in one exchange, in the dtype of the products, to which they would be rounded next."""
        ahead = [each.to(group["dtype"]) for each in self._nesterov_directions(parameters, group)]

        def function(matrices: list[Tensor]) -> list[Tensor]:
            done: dict[int, Tensor] = {}
            for alike in group_into_stacks(matrices):
                done.update(zip(map(id, alike), orthogonalize(_stack(alike), group["dtype"]).unbind(), strict=True))
            return [done[id(each)] for each in matrices]

        updates = dict(zip(parameters, row_exchange(parameters, ahead, function), strict=True))
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for each in parameters:
            by_shape.setdefault(row_exchange.whole_shape(each), []).append(each)
        for shape, same in by_shape.items():
            self._apply(same, [updates[each] for each in same], group, shape)

    def _nesterov_directions(self, parameters: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Move the momenta, and look one step ahead of them."""
        if not parameters:
            return []
        gradients = [each.grad for each in parameters if each.grad is not None]
        buffers = [self._get_buffer(each) for each in parameters]
        replace_gradients_if_skipped(self.found_inf, gradients, buffers)
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        return list(torch._foreach_lerp(gradients, buffers, group["momentum"]))

    def _apply(self, parameters: list[Tensor], updates: list[Tensor], group: dict[str, Any], shape: torch.Size) -> None:
        """Decay parameters, and add their updates, which are those of matrices of this shape."""
        rate = group["lr"]
        zero_updates_if_skipped(self.found_inf, updates)
        decay_unless_skipped(self.found_inf, parameters, 1 - rate * group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=-rate * learning_rate_scale(group["adjust_lr"], *shape))

    def _get_buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def _stack(matrices: list[Tensor]) -> Tensor:
    return torch.stack(matrices) if len(matrices) > 1 else matrices[0][None]


def group_into_stacks(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Cut into lists whose matrices can be stacked: one shape, dtype and device, and not too many."""
    alike: dict[tuple[Any, ...], list[Tensor]] = {}
    for each in parameters:
        alike.setdefault((each.shape, each.dtype, each.device), []).append(each)
    for same in alike.values():
        most = max(
            1, MAX_STACK_ELEMENTS.get(same[0].device.type, MAX_STACK_ELEMENTS["cuda"]) // max(1, same[0].numel())
        )
        yield from (same[start : start + most] for start in range(0, len(same), most))
