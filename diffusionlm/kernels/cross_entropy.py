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

from diffusionlm.kernels.chunked_loss import Backend, LoopResult, Plan, score_rows
from diffusionlm.kernels.loss_types import LossRule, Score, Scored
from diffusionlm.kernels.operator import score_rows_compiled

__all__ = ["Backend", "Gradients", "Score", "Scored", "linear_cross_entropy"]

Gradients = Literal["forward", "recompute"]
"""When gradients are made: beside the loss, with three products of a chunk; or in the backward, which makes the logits
once more, so that nothing is kept until then."""


def linear_cross_entropy(
    hidden_RD: Tensor,
    head_VD: Tensor,
    score: Score,
    softcap: float | None = None,
    *,
    backend: Backend = "auto",
    gradients: Gradients = "forward",
    head_grad: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> Scored:
    """Negative log-likelihood of ``score.targets_R`` under the logits ``hidden_RD @ head_VD.T``.

    With a ``softcap`` c the logits are ``c tanh(logits / c)`` of these (Gemma 2), in at least fp32, for all that
    follows: softmax, label smoothing and z-loss.

    Products run in autocast's dtype where it is on, else in that of ``hidden_RD``; softmax, loss and the head's
    gradient are at least fp32. Memory is one chunk of logits beside the gradients themselves: with eager's backend a
    second one of fp32 where products are narrower, and one more with a soft cap. Nothing waits for the device. What
    needs no gradient gets none, and without any nothing is kept.

    Args:
        hidden_RD: hidden states.
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
    device = hidden_RD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_RD.dtype
    if head_grad is not None:
        _check_buffer(head_grad, head_VD, torch.promote_types(dtype, torch.float32))
    # Asked here: inside a Function gradients always look switched off.
    is_enabled = torch.is_grad_enabled()
    wants_hidden, wants_head = is_enabled and hidden_RD.requires_grad, is_enabled and head_VD.requires_grad
    rule = LossRule(score.excluded_token, score.label_smoothing, score.z_loss, softcap)
    rows = (score.targets_R, score.weights_R)
    if gradients == "forward" or not (wants_hidden or wants_head):
        plan = Plan(rule, dtype, backend, chunk_bytes, wants_hidden, wants_head)
        made = _run(hidden_RD, head_VD, *rows, plan, head_grad if wants_head else None)
        loss_sum = made.loss_sum
        if wants_hidden or wants_head:
            loss_sum = _MadeInForward.apply(hidden_RD, head_VD, loss_sum, made.grad_hidden_RD, made.grad_head_VD)
    else:
        plan = Plan(rule, dtype, backend, chunk_bytes, False, False)
        made = _run(hidden_RD, head_VD, *rows, plan, None)
        loss_sum = _MadeInBackward.apply(hidden_RD, head_VD, made.loss_sum, *rows, head_grad, plan)
    known = made.rows
    return Scored(loss_sum, known.nll_R, logsumexp_R=known.logsumexp_R, is_hit_R=known.is_hit_R)


def _check_buffer(head_grad: Tensor, head_VD: Tensor, dtype: torch.dtype) -> None:
    if head_grad.shape != head_VD.shape or head_grad.dtype != dtype or head_grad.device != head_VD.device:
        raise ValueError(
            f"head_grad is {head_grad.dtype} {tuple(head_grad.shape)} on {head_grad.device}; the head's gradient needs "
            f"{dtype} {tuple(head_VD.shape)} on {head_VD.device}"
        )


def _run(
    hidden_RD: Tensor,
    head_VD: Tensor,
    targets_R: Tensor,
    weights_R: Tensor,
    plan: Plan,
    into: Tensor | None,
) -> LoopResult:
    """The loop, as one operator where a compiler looks on."""
    run = score_rows_compiled if torch.compiler.is_compiling() else score_rows
    return run(hidden_RD, head_VD, targets_R, weights_R, plan, into)


def _is_last_backward() -> bool:
    """Whether the graph that runs backward is given up after it, so that what it kept may be overwritten."""
    if torch.compiler.is_compiling():
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()


class _MadeInForward(torch.autograd.Function):
    """Hands out gradients that are there already, times what comes from behind."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        head_VD: Tensor,
        loss_sum: Tensor,
        grad_hidden_RD: Tensor | None,
        grad_head_VD: Tensor | None,
    ) -> Tensor:
        ctx.head_dtype = head_VD.dtype
        ctx.save_for_backward(grad_hidden_RD, grad_head_VD)
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
        hidden_RD: Tensor,
        head_VD: Tensor,
        loss_sum: Tensor,
        targets_R: Tensor,
        weights_R: Tensor,
        head_grad: Tensor | None,
        plan: Plan,
    ) -> Tensor:
        ctx.save_for_backward(hidden_RD, head_VD, targets_R, weights_R)
        ctx.head_grad, ctx.plan = head_grad, plan
        return loss_sum.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        hidden_RD, head_VD, targets_R, weights_R = ctx.saved_tensors
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        plan = replace(ctx.plan, wants_hidden=wants_hidden, wants_head=wants_head)
        into = ctx.head_grad if wants_head else None
        weights_R = weights_R.to(scale.dtype) * scale
        made = _run(hidden_RD, head_VD, targets_R, weights_R, plan, into)
        grad_head = None if made.grad_head_VD is None else made.grad_head_VD.to(head_VD.dtype)
        return made.grad_hidden_RD, grad_head, None, None, None, None, None
