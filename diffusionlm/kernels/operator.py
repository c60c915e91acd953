"""The loop over rows as one operator of torch, for torch.compile.

Outside a compiled function nobody calls it: the first call of an operator written in Python imports the compiler, which
takes seconds.

Shapes: R rows, D hidden, V vocabulary.
"""

# ruff: noqa: PLR0913

from __future__ import annotations

import torch
from torch import Tensor

from diffusionlm.kernels.chunked_loss import LoopResult, Plan, compute_loss_in_chunks
from diffusionlm.kernels.loss_types import LossOptions, RowScores


@torch.library.custom_op("diffusionlm::linear_cross_entropy", mutates_args=("into",))
def _operator(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    into: Tensor | None,
    excluded_token: int | None,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    dtype: torch.dtype,
    backend: str,
    chunk_bytes: int | None,
    needs_hidden_grad: bool,
    needs_head_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, log-likelihoods, logsumexps, hits, and gradients: empty ones where none are made."""
    options = LossOptions(excluded_token, label_smoothing, z_loss, softcap)
    plan = Plan(options, dtype, backend, chunk_bytes, needs_hidden_grad, needs_head_grad)  # type: ignore[arg-type]  # checked there
    made = compute_loss_in_chunks(hidden_ND, head_VD, targets_N, weights_N, plan, into)
    grads = (made.grad_hidden_ND, made.grad_head_VD)
    first, second = (hidden_ND.new_empty(0) if grad is None else grad for grad in grads)
    return made.loss_sum, made.rows.nll_N, made.rows.logsumexp_N, made.rows.is_hit_N, first, second


@_operator.register_fake
def _shapes(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    into: Tensor | None,
    excluded_token: int | None,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    dtype: torch.dtype,
    backend: str,
    chunk_bytes: int | None,
    needs_hidden_grad: bool,
    needs_head_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(dtype, torch.float32)
    nll_N, logsumexp_N = (hidden_ND.new_empty(hidden_ND.shape[0], dtype=wide) for _ in range(2))
    grad_hidden = torch.empty_like(hidden_ND) if needs_hidden_grad else hidden_ND.new_empty(0)
    grad_head = torch.empty_like(head_VD, dtype=wide) if needs_head_grad and into is None else hidden_ND.new_empty(0)
    is_hit_N = torch.empty_like(nll_N, dtype=torch.bool)
    return hidden_ND.new_empty((), dtype=wide), nll_N, logsumexp_N, is_hit_N, grad_hidden, grad_head


def score_rows_compiled(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    plan: Plan,
    into: Tensor | None,
) -> LoopResult:
    """`row_loop.score_rows` as one node of a compiled graph."""
    loss_sum, nll_N, logsumexp_N, is_hit_N, grad_hidden, grad_head = _operator(
        hidden_ND.detach(),
        head_VD.detach(),
        targets_N,
        weights_N,
        into,
        plan.options.excluded_token,
        plan.options.label_smoothing,
        plan.options.z_loss,
        plan.options.softcap,
        plan.dtype,
        plan.backend,
        plan.chunk_bytes,
        plan.needs_hidden_grad,
        plan.needs_head_grad,
    )
    return LoopResult(
        loss_sum,
        RowScores(nll_N, nll_N, logsumexp_N, is_hit_N),
        grad_hidden if plan.needs_hidden_grad else None,
        grad_head if plan.needs_head_grad and into is None else None,
    )
