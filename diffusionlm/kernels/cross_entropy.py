"""Fused linear cross-entropy over chosen rows: logits exist one chunk at a time.

Shapes: R rows, D hidden, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 32 << 20
"""Budget for the fp32 logits of one chunk: about what a CPU's last cache level holds."""


@dataclass(frozen=True)
class Score:
    """What the model is asked to score, row for row.

    Weights are known before the forward, so the gradient is made in it, exactly. Rows that only fill a bucket have
    weight 0.
    """

    targets_R: Tensor
    """The right token of each row, int64."""
    weights_R: Tensor
    """Factor of each row's loss in the sum; the denominator may be folded in."""
    excluded_token: int | None = None
    """A token of probability zero, as the mask token is (SUBS, Sahoo et al. 2024); None: the plain softmax."""
    label_smoothing: float = 0.0
    """Share of the target distribution that is uniform over all tokens but the excluded one (Szegedy et al. 2016)."""
    z_loss: float = 0.0
    """Factor of the squared log of the softmax's denominator, added to the loss (Chowdhery et al. 2022, PaLM)."""
    balance_weight: float = 0.0
    """Factor of the routers' balance loss of this forward, in a model with experts; 0: it is not made."""


@dataclass(frozen=True)
class Scored:
    """What a scored forward returns: sums, never means."""

    loss_sum: Tensor
    """Weighted sum of the rows' losses, at least fp32, with gradient: negative log-likelihoods, smoothed and with a
    z-loss where the score says so."""
    nll_R: Tensor
    """Negative log-likelihood of each row in nats, at least fp32, without gradient."""
    balance_sum: Tensor | None = None
    """Weighted balance loss of the routers, at least fp32, with gradient; beside ``loss_sum``, never in it. None: none
    was asked for, or the model has no experts."""

    @property
    def trained_sum(self) -> Tensor:
        """All that training minimises."""
        return self.loss_sum if self.balance_sum is None else self.loss_sum + self.balance_sum


def linear_cross_entropy(hidden_RD: Tensor, head_VD: Tensor, score: Score, softcap: float | None = None) -> Scored:
    """Negative log-likelihood of ``score.targets_R`` under the logits ``hidden_RD @ head_VD.T``.

    With a ``softcap`` c the logits are ``c tanh(logits / c)`` of these (Gemma 2), in at least fp32, for all that
    follows: softmax, label smoothing and z-loss.

    Products run in autocast's dtype where it is on, else in that of ``hidden_RD``; softmax, loss and the head's
    gradient are at least fp32. Both gradients are made in the forward, chunk by chunk; memory is one chunk of logits
    (two with a soft cap) beside the gradients themselves.
    """
    device = hidden_RD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_RD.dtype
    # Asked here: inside a Function gradients always look switched off.
    wants_grad = torch.is_grad_enabled()
    loss_sum, nll_R = _LinearCrossEntropy.apply(hidden_RD, head_VD, score, softcap, dtype, wants_grad)
    return Scored(loss_sum=loss_sum, nll_R=nll_R)


def _mean_logit(z_CV: Tensor, score: Score) -> Tensor:
    """Mean over the tokens that share the smoothed part."""
    total_C1 = z_CV.sum(dim=1, keepdim=True)
    if score.excluded_token is None:
        return total_C1 / z_CV.shape[1]
    return (total_C1 - z_CV[:, score.excluded_token, None]) / (z_CV.shape[1] - 1)


def _cap(z_CV: Tensor, softcap: float, wants_slope: bool) -> Tensor | None:
    """Cap the logits in place; returns the slope of the cap at each of them, 1 - tanh^2, where it is wanted."""
    z_CV.div_(softcap).tanh_()
    slope_CV = z_CV.square().neg_().add_(1.0) if wants_slope else None
    z_CV.mul_(softcap)
    return slope_CV


def _regularised(nll_C1: Tensor, logsumexp_C1: Tensor, mean_C1: Tensor | None, score: Score) -> Tensor:
    """The rows' losses: (1 - smoothing) nll + smoothing (logsumexp - mean logit) + z_loss logsumexp^2."""
    loss_C1 = nll_C1 + score.z_loss * logsumexp_C1.square()
    if mean_C1 is None:
        return loss_C1
    return loss_C1 + score.label_smoothing * (logsumexp_C1 - mean_C1 - nll_C1)


def _grad_logits(
    exp_CV: Tensor, total_C1: Tensor, top_C1: Tensor, targets_C1: Tensor, weights_C1: Tensor, score: Score
) -> Tensor:
    """Gradient of the weighted losses, in place of ``exp_CV``, the exponentials of logits less their greatest."""
    scale_C1 = weights_C1 / total_C1
    if score.z_loss:
        scale_C1 = scale_C1 * (1.0 + 2.0 * score.z_loss * (total_C1.log() + top_C1))
    grad_CV = exp_CV.mul_(scale_C1).scatter_add_(1, targets_C1, -(1.0 - score.label_smoothing) * weights_C1)
    if score.label_smoothing:
        sharing = exp_CV.shape[1] - (score.excluded_token is not None)
        grad_CV.sub_(score.label_smoothing / sharing * weights_C1)
        if score.excluded_token is not None:
            grad_CV[:, score.excluded_token] = 0.0
    return grad_CV


def chunk_rows(rows: int, vocab_size: int) -> int:
    """Rows of a chunk: chunks of equal size within `CHUNK_BYTES`, or of 64 rows where that is more."""
    most = max(64, CHUNK_BYTES // (4 * vocab_size))
    chunks = max(1, -(-rows // most))
    return max(1, -(-rows // chunks))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        head_VD: Tensor,
        score: Score,
        softcap: float | None,
        dtype: torch.dtype,
        wants_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        R, V = hidden_RD.shape[0], head_VD.shape[0]
        needs_hidden, needs_head = (wants_grad and needed for needed in ctx.needs_input_grad[:2])
        x_RD, w_VD = hidden_RD.to(dtype), head_VD.to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden_RD) if needs_hidden else None
        grad_head = torch.zeros_like(head_VD, dtype=wide) if needs_head else None
        weights_R = score.weights_R.to(wide)
        nll_R = torch.empty(R, dtype=wide, device=hidden_RD.device)
        loss_R = nll_R if score.label_smoothing == score.z_loss == 0.0 else torch.empty_like(nll_R)
        step = chunk_rows(R, V)
        for start in range(0, R, step):
            chunk = slice(start, start + step)
            targets_C1 = score.targets_R[chunk, None]
            z_CV = (x_RD[chunk] @ w_VD.T).to(wide)
            slope_CV = None if softcap is None else _cap(z_CV, softcap, needs_hidden or needs_head)
            mean_C1 = _mean_logit(z_CV, score) if score.label_smoothing else None
            if score.excluded_token is not None:
                z_CV[:, score.excluded_token] = float("-inf")
            top_C1 = z_CV.amax(dim=1, keepdim=True)
            z_CV.sub_(top_C1)
            target_logit_C1 = z_CV.gather(1, targets_C1)
            total_C1 = z_CV.exp_().sum(dim=1, keepdim=True)
            nll_C1 = total_C1.log() - target_logit_C1
            nll_R[chunk] = nll_C1[:, 0]
            if loss_R is not nll_R:
                loss_R[chunk] = _regularised(nll_C1, total_C1.log() + top_C1, mean_C1, score)[:, 0]
            if needs_hidden or needs_head:
                grad_logits_CV = _grad_logits(z_CV, total_C1, top_C1, targets_C1, weights_R[chunk, None], score)
                if slope_CV is not None:
                    grad_logits_CV.mul_(slope_CV)
                grad_logits_CV = grad_logits_CV.to(dtype)
                if grad_hidden is not None:
                    grad_hidden[chunk] = grad_logits_CV @ w_VD
                if grad_head is not None:
                    if dtype == wide:
                        grad_head.addmm_(grad_logits_CV.T, x_RD[chunk])
                    else:
                        grad_head += grad_logits_CV.T @ x_RD[chunk]
        ctx.head_dtype = head_VD.dtype
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.mark_non_differentiable(nll_R)
        # A row of weight 0 may be anything: infinity times 0 would be NaN.
        return torch.where(weights_R != 0, loss_R * weights_R, 0.0).sum(), nll_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        scale = grads[0]
        return (
            None if grad_hidden is None else grad_hidden * scale,
            None if grad_head is None else (grad_head * scale).to(ctx.head_dtype),
            None,
            None,
            None,
            None,
        )
