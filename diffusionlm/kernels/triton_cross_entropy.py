"""Loss and gradient of logits in one Triton kernel, in place: each logit is read once or twice and written once.

One program per row of logits. A row of up to `BLOCK` logits stays in registers between loss and gradient; a longer one
is read in blocks, first for an online softmax (Milakov and Gimelshein 2018), then for the gradient. Arithmetic is fp32,
whatever the dtype of the logits.

Triton decides at import whether kernels are compiled or interpreted (TRITON_INTERPRET=1, without a GPU).

Shapes: C positions of a chunk, V vocabulary.
"""

# ruff: noqa: PLR0913
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,import-not-found,unused-ignore]
from torch import Tensor

from diffusionlm.kernels.loss_types import LossOptions

BLOCK = 16384
"""Most logits of a block, a power of two. With one row per multiprocessor, the rows in flight fit the L2 cache of an
H100, so the second read is cheap."""
MIN_THREADS, MAX_THREADS = 128, 1024
"""Threads of a program. A program of `MAX_THREADS` has at most 64 registers per thread on NVIDIA's GPUs."""
WARP_SIZE = 64 if torch.version.hip else 32
"""Threads of a warp: 64 on AMD's data center GPUs, where a program of 32 warps could not be launched."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_logits(row, columns, vocab, excluded, cap, HAS_CAP: tl.constexpr):
    """Logits in fp32, -inf outside the vocabulary and at the excluded token, and the slope of the cap."""
    z = tl.load(row + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
    slope = tl.full(z.shape, 1.0, tl.float32)
    if HAS_CAP:
        # tanh from exp(-2 |z| / cap): no overflow, and no cancellation in the slope.
        decay = tl.exp2(tl.abs(z) * (-2.0 * LOG2_E) / cap)
        sign = tl.where(z < 0, -1.0, 1.0)
        slope = 4.0 * decay / ((1.0 + decay) * (1.0 + decay))
        z = tl.where(columns < vocab, sign * cap * (1.0 - decay) / (1.0 + decay), float("-inf"))
    return tl.where(columns == excluded, float("-inf"), z), slope


@triton.jit
def _update_softmax_state(z, columns, target, max_logit, total, target_logit, sum):
    """Add a block of logits to the online softmax of a row.

    State: the largest logit, the sum of exponentials relative to it, the target's logit, the sum of all logits. It
    starts as (-inf, 0, 0, 0).
    """
    new_max = tl.maximum(max_logit, tl.max(z, axis=0))
    # new_max is -inf in a block that holds the excluded token only; -inf - (-inf) would be NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    total = total * tl.exp2((max_logit - shift) * LOG2_E) + tl.sum(tl.exp2((z - shift) * LOG2_E), axis=0)
    target_logit += tl.sum(tl.where(columns == target, z, 0.0), axis=0)
    sum += tl.sum(tl.where(z == float("-inf"), 0.0, z), axis=0)
    return new_max, total, target_logit, sum


@triton.jit
def _gradient(
    z,
    slope,
    columns,
    target,
    excluded,
    max_logit,
    scale,
    weight,
    smoothing,
    smoothing_per_token,
):
    """Gradient of the weighted loss for a block of logits, in fp32, so that the target's is rounded once."""
    grad = scale * tl.exp2((z - max_logit) * LOG2_E) - smoothing_per_token * weight
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
    vocab,
    excluded,
    cap,
    smoothing,
    smoothing_per_token,
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
    max_logit, total, target_logit, sum = _update_softmax_state(z, columns, target, float("-inf"), 0.0, 0.0, 0.0)
    if not IS_ONE_BLOCK:
        for start in range(SIZE, vocab, SIZE):
            z, slope = _load_logits(row, start + columns, vocab, excluded, cap, HAS_CAP)
            max_logit, total, target_logit, sum = _update_softmax_state(
                z, start + columns, target, max_logit, total, target_logit, sum
            )
    log_total = tl.log(total)
    logsumexp = log_total + max_logit
    # A kernel cannot raise, so a target outside the vocabulary gives NaN.
    nll = tl.where((target >= 0) & (target < vocab), log_total - (target_logit - max_logit), float("nan"))
    loss = (1.0 - smoothing) * nll + smoothing * logsumexp - smoothing_per_token * sum + z_loss * logsumexp * logsumexp
    tl.store(nll_out + index, nll)
    tl.store(loss_out + index, loss)
    if NEEDS_GRAD:
        scale = weight * (1.0 + 2.0 * z_loss * logsumexp) / total
        if IS_ONE_BLOCK:
            grad = _gradient(
                z, slope, columns, target, excluded, max_logit, scale, weight, smoothing, smoothing_per_token
            )
            tl.store(row + columns, grad.to(logits.dtype.element_ty), mask=columns < vocab)
        else:
            for start in range(0, vocab, SIZE):
                block = start + columns
                z, slope = _load_logits(row, block, vocab, excluded, cap, HAS_CAP)
                grad = _gradient(
                    z, slope, block, target, excluded, max_logit, scale, weight, smoothing, smoothing_per_token
                )
                tl.store(row + block, grad.to(logits.dtype.element_ty), mask=block < vocab)


def choose_block(vocab: int, itemsize: int, has_cap: bool) -> tuple[int, int]:
    """Logits of a block, a power of two, and threads of a program; ``itemsize`` is the bytes of a logit.

    A thread has 16 logits, or 8 where as many would not fit its registers: of fp32, under a soft cap, whose slopes take
    registers, too, and in the loops over a vocabulary whose rows are not aligned, which need an address for each logit.
    """
    is_crowded = has_cap or itemsize > 2 or (vocab > BLOCK and vocab % 16 != 0)
    logits_per_thread = 8 if is_crowded else 16
    size = min(triton.next_power_of_2(vocab), BLOCK, MAX_THREADS * logits_per_thread)
    return size, min(MAX_THREADS, max(MIN_THREADS, size // logits_per_thread))


def compute_chunk_loss(logits_CV: Tensor, targets_C: Tensor, weights_C: Tensor, options: LossOptions, needs_grad: bool):
    """Compute the losses of a chunk, [C] fp32 each, and overwrite the logits with their gradient.

    Without ``needs_grad`` the logits are unchanged. Weight 0 gives a gradient of 0, whatever the logits. See
    `eager_cross_entropy.compute_chunk_loss`.
    """
    C, V = logits_CV.shape
    nll_C = torch.empty(C, dtype=options.accumulation_dtype, device=logits_CV.device)
    loss_C = nll_C if options.is_unregularized else torch.empty_like(nll_C)
    if C == 0:
        return nll_C, loss_C
    has_cap = options.softcap is not None
    size, num_threads = choose_block(V, logits_CV.element_size(), has_cap)
    _loss_kernel[(C,)](
        logits_CV,
        logits_CV.stride(0),
        targets_C,
        weights_C,
        nll_C,
        loss_C,
        V,
        -1 if options.excluded_token is None else options.excluded_token,
        1.0 if options.softcap is None else options.softcap,
        options.label_smoothing,
        options.smoothing_per_token(V),
        options.z_loss,
        HAS_CAP=has_cap,
        NEEDS_GRAD=needs_grad,
        IS_ONE_BLOCK=size >= V,
        SIZE=size,
        num_warps=num_threads // WARP_SIZE,
    )
    return nll_C, loss_C
