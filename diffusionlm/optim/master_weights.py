"""bfloat16 weights with float32 master weights in 4 bytes: the bfloat16 for the products and 16 more bits beside it.

A float32 is split into the nearest bfloat16, with halves rounded away from zero, and the distance to it in units of the
last place of float32. That is -32768 to 32767, so it fits an int16 and nothing is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


def split_float32(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32 values into (bfloat16, int16) tensors of the same shape."""
    bits = values.contiguous().view(torch.int32)
    high = (bits + 0x8000) >> 16
    low = (bits - (high << 16)).to(torch.int16)
    return high.to(torch.int16).view(torch.bfloat16), low


def join_float32(high: Tensor, low: Tensor) -> Tensor:
    """Undo `split_float32`, bit for bit."""
    bits = (high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
    return bits.view(torch.float32)


class MasterWeights:
    """Parameters that are bfloat16, and float32 inside of `as_float32`. Without parameters it does nothing."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self._low_bits: dict[str, Tensor] = {}
        self._grads: dict[str, Tensor] = {}
        self._split_parameters()

    @torch.no_grad()
    def accumulate_gradients(self) -> None:
        """Add the gradients of one micro-batch to float32 sums, and drop them from the parameters."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            if name in self._grads:
                self._grads[name] += parameter.grad
            else:
                self._grads[name] = parameter.grad.float()
            parameter.grad = None

    @contextlib.contextmanager
    def as_float32(self) -> Iterator[None]:
        """Context in which the parameters are their float32 masters, with the accumulated gradients.

        At its end changes of the values stay, and gradients are dropped.
        """
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.data = join_float32(parameter.data, self._low_bits.pop(name))
                parameter.grad = self._grads.pop(name, None)
        try:
            yield
        finally:
            self._split_parameters()

    @torch.no_grad()
    def _split_parameters(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = None
            parameter.data, self._low_bits[name] = split_float32(parameter.data)


def select_block_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that ``runtime.weights`` concerns: trained matrices of the blocks."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if ".layers." in name and parameter.dim() == 2 and parameter.requires_grad
    }
