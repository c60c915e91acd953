"""Loss and gradient of logits with PyTorch operators: the reference for the Triton kernel, and the fast path on a CPU.

Shapes: C positions of a chunk, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffusionlm.kernels.loss_types import LossOptions, VocabularyShard

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
    rows_C1, weights_C1, is_own_C1 = targets_C[:, None], weights_C[:, None], None
    if options.shard is not None:
        rows_C1, is_own_C1 = options.shard.find_rows(rows_C1)
    slope_CV = None if options.softcap is None else _apply_softcap(z_CV, options.softcap, needs_grad)
    mean_C1 = _mean_logit(z_CV, options) if options.label_smoothing else None
    _fill_impossible(z_CV, options, NEG_INF)
    target_logit_C1 = z_CV.gather(1, rows_C1)
    max_logit_C1 = z_CV.amax(dim=1, keepdim=True)
    if options.shard is not None:
        options.shard.all_reduce_max(max_logit_C1)
    total_C1 = z_CV.sub_(max_logit_C1).exp_().sum(dim=1, keepdim=True)
    row_weights_C1 = weights_C1
    if options.shard is not None and is_own_C1 is not None:
        row_weights_C1 = torch.where(is_own_C1, weights_C1, 0.0)
        target_logit_C1 = torch.where(is_own_C1, target_logit_C1, 0.0)
        total_C1, target_logit_C1, mean_C1 = _sum_over_ranks(options.shard, total_C1, target_logit_C1, mean_C1)
    log_total_C1 = total_C1.log()
    nll_C1 = log_total_C1 - (target_logit_C1 - max_logit_C1)
    logsumexp_C1 = log_total_C1 + max_logit_C1
    loss_C1 = nll_C1
    if not options.is_unregularized:
        loss_C1 = _add_regularization(nll_C1, logsumexp_C1, mean_C1, options)
    if needs_grad:
        scale_C1 = weights_C1 / total_C1
        if options.z_loss:
            scale_C1 = scale_C1 * (1.0 + 2.0 * options.z_loss * logsumexp_C1)
        grad_CV = _grad_logits(z_CV, scale_C1, rows_C1, row_weights_C1, weights_C1, options)
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


def _fill_impossible(z_CV: Tensor, options: LossOptions, value: float) -> None:
    """Fill the columns of probability zero, in place: those of the excluded token and of padding."""
    if options.excluded_row is not None:
        z_CV[:, options.excluded_row] = value
    if options.shard is not None:
        z_CV[:, options.shard.num_tokens :] = value


def _sum_over_ranks(
    shard: VocabularyShard, total_C1: Tensor, target_logit_C1: Tensor, mean_C1: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sum the parts of the ranks, each [C, 1], in one all-reduce."""
    parts = [total_C1, target_logit_C1] if mean_C1 is None else [total_C1, target_logit_C1, mean_C1]
    sums = torch.stack(parts)
    shard.all_reduce_sum(sums)
    return sums[0], sums[1], None if mean_C1 is None else sums[2]


def _mean_logit(z_CV: Tensor, options: LossOptions) -> Tensor:
    """Mean over the tokens that share the smoothed probability, or a shard's part of it, [C, 1]."""
    total_C1 = z_CV.sum(dim=1, keepdim=True)
    if options.excluded_row is not None:
        total_C1 = total_C1 - z_CV[:, options.excluded_row, None]
    return total_C1 / options.num_smoothed_tokens(z_CV.shape[1])


def _add_regularization(nll_C1: Tensor, logsumexp_C1: Tensor, mean_C1: Tensor | None, options: LossOptions) -> Tensor:
    """(1 - smoothing) nll + smoothing (logsumexp - mean logit) + z_loss logsumexp^2, [C, 1]."""
    loss_C1 = nll_C1 + options.z_loss * logsumexp_C1.square()
    if mean_C1 is None:
        return loss_C1
    return loss_C1 + options.label_smoothing * (logsumexp_C1 - mean_C1 - nll_C1)


def _grad_logits(
    exp_CV: Tensor, scale_C1: Tensor, rows_C1: Tensor, row_weights_C1: Tensor, weights_C1: Tensor, options: LossOptions
) -> Tensor:
    """Gradient of the weighted losses, written over ``exp_CV``.

    ``exp_CV * scale_C1`` is the gradient of the weighted log of the softmax denominator and its z-loss. The rows are
    the targets', with weight 0 where another rank has the row.
    """
    grad_CV = exp_CV.mul_(scale_C1).scatter_add_(1, rows_C1, (options.label_smoothing - 1.0) * row_weights_C1)
    if options.label_smoothing:
        grad_CV.sub_(options.smoothing_per_token(exp_CV.shape[1]) * weights_C1)
    _fill_impossible(grad_CV, options, 0.0)
    return grad_CV
