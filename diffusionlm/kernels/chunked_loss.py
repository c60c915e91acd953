"""Loop over chunks of positions: logits, their loss and gradient, and the products that give the two gradients.

Shapes: N positions, D hidden, V vocabulary, C positions of a chunk.
"""

# ruff: noqa: PLR0913

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from diffusionlm.kernels import eager_cross_entropy
from diffusionlm.kernels.loss_types import HeadRows, LossBackend, LossOptions
from profiling import triton_setup

CPU_CHUNK_BYTES = 32 << 20
"""Budget for the fp32 logits of one chunk: about the last-level cache of a CPU."""
CUDA_CHUNK_BYTES = 1 << 30
"""Budget for the logits of one chunk, in the dtype of the product. Each chunk reads and writes the whole head gradient,
so few large chunks are faster."""
CUDA_CHUNK_SIZE_RANGE = (1024, 8192)
"""Positions of a chunk on a GPU, whatever the budget: fewer starve the matrix products, more gain nothing."""
CUDA_TILE_SIZE = 128
"""Rows of a tile of a GPU's matrix products."""

REDUCED_PRECISION_FLAGS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
"""Flags of `torch.backends.cuda.matmul`. By default partial sums of a product may be added in its narrow dtype."""

ChunkLossFunction = Callable[[Tensor, Tensor, Tensor, LossOptions, bool], tuple[Tensor, Tensor]]
"""Losses of a chunk of logits, which are overwritten with their gradient: see the backends."""


@contextlib.contextmanager
def wide_reductions() -> Iterator[None]:
    """Context in which a GPU adds the partial sums of products in fp32. It costs the host alone: the gradient of the
    hidden states is a sum over the whole vocabulary."""
    flags = torch.backends.cuda.matmul
    # Setting a flag alone would also set whether a sum may be split (torch 2.10 and later).
    splits = {name: getattr(flags, f"{name}_split_k", None) for name in REDUCED_PRECISION_FLAGS}
    before = {name: getattr(flags, name) for name in REDUCED_PRECISION_FLAGS}

    def set_flag(name: str, value: bool) -> None:
        setattr(flags, name, value if splits[name] is None else (value, splits[name]))

    try:
        for name in before:
            set_flag(name, False)
        yield
    finally:
        for name, value in before.items():
            set_flag(name, value)


@torch.no_grad()
@wide_reductions()
def compute_loss_in_chunks(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    options: LossOptions,
    needs_hidden_grad: bool,
    needs_head_grad: bool,
    head_rows: HeadRows | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute the loss of all positions and its gradients; the logits of one chunk exist at a time.

    Args:
        targets_N: target tokens, int64.
        weights_N: factor of each position's loss.
        head_rows: rows that replace some of the head; the gradient is theirs then. None: the gradient is the head's.

    Returns:
        Loss sum; negative log-likelihoods [N]; gradient of the hidden states in their dtype, or None; gradient of the
        head or of its trained rows, at least fp32, or None.

    Raises:
        ValueError: the requested backend cannot run.
    """
    N, V = hidden_ND.shape[0], head_VD.shape[0]
    device, dtype = hidden_ND.device, options.dtype
    compute_chunk_loss = load_loss_backend(select_loss_backend(options.backend, device.type, dtype))
    x_ND, w_VD = hidden_ND.to(dtype), head_VD.to(dtype)
    accumulation_dtype = options.accumulation_dtype
    targets_N, weights_N = targets_N.contiguous(), weights_N.to(accumulation_dtype).contiguous()
    nll_N = torch.empty(N, dtype=accumulation_dtype, device=device)
    loss_N = nll_N if options.is_unregularized else torch.empty_like(nll_N)
    grad_hidden_ND = torch.empty_like(hidden_ND) if needs_hidden_grad else None
    trained = head_VD if head_rows is None else head_rows.rows_KD
    grad_head = None
    if needs_head_grad:
        grad_head = (torch.empty_like if N else torch.zeros_like)(trained, dtype=accumulation_dtype)
    step = chunk_size(N, V, device=device.type, dtype=dtype)
    workspace_CV = torch.empty(min(step, N), V, dtype=dtype, device=device)
    for start in range(0, N, step):
        chunk = slice(start, min(start + step, N))
        logits_CV = torch.mm(x_ND[chunk], w_VD.T, out=workspace_CV[: chunk.stop - start])
        if head_rows is not None:
            logits_CV[:, head_rows.indices_K] = x_ND[chunk] @ trained.to(dtype).T
        needs_grad = needs_hidden_grad or needs_head_grad
        nll_N[chunk], loss_N[chunk] = compute_chunk_loss(
            logits_CV, targets_N[chunk], weights_N[chunk], options, needs_grad
        )
        grad_rows_C = logits_CV if head_rows is None else logits_CV[:, head_rows.indices_K]
        if grad_hidden_ND is not None:
            multiply_into(grad_hidden_ND[chunk], logits_CV, w_VD)
            if head_rows is not None:
                grad_hidden_ND[chunk] += grad_rows_C @ (trained.to(dtype) - w_VD[head_rows.indices_K])
        if grad_head is not None:
            accumulate_product(grad_head, grad_rows_C.T, x_ND[chunk], overwrite=start == 0)
    # The loss may be infinite at weight 0, and infinity times 0 is NaN.
    loss_sum = torch.where(weights_N != 0, loss_N * weights_N, 0.0).sum()
    return loss_sum, nll_N, grad_hidden_ND, grad_head


def compute_loss_compiled(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    options: LossOptions,
    needs_hidden_grad: bool,
    needs_head_grad: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """`compute_loss_in_chunks` as one node of a graph of torch.compile.

    Eager code does not call it: the first call of a custom operator imports the compiler, which takes seconds.
    """
    loss_sum, nll_N, grad_hidden_ND, grad_head_VD = _operator(
        hidden_ND.detach(),
        head_VD.detach(),
        targets_N,
        weights_N,
        options.excluded_token,
        options.label_smoothing,
        options.z_loss,
        options.softcap,
        options.dtype,
        options.backend,
        needs_hidden_grad,
        needs_head_grad,
    )
    return loss_sum, nll_N, grad_hidden_ND if needs_hidden_grad else None, grad_head_VD if needs_head_grad else None


# The schema of an operator has no records, so the options are single arguments.
@torch.library.custom_op("diffusionlm::linear_cross_entropy", mutates_args=())
def _operator(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    excluded_token: int | None,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    dtype: torch.dtype,
    backend: str,
    needs_hidden_grad: bool,
    needs_head_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss sum, negative log-likelihoods and the two gradients; a gradient that is not needed is an empty tensor."""
    options = LossOptions(excluded_token, label_smoothing, z_loss, softcap, dtype, backend)  # type: ignore[arg-type]
    loss_sum, nll_N, *gradients = compute_loss_in_chunks(
        hidden_ND, head_VD, targets_N, weights_N, options, needs_hidden_grad, needs_head_grad
    )
    grad_hidden_ND, grad_head_VD = (hidden_ND.new_empty(0) if grad is None else grad for grad in gradients)
    return loss_sum, nll_N, grad_hidden_ND, grad_head_VD


@_operator.register_fake
def _operator_shapes(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, weights_N: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, dtype, _, needs_hidden_grad, needs_head_grad = options
    accumulation_dtype = torch.promote_types(dtype, torch.float32)
    grad_hidden = torch.empty_like(hidden_ND) if needs_hidden_grad else hidden_ND.new_empty(0)
    grad_head = torch.empty_like(head_VD, dtype=accumulation_dtype) if needs_head_grad else hidden_ND.new_empty(0)
    loss_sum = hidden_ND.new_empty((), dtype=accumulation_dtype)
    return loss_sum, hidden_ND.new_empty(hidden_ND.shape[0], dtype=accumulation_dtype), grad_hidden, grad_head


def chunk_size(num_positions: int, vocab_size: int, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> int:
    """Positions of a chunk: as few chunks as the budget allows, of equal size; at least 1, also for no positions.

    ``device`` is a device type. ``dtype`` is that of the product; on a CPU logits are counted as fp32.
    """
    if device == "cuda":
        min_size, max_size = CUDA_CHUNK_SIZE_RANGE
        limit = min(max(CUDA_CHUNK_BYTES // (dtype.itemsize * vocab_size), min_size), max_size)
        multiple = CUDA_TILE_SIZE
    else:
        limit = max(64, CPU_CHUNK_BYTES // (4 * vocab_size))
        multiple = 1
    num_chunks = max(1, -(-num_positions // limit))
    balanced = max(1, -(-num_positions // num_chunks))
    return -(-balanced // multiple) * multiple


def multiply_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Store a matrix product, without a temporary if the dtypes are equal."""
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(left @ right)


def accumulate_product(total: Tensor, left: Tensor, right: Tensor, *, overwrite: bool) -> None:
    """Add a matrix product to ``total``, or store it there with ``overwrite``.

    ``total`` is at least as wide as the factors. On a GPU the product is accumulated in the dtype of ``total``;
    elsewhere a product of narrow factors is rounded to their dtype first.
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
    """Select the backend. ``auto`` is Triton on CUDA if it can run and the dtype is not float64, else eager.

    ``device`` is the type of the tensors' device, ``dtype`` that of the products.

    Raises:
        ValueError: the backend does not exist, or Triton is requested and cannot run here.
    """
    if backend not in get_args(LossBackend):
        names = ", ".join(f'"{name}"' for name in get_args(LossBackend))
        raise ValueError(f'cross-entropy backend "{backend}" does not exist; choose one of {names}')
    if backend == "eager":
        return "eager"
    problem = _triton_problem(device, dtype)
    if problem is None and (backend == "triton" or device == "cuda"):
        return "triton"
    if backend == "triton":
        raise ValueError(f'cross-entropy backend "triton" {problem}, or choose "eager" or "auto"')
    return "eager"


def load_loss_backend(backend: Literal["eager", "triton"]) -> ChunkLossFunction:
    """Return the function of a backend; Triton is imported only when it is used."""
    if backend == "eager":
        return eager_cross_entropy.compute_chunk_loss
    triton_setup.set_kernel_rounding()
    from diffusionlm.kernels.triton_cross_entropy import compute_chunk_loss

    return compute_chunk_loss


def _triton_problem(device: str, dtype: torch.dtype) -> str | None:
    """Why the Triton kernel cannot run, with a remedy. None: it can."""
    if dtype == torch.float64:
        return "computes in float32, and these products are in float64: use float32"
    if device == "cuda" or not triton_setup.is_triton_installed():
        return triton_setup.find_triton_problem()
    if os.environ.get("TRITON_INTERPRET") != "1":
        return (
            f"needs a CUDA device, and the tensors are on {device}: move them, set TRITON_INTERPRET=1 to try it slowly"
        )
    return None
