"""torch.compile for each block alone: what is compiled does not grow with depth, and all layers share it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from config.runtime import RuntimeConfig
from diffusionlm.models.attention import attend_rows
from diffusionlm.models.moe import Mixture
from diffusionlm.models.transformer import Block, Transformer


def chooses_blocks(config: RuntimeConfig, device: torch.device) -> bool:
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
        if isinstance(block.mlp, Mixture):
            block.mlp.forward = _disabled(block.mlp.forward)  # type: ignore[method-assign]
        block.forward = _compiled(block.forward, backend)  # type: ignore[method-assign]


def _compiled(forward: Callable[..., Tensor], backend: str | Callable[..., Any]) -> Callable[..., Tensor]:
    compiled = torch.compile(forward, backend=backend)
    attend = _disabled(_attend)

    def run(
        x_BLD: Tensor,
        rope: tuple[Tensor, Tensor],
        attention: Any,
        *,
        rows: Tensor | None = None,
        routings: list[Any] | None = None,
    ) -> Tensor:
        if not torch.is_grad_enabled():  # validation has other shapes, and few steps
            return forward(x_BLD, rope, attention, rows=rows, routings=routings)
        return compiled(x_BLD, rope, _Called(attention, attend), rows=rows, routings=routings)

    return run


def _disabled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call, no-any-return]


def _attend(attention: Any, q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
    return attention(q_BQNH, k_BSKH, v_BSKH)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Called:
    """An attention that the compiler looks past."""

    attention: Any
    attend: Callable[..., Tensor]

    def __call__(self, q_BQNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
        return self.attend(self.attention, q_BQNH, k_BSKH, v_BSKH)

    def of_rows(self, q_RNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, rows: Tensor) -> Tensor:
        return attend_rows(self, q_RNH, k_BSKH, v_BSKH, rows)
