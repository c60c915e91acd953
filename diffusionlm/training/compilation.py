"""torch.compile for each block alone: what is compiled does not grow with depth, and all layers share it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from config.runtime import RuntimeConfig
from diffusionlm.models.attention import PreparedAttention
from diffusionlm.models.moe import MoE
from diffusionlm.models.transformer import Block, Transformer


def should_compile_blocks(config: RuntimeConfig, device: torch.device) -> bool:
    """Whether blocks are compiled, also for ``auto``."""
    if config.compile != "auto":
        return config.compile == "blocks"
    return device.type == "cuda" and config.activation_checkpointing != "selective"


def compile_blocks(model: Transformer, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile the blocks' forward at its first call.

    Attention is called from the compiled code, not compiled with it: it comes prepared, with what it was prepared from,
    and FlexAttention is compiled by itself. So are experts, whose loop depends on what the router decides.
    """
    for block in model.model.layers:
        assert isinstance(block, Block)
        if isinstance(block.mlp, MoE):
            block.mlp.forward = _disable_compile(block.mlp.forward)  # type: ignore[method-assign]
        block.forward = _compile_forward(block.forward, backend)  # type: ignore[method-assign]


def _compile_forward(forward: Callable[..., Tensor], backend: str | Callable[..., Any]) -> Callable[..., Tensor]:
    compiled = torch.compile(forward, backend=backend)
    attend = _disable_compile(_call_attention)

    def run(
        x_BLD: Tensor,
        rope: tuple[Tensor, Tensor],
        attention: Any,
        *,
        output_positions: Tensor | None = None,
        routings: list[Any] | None = None,
    ) -> Tensor:
        if not torch.is_grad_enabled():  # validation has other shapes, and few steps
            return forward(x_BLD, rope, attention, output_positions=output_positions, routings=routings)
        return compiled(
            x_BLD, rope, _UncompiledAttention(attention, attend), output_positions=output_positions, routings=routings
        )

    return run


def _disable_compile(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call, no-any-return]


def _call_attention(attention: Any, q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
    return attention(q_BQNH, k_BSKH, v_BSKH)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _UncompiledAttention(PreparedAttention):
    """An attention that the compiler looks past."""

    attention: Any
    attend: Callable[..., Tensor]

    def __call__(self, q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
        return self.attend(self.attention, q_BQNH, k_BSKH, v_BSKH)
