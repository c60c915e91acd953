"""Loss and gradient of logits in plain torch: the reference of the Triton kernel, and the fast way on a CPU.

Shapes: C rows of a chunk, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffusionlm.kernels.loss_types import LossOptions, RowScores

NEG_INF = float("-inf")
CPU_SUBCHUNK_SIZE = 256
"""Rows that a CPU scores at once: their fp32 logits stay near the processor, and their memory is used again."""


def compute_chunk_loss(
    logits_CV: Tensor, targets_C: Tensor, weights_C: Tensor, options: LossOptions, into: RowScores, needs_grad: bool
) -> None:
    """Fill the scores of a chunk's rows, in the dtype of its buffers, and put the logits' gradient in their place.

    Without ``needs_grad`` the logits are only used up.
    """
    step = CPU_SUBCHUNK_SIZE if logits_CV.device.type == "cpu" else max(1, len(logits_CV))
    for start in range(0, len(logits_CV), step):
        some = slice(start, start + step)
        _compute_loss(logits_CV[some], targets_C[some], weights_C[some], options, into.part(some), needs_grad)


def _compute_loss(
    logits_CV: Tensor, targets_C: Tensor, weights_C: Tensor, options: LossOptions, into: RowScores, needs_grad: bool
) -> None:
    z_CV = logits_CV.to(into.nll_N.dtype)
    targets_C1, weights_C1 = targets_C[:, None], weights_C[:, None]
    slope_CV = None if options.softcap is None else _apply_softcap(z_CV, options.softcap, needs_grad)
    mean_C1 = _mean_logit(z_CV, options) if options.label_smoothing else None
    if options.excluded_token is not None:
        z_CV[:, options.excluded_token] = NEG_INF
    target_logit_C1, top_C1, is_hit_C = _target_and_max_logit(z_CV, targets_C1)
    total_C1 = z_CV.sub_(top_C1).exp_().sum(dim=1, keepdim=True)
    log_total_C1 = total_C1.log()
    nll_C1 = log_total_C1 - (target_logit_C1 - top_C1)
    logsumexp_C1 = log_total_C1 + top_C1
    into.nll_N.copy_(nll_C1[:, 0])
    into.logsumexp_N.copy_(logsumexp_C1[:, 0])
    into.is_hit_N.copy_(is_hit_C)
    if not options.is_unregularized:
        into.loss_R.copy_(_add_regularization(nll_C1, logsumexp_C1, mean_C1, options)[:, 0])
    if needs_grad:
        grad_CV = _grad_logits(z_CV, weights_C1 / total_C1, logsumexp_C1, targets_C1, weights_C1, options)
        if slope_CV is not None:
            grad_CV.mul_(slope_CV)
        if grad_CV.dtype != logits_CV.dtype:
            logits_CV.copy_(grad_CV)


def _apply_softcap(z_CV: Tensor, softcap: float, needs_slope: bool) -> Tensor | None:
    """Cap the logits in place; returns the slope of the cap at each of them, 1 - tanh^2, where it is wanted."""
    z_CV.div_(softcap).tanh_()
    slope_CV = z_CV.square().neg_().add_(1.0) if needs_slope else None
    z_CV.mul_(softcap)
    return slope_CV


def _mean_logit(z_CV: Tensor, options: LossOptions) -> Tensor:
    """Mean over the tokens that share the smoothed part."""
    total_C1 = z_CV.sum(dim=1, keepdim=True)
    if options.excluded_token is None:
        return total_C1 / z_CV.shape[1]
    return (total_C1 - z_CV[:, options.excluded_token, None]) / (z_CV.shape[1] - 1)


def _target_and_max_logit(z_CV: Tensor, targets_C1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The target's logit, the greatest one, [C, 1], and whether the first of the greatest is the target, [C].

    The greatest of the others tells both with one pass; only where it equals the target's is the first looked for.
    """
    target_logit_C1 = z_CV.gather(1, targets_C1)
    z_CV.scatter_(1, targets_C1, NEG_INF)
    others_C1 = z_CV.amax(dim=1, keepdim=True)
    z_CV.scatter_(1, targets_C1, target_logit_C1)
    top_C1 = torch.maximum(others_C1, target_logit_C1)
    if z_CV.device.type != "cpu":  # where rows with equals cannot be picked without waiting for the device
        return target_logit_C1, top_C1, z_CV.argmax(dim=1) == targets_C1[:, 0]
    is_hit_C = (target_logit_C1 > others_C1)[:, 0]
    (equal,) = (target_logit_C1 == others_C1)[:, 0].nonzero(as_tuple=True)
    if len(equal):
        is_hit_C[equal] = z_CV[equal].argmax(dim=1) == targets_C1[equal, 0]
    return target_logit_C1, top_C1, is_hit_C


def _add_regularization(nll_C1: Tensor, logsumexp_C1: Tensor, mean_C1: Tensor | None, options: LossOptions) -> Tensor:
    """The rows' losses: (1 - smoothing) nll + smoothing (logsumexp - mean logit) + z_loss logsumexp^2."""
    loss_C1 = nll_C1 + options.z_loss * logsumexp_C1.square()
    if mean_C1 is None:
        return loss_C1
    return loss_C1 + options.label_smoothing * (logsumexp_C1 - mean_C1 - nll_C1)


def _grad_logits(
    exp_CV: Tensor, scale_C1: Tensor, logsumexp_C1: Tensor, targets_C1: Tensor, weights_C1: Tensor, options: LossOptions
) -> Tensor:
    """Gradient of the weighted losses, in place of ``exp_CV``, which times ``scale_C1`` are weighted probabilities."""
    if options.z_loss:
        scale_C1 = scale_C1 * (1.0 + 2.0 * options.z_loss * logsumexp_C1)
    grad_CV = exp_CV.mul_(scale_C1).scatter_add_(1, targets_C1, (options.label_smoothing - 1.0) * weights_C1)
    if options.label_smoothing:
        grad_CV.sub_(options.smoothing_per_token(exp_CV.shape[1]) * weights_C1)
    if options.excluded_token is not None:
        grad_CV[:, options.excluded_token] = 0.0
    return grad_CV
