"""How large weights and activations are, looked at now and then.

Shapes: D width of a module's output; a parameter has any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ddp.process_group import World
from diffusionlm.models.transformer import Transformer

NormsByName = dict[str, Tensor]
"""Each is 0-d, on the device; over all ranks."""


class ActivationNorms:
    """Mean L2 norms of the vectors that embedding, blocks and last norm put out, over all positions that they compute:
    the last block and the norm have the scored ones alone."""

    def __init__(self, model: Transformer) -> None:
        layers = {f"layers.{index}": block for index, block in enumerate(model.model.layers)}
        self.modules: dict[str, nn.Module] = {
            "embed_tokens": model.model.embed_tokens,
            **layers,
            "norm": model.model.norm,
        }
        device = model.model.norm.weight.device
        self._sums_N2 = torch.zeros(len(self.modules), 2, dtype=torch.float64, device=device)

    @contextlib.contextmanager
    def record_forwards(self) -> Iterator[None]:
        """Forwards inside are looked at; the modules are as they were before and after."""
        with contextlib.ExitStack() as stack:
            for index, module in enumerate(self.modules.values()):
                handle = module.register_forward_hook(self._hook(index))
                stack.callback(handle.remove)
            yield

    def result(self, world: World) -> NormsByName:
        """Of the forwards that were watched. Nothing waits for the device."""
        world.all_reduce_on_device(self._sums_N2)
        means_N = self._sums_N2[:, 0] / self._sums_N2[:, 1].clamp(min=1.0)
        return dict(zip(self.modules, means_N, strict=True))

    def _hook(self, index: int) -> Any:
        @torch.no_grad()
        def add(module: nn.Module, inputs: Any, output: Tensor) -> None:
            norms = torch.linalg.vector_norm(output.detach(), dim=-1, dtype=torch.float32)
            self._sums_N2[index, 0] += norms.sum(dtype=torch.float64)
            self._sums_N2[index, 1] += norms.numel()

        return add


@torch.no_grad()
def compute_weight_norms(model: Transformer, world: World) -> NormsByName:
    """L2 norm of every parameter, one that is tied once. All ranks call this; nothing waits for the device.

    A parameter that is whole on every rank is taken from the first one, of one that is cut each has its rows.
    """
    squares = []
    for parameter in model.parameters():
        values: Any = parameter.detach()
        is_cut = hasattr(values, "to_local")
        own: Tensor = values.to_local() if is_cut else values
        square = torch.linalg.vector_norm(own, dtype=torch.float32).double().square()
        squares.append(square if is_cut or world.is_first else torch.zeros_like(square))
    roots_N = world.all_reduce_on_device(torch.stack(squares)).sqrt()
    return dict(zip((name for name, _ in model.named_parameters()), roots_N, strict=True))


def summarize_norms(kind: str, named: NormsByName) -> dict[str, float]:
    """``kind/<name>`` of each, and ``kind/mean``, ``/min`` and ``/max`` of all; waits for the device."""
    values = dict(zip(named, torch.stack(list(named.values())).tolist(), strict=True))
    of_all = {"mean": sum(values.values()) / len(values), "min": min(values.values()), "max": max(values.values())}
    return {f"{kind}/{name}": value for name, value in (of_all | values).items()}
