"""Weights in bfloat16 with 16 more bits beside them, which together are the float32 master: 4 bytes a weight, 2 of them
read by the products.

A float32 is split into the bfloat16 nearest to it, halves away from zero, and the distance to it in units of the last
place of float32: from -32768 to 32767, so that it fits an int16 and nothing is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from diffusionlm.models.transformer import Transformer


def split(full: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 -> (bfloat16, int16), both of its shape."""
    bits = full.contiguous().view(torch.int32)
    high = (bits + 0x8000) >> 16
    low = (bits - (high << 16)).to(torch.int16)
    return high.to(torch.int16).view(torch.bfloat16), low


def join(high: Tensor, low: Tensor) -> Tensor:
    """What was split, bit for bit."""
    bits = (high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
    return bits.view(torch.float32)


class MasterWeights:
    """Parameters that are bfloat16, but float32 inside of `full`; over no parameters, nothing."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self._low_bits: dict[str, Tensor] = {}
        self._grads: dict[str, Tensor] = {}
        self._split_parameters()

    @torch.no_grad()
    def accumulate_gradients(self) -> None:
        """Add the gradients of a backward up in float32; after each micro-batch."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            if name in self._grads:
                self._grads[name] += parameter.grad
            else:
                self._grads[name] = parameter.grad.float()
            parameter.grad = None

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """The parameters are their float32 masters meanwhile, with the gradients that were collected; what is done to
        them stays, gradients are dropped."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.data = join(parameter.data, self._low_bits.pop(name))
                parameter.grad = self._grads.pop(name, None)
        try:
            yield
        finally:
            self._split_parameters()

    @torch.no_grad()
    def _split_parameters(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = None
            parameter.data, self._low_bits[name] = split(parameter.data)


def select_block_matrices(model: Transformer) -> dict[str, nn.Parameter]:
    """The parameters that `runtime.weights` is about: matrices of the blocks that are trained."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if ".layers." in name and parameter.dim() == 2 and parameter.requires_grad
    }
