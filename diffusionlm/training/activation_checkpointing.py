"""Activations that are computed again in the backward instead of being kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from diffusionlm.models.attention import attend_rows
from diffusionlm.models.attention_backends import Lowering
from diffusionlm.models.transformer import Block, Transformer

KEPT = (
    "mm",
    "addmm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
"""Operators whose results are kept: projections and torch's fused attention. Not ``bmm``, the products of eager
attention: their results are as large as the mask, and changed in place. Nor ``mm.out``, which experts use."""

Forward = Callable[..., Tensor]


def checkpoint_activations(model: Transformer, choice: Literal["none", "selective", "full"]) -> None:
    """Let the blocks of a model keep less for their backward; what they compute stays the same."""
    if choice == "none":
        return
    for block in model.model.layers:
        assert isinstance(block, Block)
        block.forward = _checkpointed(block.forward, choice)  # type: ignore[method-assign]  # of this block alone


def _checkpointed(forward: Forward, choice: Literal["selective", "full"]) -> Forward:
    options: dict[str, Any] = {}
    if choice == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keeps)

    def run(
        x_BLD: Tensor,
        rope: tuple[Tensor, Tensor],
        attention: Any,
        *,
        rows: Tensor | None = None,
        routings: list[Any] | None = None,
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(x_BLD, rope, attention, rows=rows, routings=routings)
        if choice == "selective" and isinstance(attention, Lowering):
            attention = _Watched(attention)

        def decided(x_BLD: Tensor) -> tuple[Tensor, list[Any]]:
            # A list of each computation's own: the second one must not tell of the routers again.
            made: list[Any] = []
            out = forward(x_BLD, rope, attention, rows=rows, routings=None if routings is None else made)
            return out, made

        out, made = checkpoint(decided, x_BLD, use_reentrant=False, preserve_rng_state=False, **options)
        if routings is not None:
            routings += made
        return out

    return run


def _keeps(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of `torch.utils.checkpoint`, operator by operator."""
    namespace, _, name = operator.name().partition("::")
    return CheckpointPolicy.MUST_SAVE if namespace == "aten" and name in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True)
class _Watched:
    """An attention whose FlexAttention the policy does not see, since torch compiles nothing that a policy watches. It
    is computed again."""

    attention: Lowering

    def __call__(self, q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
        if self.attention.choose(q_BQNH) != "flex":
            return self.attention(q_BQNH, k_BSKH, v_BSKH)
        with _disable_current_modes():
            return self.attention(q_BQNH, k_BSKH, v_BSKH)

    def of_rows(self, q_RNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, rows: Tensor) -> Tensor:
        return attend_rows(self, q_RNH, k_BSKH, v_BSKH, rows)
