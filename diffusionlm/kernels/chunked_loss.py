"""The loop over chunks of rows: logits, their scores and gradient, and the two products that end in gradients.

Shapes: R rows, D hidden, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from diffusionlm.kernels import eager_cross_entropy
from diffusionlm.kernels.chunking import chunk_size
from diffusionlm.kernels.loss_types import LossOptions, RowScores

LossBackend = Literal["auto", "eager", "triton"]
"""``triton``: one kernel. ``eager``: torch's own. ``auto``: `select_loss_backend`."""

ChunkLossFunction = Callable[[Tensor, Tensor, Tensor, LossOptions, RowScores, bool], None]
"""Score the logits of a chunk and put their gradient in their place."""


@dataclass(frozen=True)
class Plan:
    """How the loop runs."""

    options: LossOptions
    dtype: torch.dtype
    """Of the products."""
    backend: LossBackend
    chunk_bytes: int | None
    """Budget for the logits of a chunk. None: the device's default."""
    needs_hidden_grad: bool
    """Whether the gradient of the hidden states is made."""
    needs_head_grad: bool
    """Whether the gradient of the head is made."""


@dataclass(frozen=True)
class LoopResult:
    """What the loop made."""

    loss_sum: Tensor
    rows: RowScores
    grad_hidden_ND: Tensor | None
    """In the dtype of the hidden states."""
    grad_head_VD: Tensor | None
    """At least fp32. None also where it went into a buffer that was given."""


@torch.no_grad()
def compute_loss_in_chunks(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    plan: Plan,
    into: Tensor | None,
) -> LoopResult:
    """Score all rows; no row's logits outlive its chunk.

    Args:
        hidden_ND: hidden states.
        head_VD: the head's weight.
        targets_N: right tokens, int64.
        weights_N: factors of the rows' losses.
        plan: how.
        into: buffer that the head's gradient is added to. None: a new one is made.

    Raises:
        ValueError: the backend that is asked for cannot run.
    """
    R, V = hidden_ND.shape[0], head_VD.shape[0]
    device = hidden_ND.device
    compute_chunk_loss = load_loss_backend(select_loss_backend(plan.backend, device.type, plan.dtype))
    x_RD, w_VD = hidden_ND.to(plan.dtype), head_VD.to(plan.dtype)
    wide = torch.promote_types(plan.dtype, torch.float32)
    targets_N, weights_N = targets_N.contiguous(), weights_N.to(wide).contiguous()
    rows = _empty_scores(R, wide, device, plan.options)
    grad_hidden_ND = torch.empty_like(hidden_ND) if plan.needs_hidden_grad else None
    overwrite = into is None
    grad_head_VD = into
    if plan.needs_head_grad and overwrite:
        grad_head_VD = (torch.empty_like if R else torch.zeros_like)(head_VD, dtype=wide)
    step = chunk_size(R, V, device=device.type, dtype=plan.dtype, chunk_bytes=plan.chunk_bytes)
    workspace_CV = torch.empty(min(step, R), V, dtype=plan.dtype, device=device)
    for start in range(0, R, step):
        chunk = slice(start, min(start + step, R))
        logits_CV = torch.mm(x_RD[chunk], w_VD.T, out=workspace_CV[: chunk.stop - start])
        needs_grad = plan.needs_hidden_grad or plan.needs_head_grad
        compute_chunk_loss(logits_CV, targets_N[chunk], weights_N[chunk], plan.options, rows.part(chunk), needs_grad)
        if grad_hidden_ND is not None:
            grad_hidden_ND[chunk] = logits_CV @ w_VD
        if plan.needs_head_grad:
            assert grad_head_VD is not None
            accumulate_product(grad_head_VD, logits_CV.T, x_RD[chunk], overwrite=overwrite and start == 0)
    # A row of weight 0 may be anything: infinity times 0 would be NaN.
    loss_sum = torch.where(weights_N != 0, rows.loss_R * weights_N, 0.0).sum()
    return LoopResult(loss_sum, rows, grad_hidden_ND, grad_head_VD if overwrite else None)


def accumulate_product(total: Tensor, left: Tensor, right: Tensor, *, overwrite: bool) -> None:
    """Add a matrix product to ``total``, or write it there if that is fresh, whatever it holds.

    The total is at least as wide as its factors. On a GPU the product is accumulated in it directly; elsewhere one of
    narrow factors is rounded first.
    """
    beta = 0.0 if overwrite else 1.0
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=beta, out=total)
    elif total.device.type == "cuda" and total.dtype == torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, beta=beta, out=total)
    elif overwrite:
        total.copy_(left @ right)
    else:
        total += left @ right


def select_loss_backend(backend: LossBackend, device: str, dtype: torch.dtype) -> Literal["eager", "triton"]:
    """The backend that runs: with ``auto``, Triton's kernel on CUDA for all but float64, where triton is installed.

    Args:
        backend: what is asked for.
        device: type of the tensors' device.
        dtype: of the products.

    Raises:
        ValueError: no such backend, or Triton's is asked for and cannot run; what is missing is said.
    """
    if backend not in get_args(LossBackend):
        names = ", ".join(f'"{name}"' for name in get_args(LossBackend))
        raise ValueError(f'cross-entropy backend "{backend}" does not exist; choose one of {names}')
    if backend == "eager":
        return "eager"
    missing = _triton_problem(device, dtype)
    if missing is None and (backend == "triton" or device == "cuda"):
        return "triton"
    if backend == "triton":
        raise ValueError(f'cross-entropy backend "triton" {missing}, or choose "eager" or "auto"')
    return "eager"


def load_loss_backend(backend: Literal["eager", "triton"]) -> ChunkLossFunction:
    """The backend's function; Triton is imported only when it is used."""
    if backend == "eager":
        return eager_cross_entropy.compute_chunk_loss
    from diffusionlm.kernels.triton_cross_entropy import compute_chunk_loss

    return compute_chunk_loss


def _triton_problem(device: str, dtype: torch.dtype) -> str | None:
    """What Triton's kernel lacks here. None: it can run."""
    if dtype == torch.float64:
        return "computes in float32, and these products are in float64: use float32"
    if not _is_triton_installed():
        return "needs the package triton, which is not installed: install it"
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            f"needs a CUDA device, and the tensors are on {device}: move them, set TRITON_INTERPRET=1 to try it slowly"
        )
    return None


@functools.cache
def _is_triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _empty_scores(rows: int, dtype: torch.dtype, device: torch.device, options: LossOptions) -> RowScores:
    nll_N, logsumexp_N = (torch.empty(rows, dtype=dtype, device=device) for _ in range(2))
    loss_R = nll_N if options.is_unregularized else torch.empty_like(nll_N)
    return RowScores(nll_N, loss_R, logsumexp_N, torch.empty(rows, dtype=torch.bool, device=device))
