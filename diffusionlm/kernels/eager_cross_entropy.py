"""Loss and gradient of logits with PyTorch operators: the reference for the Triton kernel, and the fast path on a CPU.

Shapes: C positions of a chunk, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffusionlm.kernels.loss_types import LossOptions

NEG_INF = float("-inf")
CPU_SUBCHUNK_SIZE = 256
"""Positions that a CPU processes at once: their fp32 logits stay in the cache, and their memory is reused."""


def compute_chunk_loss(
    logits_CV: Tensor, targets_C: Tensor, weights_C: Tensor, options: LossOptions, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """Compute the losses of a chunk and overwrite the logits with their gradient.

    Without ``needs_grad`` the content of the logits is undefined afterwards.

    Returns:
        Negative log-likelihoods and losses, each [C], of `LossOptions.accumulation_dtype`. They are one tensor if the
        loss is not regularized.
    """
    C = len(logits_CV)
    nll_C = torch.empty(C, dtype=options.accumulation_dtype, device=logits_CV.device)
    loss_C = nll_C if options.is_unregularized else torch.empty_like(nll_C)
    step = CPU_SUBCHUNK_SIZE if logits_CV.device.type == "cpu" else max(1, C)
    for start in range(0, C, step):
        part = slice(start, start + step)
        nll_C[part], loss_C[part] = _compute_loss(
            logits_CV[part], targets_C[part], weights_C[part], options, needs_grad
        )
    return nll_C, loss_C


def _compute_loss(
    logits_CV: Tensor, targets_C: Tensor, weights_C: Tensor, options: LossOptions, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    z_CV = logits_CV.to(options.accumulation_dtype)
    targets_C1, weights_C1 = targets_C[:, None], weights_C[:, None]
    slope_CV = None if options.softcap is None else _apply_softcap(z_CV, options.softcap, needs_grad)
    mean_C1 = _mean_logit(z_CV, options) if options.label_smoothing else None
    if options.excluded_token is not None:
        z_CV[:, options.excluded_token] = NEG_INF
    target_logit_C1 = z_CV.gather(1, targets_C1)
    max_logit_C1 = z_CV.amax(dim=1, keepdim=True)
    total_C1 = z_CV.sub_(max_logit_C1).exp_().sum(dim=1, keepdim=True)
    log_total_C1 = total_C1.log()
    nll_C1 = log_total_C1 - (target_logit_C1 - max_logit_C1)
    logsumexp_C1 = log_total_C1 + max_logit_C1
    loss_C1 = nll_C1
    if not options.is_unregularized:
        loss_C1 = _add_regularization(nll_C1, logsumexp_C1, mean_C1, options)
    if needs_grad:
        grad_CV = _grad_logits(z_CV, weights_C1 / total_C1, logsumexp_C1, targets_C1, weights_C1, options)
        if slope_CV is not None:
            grad_CV.mul_(slope_CV)
        if grad_CV.dtype != logits_CV.dtype:
            logits_CV.copy_(grad_CV)
    return nll_C1[:, 0], loss_C1[:, 0]


def _apply_softcap(z_CV: Tensor, softcap: float, needs_slope: bool) -> Tensor | None:
    """Cap the logits in place. Returns the slope 1 - tanh^2 of the cap at each logit, or None if it is not needed."""
    z_CV.div_(softcap).tanh_()
    slope_CV = z_CV.square().neg_().add_(1.0) if needs_slope else None
    z_CV.mul_(softcap)
    return slope_CV


def _mean_logit(z_CV: Tensor, options: LossOptions) -> Tensor:
    """Mean over the tokens that share the smoothed probability, [C, 1]."""
    total_C1 = z_CV.sum(dim=1, keepdim=True)
    if options.excluded_token is None:
        return total_C1 / z_CV.shape[1]
    return (total_C1 - z_CV[:, options.excluded_token, None]) / (z_CV.shape[1] - 1)


def _add_regularization(nll_C1: Tensor, logsumexp_C1: Tensor, mean_C1: Tensor | None, options: LossOptions) -> Tensor:
    """(1 - smoothing) nll + smoothing (logsumexp - mean logit) + z_loss logsumexp^2, [C, 1]."""
    loss_C1 = nll_C1 + options.z_loss * logsumexp_C1.square()
    if mean_C1 is None:
        return loss_C1
    return loss_C1 + options.label_smoothing * (logsumexp_C1 - mean_C1 - nll_C1)


def _grad_logits(
    exp_CV: Tensor, scale_C1: Tensor, logsumexp_C1: Tensor, targets_C1: Tensor, weights_C1: Tensor, options: LossOptions
) -> Tensor:
    """Gradient of the weighted losses, written over ``exp_CV``.

    ``exp_CV * scale_C1`` are the softmax probabilities times the weights.
    """
    if options.z_loss:
        scale_C1 = scale_C1 * (1.0 + 2.0 * options.z_loss * logsumexp_C1)
    grad_CV = exp_CV.mul_(scale_C1).scatter_add_(1, targets_C1, (options.label_smoothing - 1.0) * weights_C1)
    if options.label_smoothing:
        grad_CV.sub_(options.smoothing_per_token(exp_CV.shape[1]) * weights_C1)
    if options.excluded_token is not None:
        grad_CV[:, options.excluded_token] = 0.0
    return grad_CV
