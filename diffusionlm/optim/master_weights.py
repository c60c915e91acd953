"""bfloat16 weights with float32 master weights in 4 bytes: the bfloat16 for the products and 16 more bits beside it.

A float32 is split into the nearest bfloat16, with halves rounded away from zero, and the distance to it in units of the
last place of float32. That is -32768 to 32767, so it fits an int16 and nothing is lost.

Shapes: E elements of several parameters, one after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from diffusionlm.optim.chunks import MAX_TOGETHER, split_by_elements

ALIGNMENT = 64
"""Parameters begin at multiples of this many elements: 128 bytes of bfloat16, as matrix products like it."""


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


class _MasterChunk:
    """Parameters of one device whose elements are in one tensor, so that a few launches convert all of them."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._offsets: list[int] = []
        num_elements = 0
        for parameter in parameters:
            self._offsets.append(num_elements)
            num_elements += _aligned(parameter.numel())
        wide_E = torch.zeros(num_elements, device=self.parameters[0].device)
        torch._foreach_copy_(self._views(wide_E), [parameter.data for parameter in parameters])
        self._wide_E: Tensor | None = wide_E
        self._high_E: Tensor | None = None
        self._low_E: Tensor | None = None
        self.split()

    def join(self) -> None:
        """Replace both 16-bit halves of the parameters by float32 values."""
        assert self._high_E is not None and self._low_E is not None, "the parameters are float32 already"
        self._wide_E = join_float32(self._high_E, self._low_E)
        self._assign(self._wide_E)
        self._high_E = self._low_E = None

    def split(self) -> None:
        """Replace the float32 values of the parameters by bfloat16, and keep the other 16 bits beside them."""
        assert self._wide_E is not None, "the parameters are bfloat16 already"
        self._high_E, self._low_E = split_float32(self._wide_E)
        self._assign(self._high_E)
        self._wide_E = None

    def _assign(self, values_E: Tensor) -> None:
        for parameter, view in zip(self.parameters, self._views(values_E), strict=True):
            parameter.grad = None
            parameter.data = view

    def _views(self, values_E: Tensor) -> list[Tensor]:
        return [
            values_E[offset : offset + parameter.numel()].view(parameter.shape)
            for offset, parameter in zip(self._offsets, self.parameters, strict=True)
        ]


class MasterWeights:
    """Parameters that are bfloat16, and float32 inside of `as_float32`. Without parameters it does nothing.

    Both forms take 4 bytes a weight. One after the other chunk is converted, and its old form freed.
    """

    @torch.no_grad()
    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self._grads: dict[nn.Parameter, Tensor] = {}
        matrices = list(parameters.values())
        # On a CPU each is alone: it stays in the cache, and there are no launches to save.
        is_on_cpu = any(matrix.device.type == "cpu" for matrix in matrices)
        chunks = split_by_elements(matrices, 0 if is_on_cpu else MAX_TOGETHER // 2)
        self._chunks = [_MasterChunk(matrices[chunk]) for chunk in chunks]

    @torch.no_grad()
    def accumulate_gradients(self) -> None:
        """Add the gradients of one micro-batch to float32 sums, and drop them from the parameters."""
        for chunk in self._chunks:
            used = [parameter for parameter in chunk.parameters if parameter.grad is not None]
            if not used:
                continue
            gradients = [parameter.grad for parameter in used if parameter.grad is not None]
            wide = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
            torch._foreach_copy_(wide, gradients)
            indices_with_sum = [index for index, parameter in enumerate(used) if parameter in self._grads]
            if indices_with_sum:
                sums = [self._grads[used[index]] for index in indices_with_sum]
                torch._foreach_add_(sums, [wide[index] for index in indices_with_sum])
            for parameter, gradient in zip(used, wide, strict=True):
                self._grads.setdefault(parameter, gradient)
                parameter.grad = None

    @contextlib.contextmanager
    def as_float32(self) -> Iterator[None]:
        """Context in which the parameters are their float32 masters, with the accumulated gradients.

        At its end changes of the values stay, and gradients are dropped.
        """
        with torch.no_grad():
            for chunk in self._chunks:
                chunk.join()
                for parameter in chunk.parameters:
                    parameter.grad = self._grads.pop(parameter, None)
        try:
            yield
        finally:
            with torch.no_grad():
                for chunk in self._chunks:
                    chunk.split()


def _aligned(num_elements: int) -> int:
    return -(-num_elements // ALIGNMENT) * ALIGNMENT


def select_block_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that ``runtime.weights`` concerns: trained matrices of the blocks."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if ".layers." in name and parameter.dim() == 2 and parameter.requires_grad
    }
