"""Fused linear cross-entropy over chosen rows: logits exist one chunk at a time.

The head's gradient goes through autograd, or straight into a buffer of the caller's, ``head_grad``. Autograd then knows
nothing of it: the head's ``.grad`` is left alone and its hooks do not run; of tied embeddings the embedding's own
gradient, which autograd still gives to ``.grad``, is added by whoever owns the buffer. With gradients made in the
forward, what is added is the gradient of ``loss_sum`` itself: a factor that the loss gets later belongs into the
weights. With gradients made in the backward, each backward adds, such factors included.
Under recomputation of activations the forward runs twice, so the buffer is not for a head within such a part.

Shapes: R rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from diffusionlm.kernels.chunked_loss import LoopResult, LossBackend, Plan, compute_loss_in_chunks
from diffusionlm.kernels.loss_types import LossInputs, LossOptions, LossOutput
from diffusionlm.kernels.operator import score_rows_compiled

__all__ = ["Gradients", "LossBackend", "LossInputs", "LossOutput", "linear_cross_entropy"]

Gradients = Literal["forward", "recompute"]
"""When gradients are made: beside the loss, with three products of a chunk; or in the backward, which makes the logits
once more, so that nothing is kept until then."""


def linear_cross_entropy(
    hidden_ND: Tensor,
    head_VD: Tensor,
    loss_inputs: LossInputs,
    softcap: float | None = None,
    *,
    backend: LossBackend = "auto",
    gradients: Gradients = "forward",
    head_grad: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> LossOutput:
    """Negative log-likelihood of ``score.targets_R`` under the logits ``hidden_ND @ head_VD.T``.

    With a ``softcap`` c the logits are ``c tanh(logits / c)`` of these (Gemma 2), in at least fp32, for all that
    follows: softmax, label smoothing and z-loss.

    Products run in autocast's dtype where it is on, else in that of ``hidden_ND``; softmax, loss and the head's
    gradient are at least fp32. Memory is one chunk of logits beside the gradients themselves: with eager's backend a
    second one of fp32 where products are narrower, and one more with a soft cap. Nothing waits for the device. What
    needs no gradient gets none, and without any nothing is kept.

    Args:
        hidden_ND: hidden states.
        head_VD: the head's weight.
        score: targets, weights and options of the loss. A target must be a token: eager's backend raises torch's
            error, Triton's loss is NaN.
        softcap: bound of the logits. None: none.
        backend: who scores the logits; ``auto``: Triton's kernel on CUDA where triton is installed, else torch.
        gradients: when they are made; the numbers are the same.
        head_grad: buffer, at least fp32, that the head's gradient is added to if the head requires one. None: it goes
            through autograd.
        chunk_bytes: budget in bytes for the logits of a chunk. None: `chunking`'s for the device.

    Raises:
        ValueError: a backend or a time of gradients that does not exist or cannot run here, or a buffer that does not
            fit.
    """
    if gradients not in get_args(Gradients):
        raise ValueError(f'gradients = "{gradients}" does not exist; choose "forward" or "recompute"')
    device = hidden_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype
    if head_grad is not None:
        _check_buffer(head_grad, head_VD, torch.promote_types(dtype, torch.float32))
    # Asked here: inside a Function gradients always look switched off.
    is_enabled = torch.is_grad_enabled()
    needs_hidden_grad, needs_head_grad = is_enabled and hidden_ND.requires_grad, is_enabled and head_VD.requires_grad
    options = LossOptions(loss_inputs.excluded_token, loss_inputs.label_smoothing, loss_inputs.z_loss, softcap)
    rows = (loss_inputs.targets_N, loss_inputs.weights_N)
    if gradients == "forward" or not (needs_hidden_grad or needs_head_grad):
        plan = Plan(options, dtype, backend, chunk_bytes, needs_hidden_grad, needs_head_grad)
        made = _run(hidden_ND, head_VD, *rows, plan, head_grad if needs_head_grad else None)
        loss_sum = made.loss_sum
        if needs_hidden_grad or needs_head_grad:
            loss_sum = _PrecomputedGradients.apply(hidden_ND, head_VD, loss_sum, made.grad_hidden_ND, made.grad_head_VD)
    else:
        plan = Plan(options, dtype, backend, chunk_bytes, False, False)
        made = _run(hidden_ND, head_VD, *rows, plan, None)
        loss_sum = _MadeInBackward.apply(hidden_ND, head_VD, made.loss_sum, *rows, head_grad, plan)
    known = made.rows
    return LossOutput(loss_sum, known.nll_N, logsumexp_N=known.logsumexp_N, is_hit_N=known.is_hit_N)


def _check_buffer(head_grad: Tensor, head_VD: Tensor, dtype: torch.dtype) -> None:
    if head_grad.shape != head_VD.shape or head_grad.dtype != dtype or head_grad.device != head_VD.device:
        raise ValueError(
            f"head_grad is {head_grad.dtype} {tuple(head_grad.shape)} on {head_grad.device}; the head's gradient needs "
            f"{dtype} {tuple(head_VD.shape)} on {head_VD.device}"
        )


def _run(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    plan: Plan,
    into: Tensor | None,
) -> LoopResult:
    """The loop, as one operator where a compiler looks on."""
    run = score_rows_compiled if torch.compiler.is_compiling() else compute_loss_in_chunks
    return run(hidden_ND, head_VD, targets_N, weights_N, plan, into)


def _is_last_backward() -> bool:
    """Whether the graph that runs backward is given up after it, so that what it kept may be overwritten."""
    if torch.compiler.is_compiling():
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()


class _PrecomputedGradients(torch.autograd.Function):
    """Hands out gradients that are there already, times what comes from behind."""

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


class _MadeInBackward(torch.autograd.Function):
    """Runs the loop again for the gradients, with weights times what comes from behind."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head_VD: Tensor,
        loss_sum: Tensor,
        targets_N: Tensor,
        weights_N: Tensor,
        head_grad: Tensor | None,
        plan: Plan,
    ) -> Tensor:
        ctx.save_for_backward(hidden_ND, head_VD, targets_N, weights_N)
        ctx.head_grad, ctx.plan = head_grad, plan
        return loss_sum.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, head_VD, targets_N, weights_N = ctx.saved_tensors
        needs_hidden_grad, needs_head_grad = ctx.needs_input_grad[:2]
        plan = replace(ctx.plan, needs_hidden_grad=needs_hidden_grad, needs_head_grad=needs_head_grad)
        into = ctx.head_grad if needs_head_grad else None
        weights_N = weights_N.to(scale.dtype) * scale
        made = _run(hidden_ND, head_VD, targets_N, weights_N, plan, into)
        grad_head = None if made.grad_head_VD is None else made.grad_head_VD.to(head_VD.dtype)
        return made.grad_hidden_ND, grad_head, None, None, None, None, None
