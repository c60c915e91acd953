"""The loop over rows as one operator of torch, for torch.compile.

Outside a compiled function nobody calls it: the first call of an operator written in Python imports the compiler, which
takes seconds.

Shapes: R rows, D hidden, V vocabulary.
"""

# ruff: noqa: PLR0913

from __future__ import annotations

import torch
from torch import Tensor

from diffusionlm.kernels.chunked_loss import LoopResult, Plan, score_rows
from diffusionlm.kernels.loss_types import LossRule, RowScores


@torch.library.custom_op("diffusionlm::linear_cross_entropy", mutates_args=("into",))
def _operator(
    hidden_RD: Tensor,
    head_VD: Tensor,
    targets_R: Tensor,
    weights_R: Tensor,
    into: Tensor | None,
    excluded_token: int | None,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    dtype: torch.dtype,
    backend: str,
    chunk_bytes: int | None,
    wants_hidden: bool,
    wants_head: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, log-likelihoods, logsumexps, hits, and gradients: empty ones where none are made."""
    rule = LossRule(excluded_token, label_smoothing, z_loss, softcap)
    plan = Plan(rule, dtype, backend, chunk_bytes, wants_hidden, wants_head)  # type: ignore[arg-type]  # checked there
    made = score_rows(hidden_RD, head_VD, targets_R, weights_R, plan, into)
    grads = (made.grad_hidden_RD, made.grad_head_VD)
    first, second = (hidden_RD.new_empty(0) if grad is None else grad for grad in grads)
    return made.loss_sum, made.rows.nll_R, made.rows.logsumexp_R, made.rows.is_hit_R, first, second


@_operator.register_fake
def _shapes(
    hidden_RD: Tensor,
    head_VD: Tensor,
    targets_R: Tensor,
    weights_R: Tensor,
    into: Tensor | None,
    excluded_token: int | None,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    dtype: torch.dtype,
    backend: str,
    chunk_bytes: int | None,
    wants_hidden: bool,
    wants_head: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(dtype, torch.float32)
    nll_R, logsumexp_R = (hidden_RD.new_empty(hidden_RD.shape[0], dtype=wide) for _ in range(2))
    grad_hidden = torch.empty_like(hidden_RD) if wants_hidden else hidden_RD.new_empty(0)
    grad_head = torch.empty_like(head_VD, dtype=wide) if wants_head and into is None else hidden_RD.new_empty(0)
    is_hit_R = torch.empty_like(nll_R, dtype=torch.bool)
    return hidden_RD.new_empty((), dtype=wide), nll_R, logsumexp_R, is_hit_R, grad_hidden, grad_head


def score_rows_compiled(
    hidden_RD: Tensor,
    head_VD: Tensor,
    targets_R: Tensor,
    weights_R: Tensor,
    plan: Plan,
    into: Tensor | None,
) -> LoopResult:
    """`row_loop.score_rows` as one node of a compiled graph."""
    loss_sum, nll_R, logsumexp_R, is_hit_R, grad_hidden, grad_head = _operator(
        hidden_RD.detach(),
        head_VD.detach(),
        targets_R,
        weights_R,
        into,
        plan.rule.excluded_token,
        plan.rule.label_smoothing,
        plan.rule.z_loss,
        plan.rule.softcap,
        plan.dtype,
        plan.backend,
        plan.chunk_bytes,
        plan.wants_hidden,
        plan.wants_head,
    )
    return LoopResult(
        loss_sum,
        RowScores(nll_R, nll_R, logsumexp_R, is_hit_R),
        grad_hidden if plan.wants_hidden else None,
        grad_head if plan.wants_head and into is None else None,
    )
