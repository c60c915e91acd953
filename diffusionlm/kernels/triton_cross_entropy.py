"""Loss and gradient of logits in one Triton kernel, in place: each logit is read once or twice and written once.

One program for a row. A vocabulary of up to `BLOCK` stays in registers between loss and gradient; a larger one is
read in blocks, first for an online softmax (Milakov and Gimelshein 2018), then for the gradient. Arithmetic is fp32,
whatever the dtype of the logits.

Triton decides while it is imported whether its kernels are compiled or interpreted (TRITON_INTERPRET=1, without a GPU).

Shapes: C rows of a chunk, V vocabulary.
"""

# ruff: noqa: PLR0913
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,import-not-found,unused-ignore]
from torch import Tensor

from diffusionlm.kernels.loss_types import LossOptions, RowScores

BLOCK = 16384
"""Logits read at once, a power of two: 16 for each thread of a full program leave room for temporaries. With one row on
each multiprocessor, the large rows being read fit the cache of an H100, so that the second reading is cheap."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_logits(row, columns, vocab, excluded, cap, HAS_CAP: tl.constexpr):
    """Logits in fp32, minus infinity where there is none, and the slope of the cap."""
    z = tl.load(row + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
    slope = tl.full(z.shape, 1.0, tl.float32)
    if HAS_CAP:
        # tanh by way of a decaying exponential: nothing overflows, and the slope does not cancel.
        decay = tl.exp2(tl.abs(z) * (-2.0 * LOG2_E) / cap)
        sign = tl.where(z < 0, -1.0, 1.0)
        slope = 4.0 * decay / ((1.0 + decay) * (1.0 + decay))
        z = tl.where(columns < vocab, sign * cap * (1.0 - decay) / (1.0 + decay), float("-inf"))
    return tl.where(columns == excluded, float("-inf"), z), slope


@triton.jit
def _update_softmax_state(z, columns, vocab, target, top, first, total, own, sum):
    """What the loss needs of a row, a block later.

    The greatest logit and its first column, the sum of exponentials relative to it, the target's logit, the sum of
    all. Before any block: minus infinity, and zeros.
    """
    block_top = tl.max(z, axis=0)
    first = tl.where(block_top > top, tl.min(tl.where(z == block_top, columns, vocab), axis=0), first)
    new_top = tl.maximum(top, block_top)
    # In a block of the excluded token alone there is nothing to subtract from.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    total = total * tl.exp2((top - shift) * LOG2_E) + tl.sum(tl.exp2((z - shift) * LOG2_E), axis=0)
    own += tl.sum(tl.where(columns == target, z, 0.0), axis=0)
    sum += tl.sum(tl.where(z == float("-inf"), 0.0, z), axis=0)
    return new_top, first, total, own, sum


@triton.jit
def _gradient(
    z,
    slope,
    columns,
    target,
    excluded,
    top,
    scale,
    weight,
    smoothing,
    share,
):
    """Gradient of the weighted loss at some logits; all in fp32, so that the target's is rounded once."""
    grad = scale * tl.exp2((z - top) * LOG2_E) - share * weight
    grad = tl.where(columns == target, grad - (1.0 - smoothing) * weight, grad) * slope
    return tl.where(columns == excluded, 0.0, tl.where(weight == 0.0, 0.0, grad))


@triton.jit
def _loss_kernel(
    logits,
    stride,
    targets,
    weights,
    nll_out,
    loss_out,
    logsumexp_out,
    is_hit_out,
    vocab,
    excluded,
    cap,
    smoothing,
    share,
    z_loss,
    HAS_CAP: tl.constexpr,
    NEEDS_GRAD: tl.constexpr,
    IS_ONE_BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    target = tl.load(targets + index).to(tl.int32)
    weight = tl.load(weights + index)
    columns = tl.arange(0, SIZE)
    z, slope = _load_logits(row, columns, vocab, excluded, cap, HAS_CAP)
    top, first, total, own, sum = _update_softmax_state(z, columns, vocab, target, float("-inf"), -1, 0.0, 0.0, 0.0)
    if not IS_ONE_BLOCK:
        for start in range(SIZE, vocab, SIZE):
            z, slope = _load_logits(row, start + columns, vocab, excluded, cap, HAS_CAP)
            top, first, total, own, sum = _update_softmax_state(
                z, start + columns, vocab, target, top, first, total, own, sum
            )
    log_total = tl.log(total)
    logsumexp = log_total + top
    # A target that is no token has no likelihood: told by the loss, as nothing here can raise.
    nll = tl.where((target >= 0) & (target < vocab), log_total - (own - top), float("nan"))
    loss = (1.0 - smoothing) * nll + smoothing * logsumexp - share * sum + z_loss * logsumexp * logsumexp
    tl.store(nll_out + index, nll)
    tl.store(loss_out + index, loss)
    tl.store(logsumexp_out + index, logsumexp)
    tl.store(is_hit_out + index, first == target)
    if NEEDS_GRAD:
        scale = weight * (1.0 + 2.0 * z_loss * logsumexp) / total
        if IS_ONE_BLOCK:
            grad = _gradient(z, slope, columns, target, excluded, top, scale, weight, smoothing, share)
            tl.store(row + columns, grad.to(logits.dtype.element_ty), mask=columns < vocab)
        else:
            for start in range(0, vocab, SIZE):
                others = start + columns
                z, slope = _load_logits(row, others, vocab, excluded, cap, HAS_CAP)
                grad = _gradient(z, slope, others, target, excluded, top, scale, weight, smoothing, share)
                tl.store(row + others, grad.to(logits.dtype.element_ty), mask=others < vocab)


def compute_chunk_loss(
    logits_CV: Tensor, targets_C: Tensor, weights_C: Tensor, options: LossOptions, into: RowScores, needs_grad: bool
):
    """Fill the scores of a chunk's rows, fp32, and put the logits' gradient in their place.

    Without ``needs_grad`` the logits stay as they are. A row of weight 0 has no gradient, whatever its logits.
    """
    C, V = logits_CV.shape
    if C == 0:
        return
    is_one_block = V <= BLOCK
    size = triton.next_power_of_2(V) if is_one_block else BLOCK
    _loss_kernel[(C,)](
        logits_CV,
        logits_CV.stride(0),
        targets_C,
        weights_C,
        into.nll_N,
        into.loss_R,
        into.logsumexp_N,
        into.is_hit_N,
        V,
        -1 if options.excluded_token is None else options.excluded_token,
        1.0 if options.softcap is None else options.softcap,
        options.label_smoothing,
        options.smoothing_per_token(V),
        options.z_loss,
        HAS_CAP=options.softcap is not None,
        NEEDS_GRAD=needs_grad,
        IS_ONE_BLOCK=is_one_block,
        SIZE=size,
        num_warps=min(32, max(4, size // 512)),
    )
