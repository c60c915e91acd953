"""The matrix products of a training step, seen as it runs, and the time that they take alone.

Shapes: B matrices of a batch, M rows, K summed, N columns; Q queries and S keys of H numbers, N heads.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCT_OPERATORS: dict[Any, int] = {
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.mm.out: 0,
    torch.ops.aten.mm.dtype: 0,
    torch.ops.aten.bmm.default: 0,
    torch.ops.aten.bmm.out: 0,
    torch.ops.aten.bmm.dtype: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.aten.addmm.out: 1,
    torch.ops.aten.addmm.dtype: 1,
    torch.ops.aten.addmm.dtype_out: 1,
    torch.ops.aten.addmm_.default: 1,
    torch.ops.aten.baddbmm.default: 1,
    torch.ops.aten.baddbmm.out: 1,
    torch.ops.aten.baddbmm_.default: 1,
}
"""Operator -> place of its first factor; before it stands what the product is added to."""

FUSED_ATTENTION = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_", "_cudnn_attention_")
"""How the names of torch's fused attentions begin."""


@dataclass(frozen=True)
class MatrixSpec:
    """A matrix, or a batch of them, without its numbers."""

    shape: tuple[int, ...]
    is_transposed: bool
    """Columns lie one behind the other in memory, not rows."""
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> MatrixSpec:
        """That of a tensor."""
        is_transposed = tensor.stride(-2) == 1 and tensor.stride(-1) != 1
        return MatrixSpec(tuple(tensor.shape), is_transposed, tensor.dtype)

    def make(self, device: str) -> Tensor:
        """A fresh tensor of this kind. Small numbers, not zeros: what they are must not make a product fast."""
        *batch, rows, columns = self.shape
        size = (*batch, columns, rows) if self.is_transposed else self.shape
        tensor = torch.empty(size, dtype=self.dtype, device=device).uniform_(-1.0, 1.0)
        return tensor.transpose(-2, -1) if self.is_transposed else tensor


@dataclass(frozen=True)
class MatrixProduct:
    """One matrix product, or a batch of them."""

    first: MatrixSpec
    second: MatrixSpec
    is_added: bool = False
    """To what is there already."""
    out_dtype: torch.dtype | None = None
    """Of the result; None: that of the factors."""

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each pair of numbers."""
        total = 2 * self.second.shape[-1]
        for size in self.first.shape:
            total *= size
        return total

    def prepare(self, device: str) -> Callable[[], Tensor]:
        """The product on fresh tensors, into a result that is there already."""
        first, second = self.first.make(device), self.second.make(device)
        dtype = self.out_dtype or self.first.dtype
        out = torch.zeros(*self.first.shape[:-1], self.second.shape[-1], dtype=dtype, device=device)
        given: dict[str, Any] = {} if dtype == self.first.dtype else {"out_dtype": dtype}
        batched = len(self.first.shape) == 3
        if self.is_added:
            add = torch.baddbmm if batched else torch.addmm
            return lambda: add(out, first, second, out=out, **given)
        multiply = torch.bmm if batched else torch.mm
        return lambda: multiply(first, second, out=out, **given)


class MatrixProductRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class
    """Notes each matrix product while it is open, those of the backward too.

    What torch's fused attention computes is noted as the batched products that give the same: two forward, four
    backward, of half as many heads where it is causal. Compiled code shows nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plain: collections.Counter[MatrixProduct] = collections.Counter()
        """Products and how often they occurred."""
        self.attention: collections.Counter[MatrixProduct] = collections.Counter()
        """Those inside of fused attention."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note, and compute."""
        result = func(*args, **(kwargs or {}))
        if func in PRODUCT_OPERATORS:
            at = PRODUCT_OPERATORS[func]
            first, second = args[at], args[at + 1]
            if first.shape[-2] == 1:  # a sum over rows, in disguise
                return result
            out = result.dtype if result.dtype != first.dtype else None
            self.plain[MatrixProduct(MatrixSpec.of(first), MatrixSpec.of(second), at == 1, out)] += 1
        elif func.namespace == "aten" and func.overloadpacket.__name__.startswith(FUSED_ATTENTION):
            for product in _products_of_attention(func, args, kwargs or {}):
                self.attention[product] += 1
        return result


def _products_of_attention(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[MatrixProduct]:
    """Of one call of fused attention [B, N, Q, H], forward or backward."""
    named = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | dict(kwargs)
    q, k = named["query"], named["key"]
    heads = q.shape[0] * q.shape[1]
    if named.get("is_causal"):
        heads = max(1, heads // 2)
    Q, S, H = q.shape[2], k.shape[2], q.shape[3]

    def factor(rows: int, columns: int, is_transposed: bool = False) -> MatrixSpec:
        return MatrixSpec((heads, rows, columns), is_transposed, q.dtype)

    if not func.overloadpacket.__name__.endswith("_backward"):
        return [MatrixProduct(factor(Q, H), factor(H, S, True)), MatrixProduct(factor(Q, S), factor(S, H))]
    into_values, into_scores = (
        MatrixProduct(factor(S, Q, True), factor(Q, H)),
        MatrixProduct(factor(Q, H), factor(H, S, True)),
    )
    into_queries, into_keys = MatrixProduct(factor(Q, S), factor(S, H)), MatrixProduct(factor(S, Q, True), factor(Q, H))
    return [into_values, into_scores, into_queries, into_keys]


@dataclass(frozen=True)
class StepProducts:
    """The matrix products of a step."""

    plain: Mapping[MatrixProduct, int]
    attention: Mapping[MatrixProduct, int]

    @staticmethod
    def of(step: Callable[[], object]) -> StepProducts:
        """Those of one call."""
        with MatrixProductRecorder() as watch:
            step()
        return StepProducts(dict(watch.plain), dict(watch.attention))

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(self.plain.values()) + sum(self.attention.values())

    @property
    def flops(self) -> int:
        """Of all of them."""
        both = (*self.plain.items(), *self.attention.items())
        return sum(times * product.flops for product, times in both)

    def replay(self, device: str) -> Callable[[], None]:
        """All of them on fresh tensors, one after the other, and nothing else; each as often as it occurred.

        Products of one kind share their tensors: a step reads other weights in each layer, so that what is measured is
        rather too short than too long.
        """
        calls = [
            (product.prepare(device), times)
            for products in (self.plain, self.attention)
            for product, times in products.items()
        ]

        def run() -> None:
            with torch.no_grad():
                for call, times in calls:
                    for _ in range(times):
                        call()
            if device == "cuda":
                torch.cuda.synchronize()

        return run
