"""Muon: orthogonalized momentum (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

Shapes: N matrices of equal shape, R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from ddp.all_to_all_rows import AllToAllRows
from diffusionlm.optim.conditional_step import SkippableOptimizer
from profiling.torch_setup import has_native_bfloat16

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c of the polynomial a x + b x^3 + c x^5. It is steep at zero, so that five iterations bring singular values
near one; they do not converge to it."""
NEWTON_SCHULZ_STEPS = 5
MAX_STACK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Largest stack of matrices, by device type: what fits a CPU's cache, and what occupies a GPU. It bounds the memory."""


def orthogonalize(stack_NRC: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Move the singular values of each matrix near one (0.7 to 1.2) by Newton-Schulz iterations.

    Each matrix is computed independently of the others in the stack. A matrix of zeros stays zero.

    Args:
        dtype: of the matrix products and of the result, [N, R, C].
    """
    a, b, c = COEFFICIENTS
    is_tall = stack_NRC.shape[-2] > stack_NRC.shape[-1]
    x = stack_NRC.to(dtype, copy=True)
    # The Frobenius norm bounds the largest singular value.
    x.div_(x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None])
    if is_tall:
        x = x.mT  # x x^T then has the size of the shorter side
    # addmm of two matrices is faster than baddbmm of a batch of one.
    x, add_product = (x[0], torch.addmm) if len(x) == 1 else (x, torch.baddbmm)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, polynomial, x, beta=a)
    return (x.mT if is_tall else x).view(stack_NRC.shape)


def learning_rate_scale(rows: int, columns: int) -> float:
    """Factor on the learning rate of a matrix of this shape, by which updates get the root mean square of AdamW's (Liu
    et al. 2025, arXiv:2502.16982, eq. 4)."""
    return 0.2 * math.sqrt(max(rows, columns))


def select_product_dtype(precision: Literal["auto", "bfloat16", "float32"], device: torch.device) -> torch.dtype:
    """Dtype of the orthogonalization's products; ``auto`` is bfloat16 if the device supports it natively."""
    if precision == "auto":
        return torch.bfloat16 if has_native_bfloat16(device.type) else torch.float32
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


class Muon(SkippableOptimizer):
    """Muon for matrices, with Nesterov momentum and decoupled weight decay. Its state is a ``momentum_buffer``.

    Update and state equal those of `torch.optim.Muon`, but matrices of equal shape are orthogonalized as one stack.
    """

    moment_key = "momentum_buffer"

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype = torch.bfloat16,
        row_exchange: AllToAllRows | None = None,
    ) -> None:
        """
        Args:
            dtype: of the orthogonalization's products.
            row_exchange: gathers whole matrices if each parameter holds this rank's rows of one.

        Raises:
            ValueError: a parameter is not a matrix.
        """
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "dtype": dtype})
        self.row_exchange = row_exchange
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() != 2:
                    raise ValueError(f"Muon updates matrices, but a parameter has the shape {list(parameter.shape)}")

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update matrices stack by stack, or all of them in one exchange if they are sharded."""
        if self.row_exchange is not None:
            self._update_sharded(self.row_exchange, parameters, group)
            return
        for matrices in group_into_stacks(parameters):
            directions = orthogonalize(_stack(self._nesterov_directions(matrices, group)), group["dtype"])
            self._apply(matrices, list(directions.unbind()), group, matrices[0].shape)

    def _update_sharded(self, row_exchange: AllToAllRows, parameters: list[Tensor], group: dict[str, Any]) -> None:
        # The products round to their dtype next, so the exchange can be in it already.
        rows = [direction.to(group["dtype"]) for direction in self._nesterov_directions(parameters, group)]

        def orthogonalize_all(matrices: list[Tensor]) -> list[Tensor]:
            results: dict[int, Tensor] = {}
            for stack in group_into_stacks(matrices):
                results.update(zip(map(id, stack), orthogonalize(_stack(stack), group["dtype"]).unbind(), strict=True))
            return [results[id(matrix)] for matrix in matrices]

        updates = dict(zip(parameters, row_exchange(parameters, rows, orthogonalize_all), strict=True))
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for parameter in parameters:
            by_shape.setdefault(row_exchange.shapes[parameter], []).append(parameter)
        for shape, members in by_shape.items():
            self._apply(members, [updates[parameter] for parameter in members], group, shape)

    def _nesterov_directions(self, parameters: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Update the momenta, and average them with the gradients once more (Nesterov)."""
        if not parameters:
            return []
        gradients, momenta = self.gradients_and_moments(parameters)
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        return list(torch._foreach_lerp(gradients, momenta, group["momentum"]))

    def _apply(self, parameters: list[Tensor], updates: list[Tensor], group: dict[str, Any], shape: torch.Size) -> None:
        """Decay parameters and add their updates. ``shape`` is that of the whole matrices."""
        learning_rate = group["lr"]
        self.zero_updates_if_skipped(updates)
        self.decay_unless_skipped(parameters, 1 - learning_rate * group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=-learning_rate * learning_rate_scale(*shape))


def _stack(matrices: list[Tensor]) -> Tensor:
    return torch.stack(matrices) if len(matrices) > 1 else matrices[0][None]


def group_into_stacks(matrices: list[Tensor]) -> Iterator[list[Tensor]]:
    """Split matrices into lists of one shape, dtype and device, each within `MAX_STACK_ELEMENTS`."""
    by_kind: dict[tuple[Any, ...], list[Tensor]] = {}
    for matrix in matrices:
        by_kind.setdefault((matrix.shape, matrix.dtype, matrix.device), []).append(matrix)
    for members in by_kind.values():
        max_elements = MAX_STACK_ELEMENTS.get(members[0].device.type, MAX_STACK_ELEMENTS["cuda"])
        size = max(1, max_elements // max(1, members[0].numel()))
        yield from (members[start : start + size] for start in range(0, len(members), size))
