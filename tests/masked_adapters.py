"""Adapters of masked positions, and a second implementation of them: hooks on the projections of their base."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from config.finetune.lora import LoraConfig
from diffusionlm.models.lora import LoRALinear, adapter_modules, add_adapter
from diffusionlm.models.transformer import Transformer
from diffusionlm.models.varlen import VarlenBatch

FindMasked = Callable[[Tensor], Tensor]
"""Maps input tokens [B, L] to True at masked positions, [B, L]."""


def move_adapter(model: Transformer, seed: int = 1, scale: float = 0.4) -> None:
    """Move all trained values of a model by random numbers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.add_(scale * torch.randn(value.shape, generator=generator))


def add_drafter(model: Transformer, seed: int = 1, **options: Any) -> Transformer:
    """Put an adapter of masked positions with large random values on a model; returns the model."""
    add_adapter(model, LoraConfig(**{"rank": 3, "positions": "masks", **options}))
    move_adapter(model, seed)
    return model


class HookedAdapter:
    """The values of an adapter, added to the outputs of a plain model's projections at masked positions."""

    def __init__(self, base: Transformer, adapted: Transformer, find_masked: FindMasked) -> None:
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}
        """Name of a projection -> A and B."""
        self._find_masked, self._masked_T, self._outputs = find_masked, torch.zeros(0), torch.zeros(0)
        base.register_forward_pre_hook(self._read_inputs, with_kwargs=True)
        for name, module in adapter_modules(adapted):
            assert isinstance(module, LoRALinear)
            A, B = (factor.detach().clone().requires_grad_() for factor in module.factors())
            self.factors[name] = A, B
            base.get_submodule(name).register_forward_hook(self._make_hook(A, B, module.scale))

    def _read_inputs(self, _module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._masked_T, pattern = self._find_masked(arguments[0]).flatten(), keywords["pattern"]
        outputs = keywords.get("output_positions")
        if isinstance(pattern, VarlenBatch):
            outputs = pattern.output_positions()
        self._outputs = torch.arange(len(self._masked_T)) if outputs is None else outputs

    def _make_hook(self, A: Tensor, B: Tensor, scale: float) -> Callable[..., Tensor]:
        def add(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            masked = self._masked_T if inputs[0].dim() == 3 else self._masked_T[self._outputs]
            delta = scale * (inputs[0] @ A.T.to(output.dtype) @ B.T.to(output.dtype))
            return torch.where(masked.view(*output.shape[:-1], 1), output + delta, output)

        return add
