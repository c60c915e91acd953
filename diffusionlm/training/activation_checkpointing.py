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

from diffusionlm.models.attention import PreparedAttention
from diffusionlm.models.attention_backends import PatternAttention
from diffusionlm.models.transformer import Block, Transformer

SAVED_OPERATORS = (
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


def checkpoint_activations(model: Transformer, mode: Literal["none", "selective", "full"]) -> None:
    """Let the blocks of a model keep less for their backward; what they compute stays the same."""
    if mode == "none":
        return
    for block in model.model.layers:
        assert isinstance(block, Block)
        block.forward = _checkpoint_forward(block.forward, mode)  # type: ignore[method-assign]  # of this block alone


def _checkpoint_forward(forward: Forward, mode: Literal["selective", "full"]) -> Forward:
    options: dict[str, Any] = {}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _select_policy)

    def run(
        x_BLD: Tensor,
        rope: tuple[Tensor, Tensor],
        attention: Any,
        *,
        output_positions: Tensor | None = None,
        routings: list[Any] | None = None,
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(x_BLD, rope, attention, output_positions=output_positions, routings=routings)
        if mode == "selective" and isinstance(attention, PatternAttention):
            attention = _FlexOutsidePolicy(attention)

        def decided(x_BLD: Tensor) -> tuple[Tensor, list[Any]]:
            # A list of each computation's own: the second one must not tell of the routers again.
            made: list[Any] = []
            out = forward(
                x_BLD, rope, attention, output_positions=output_positions, routings=None if routings is None else made
            )
            return out, made

        out, made = checkpoint(decided, x_BLD, use_reentrant=False, preserve_rng_state=False, **options)
        if routings is not None:
            routings += made
        return out

    return run


def _select_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of `torch.utils.checkpoint`, operator by operator."""
    namespace, _, name = operator.name().partition("::")
    return (
        CheckpointPolicy.MUST_SAVE
        if namespace == "aten" and name in SAVED_OPERATORS
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


@dataclass(frozen=True)
class _FlexOutsidePolicy(PreparedAttention):
    """An attention whose FlexAttention the policy does not see, since torch compiles nothing that a policy watches. It
    is computed again."""

    attention: PatternAttention

    def __call__(self, q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
        if self.attention.backend_for(q_BQNH) != "flex":
            return self.attention(q_BQNH, k_BSKH, v_BSKH)
        with _disable_current_modes():
            return self.attention(q_BQNH, k_BSKH, v_BSKH)
