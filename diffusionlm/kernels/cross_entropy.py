"""Fused linear cross-entropy: the head and the loss in one function that never holds all logits.

Shapes: N positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from diffusionlm.kernels.chunked_loss import compute_loss_compiled, compute_loss_in_chunks
from diffusionlm.kernels.loss_types import HeadRows, LossBackend, LossInputs, LossOptions, LossOutput, VocabularyShard
from diffusionlm.kernels.precision import compute_dtype

__all__ = ["LossBackend", "LossInputs", "LossOutput", "linear_cross_entropy"]


def linear_cross_entropy(
    hidden_ND: Tensor,
    head_VD: Tensor,
    loss_inputs: LossInputs,
    softcap: float | None = None,
    *,
    backend: LossBackend = "auto",
    head_rows: HeadRows | None = None,
    shard: VocabularyShard | None = None,
) -> LossOutput:
    """Cross-entropy of ``loss_inputs.targets_N`` under the logits ``hidden_ND @ head_VD.T``.

    With a ``softcap`` c the logits z are replaced by ``c tanh(z / c)`` (Gemma 2), in at least fp32, before softmax,
    label smoothing and z-loss.

    The gradients are computed in the forward, chunk by chunk; the backward multiplies them by the incoming gradient.
    Products run in autocast's dtype if it is on, else in the dtype of ``hidden_ND``; softmax, loss and head gradient
    are at least fp32. Memory beside the gradients is one chunk of logits; the eager backend needs a second one in fp32
    if the products are narrower, and one more with a soft cap. No call waits for the device. A gradient that is not
    required is not computed.

    Args:
        loss_inputs: targets, weights and options of the loss. A target outside the vocabulary raises torch's error with
            the eager backend and gives NaN with Triton.
        softcap: bound of the logits. None: no cap.
        head_rows: trained rows that replace some of a frozen head. None: the head is used, and trained, as it is.
        backend: implementation of loss and gradient of the logits. auto: Triton on CUDA if it is installed, else eager.
        shard: ``head_VD`` has the rows of these tokens. All ranks call this with the same positions; their results are
            equal, but the gradient of the hidden states is this rank's part of a sum. None: the head has all rows.

    Raises:
        ValueError: the backend does not exist or cannot run here, or it has no form for a shard.
    """
    if shard is not None:
        backend = _select_shard_backend(backend, head_rows)
    # Read here: inside a Function grad mode is always off.
    is_enabled, is_compiling = torch.is_grad_enabled(), torch.compiler.is_compiling()
    if head_rows is not None and is_compiling:
        head_VD, head_rows = head_VD.index_copy(0, head_rows.indices_K, head_rows.rows_KD.to(head_VD.dtype)), None
    trained = head_VD if head_rows is None else head_rows.rows_KD
    needs_hidden_grad, needs_head_grad = is_enabled and hidden_ND.requires_grad, is_enabled and trained.requires_grad
    options = LossOptions(
        loss_inputs.excluded_token,
        loss_inputs.label_smoothing,
        loss_inputs.z_loss,
        softcap,
        compute_dtype(hidden_ND),
        backend,
        shard,
    )
    targets_N, weights_N = loss_inputs.targets_N, loss_inputs.weights_N
    arguments = (hidden_ND, head_VD, targets_N, weights_N, options, needs_hidden_grad, needs_head_grad)
    loss_sum, nll_N, grad_hidden_ND, grad_head = (
        compute_loss_compiled(*arguments) if is_compiling else compute_loss_in_chunks(*arguments, head_rows)
    )
    if needs_hidden_grad or needs_head_grad:
        loss_sum = _PrecomputedGradients.apply(hidden_ND, trained, loss_sum, grad_hidden_ND, grad_head)
    return LossOutput(loss_sum, nll_N)


def _select_shard_backend(backend: LossBackend, head_rows: HeadRows | None) -> LossBackend:
    if head_rows is not None:
        raise ValueError("a head that is divided over ranks has no trained rows: train all of it, or none")
    if torch.compiler.is_compiling():
        raise ValueError("the loss of a head that is divided over ranks is not compiled: compile the blocks only")
    if backend == "triton":
        raise ValueError('cross-entropy backend "triton" needs a head with all rows: choose "eager" or "auto"')
    return "eager"


def _is_last_backward() -> bool:
    """True if the graph is freed after this backward, so that its saved tensors may be overwritten."""
    if torch.compiler.is_compiling():
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()


class _PrecomputedGradients(torch.autograd.Function):
    """Return the gradients computed in the forward, multiplied by the incoming gradient.

    The gradient of the head becomes ``.grad`` of its parameter without a copy. In a later micro-batch both exist from
    the forward on. Adding to ``.grad`` in the forward would save one, but the hooks that reduce gradients over ranks
    would miss it, the incoming gradient could not scale it, and a forward without a backward would leave it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head_VD: Tensor,
        loss_sum: Tensor,
        grad_hidden_ND: Tensor | None,
        grad_head_VD: Tensor | None,
    ) -> Tensor:
        ctx.head_dtype = head_VD.dtype
        ctx.save_for_backward(grad_hidden_ND, grad_head_VD)
        return loss_sum.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grads = ctx.saved_tensors
        if _is_last_backward():
            scaled = [None if grad is None else grad.mul_(scale) for grad in grads]
        else:
            scaled = [None if grad is None else grad * scale for grad in grads]
        return scaled[0], None if scaled[1] is None else scaled[1].to(ctx.head_dtype), None, None, None
