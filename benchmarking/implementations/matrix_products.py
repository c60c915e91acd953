"""Record the matrix products of a training step, and replay them alone.

Shapes: Q queries, S keys, H width of a head.
"""

from __future__ import annotations

import collections
import math
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
"""Operator -> index of its first factor; an argument before it is added to the product."""

FUSED_ATTENTION = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_", "_cudnn_attention_")
"""Prefixes of the names of torch's fused attention operators."""


@dataclass(frozen=True)
class MatrixSpec:
    """Shape, layout and dtype of a matrix or of a batch of matrices."""

    shape: tuple[int, ...]
    is_transposed: bool
    """True if the memory is column-major."""
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> MatrixSpec:
        is_transposed = tensor.stride(-2) == 1 and tensor.stride(-1) != 1
        return MatrixSpec(tuple(tensor.shape), is_transposed, tensor.dtype)

    def make(self, device: str) -> Tensor:
        """Allocate such a tensor. It is random, because zeros could make a product faster."""
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
    """True if the product is added to the output."""
    out_dtype: torch.dtype | None = None
    """Dtype of the result; None: the dtype of the factors."""

    @property
    def flops(self) -> int:
        """Floating-point operations: one multiplication and one addition for each pair of elements."""
        return 2 * math.prod(self.first.shape) * self.second.shape[-1]

    def prepare(self, device: str) -> Callable[[], Tensor]:
        """Build a call that computes the product of new tensors into a preallocated result."""
        first, second = self.first.make(device), self.second.make(device)
        dtype = self.out_dtype or self.first.dtype
        out = torch.zeros(*self.first.shape[:-1], self.second.shape[-1], dtype=dtype, device=device)
        options: dict[str, Any] = {} if dtype == self.first.dtype else {"out_dtype": dtype}
        batched = len(self.first.shape) == 3
        if self.is_added:
            add = torch.baddbmm if batched else torch.addmm
            return lambda: add(out, first, second, out=out, **options)
        multiply = torch.bmm if batched else torch.mm
        return lambda: multiply(first, second, out=out, **options)


class MatrixProductRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class
    """Records every matrix product inside its context, the backward included.

    Fused attention is recorded as the batched products that compute the same: two forward, four backward, of half as
    many heads if it is causal. Products of compiled code are not recorded.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let FlexAttention compile inside of the context; torch would run its eager form, which a mode refuses."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plain: collections.Counter[MatrixProduct] = collections.Counter()
        self.attention: collections.Counter[MatrixProduct] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        counter = self.attention if _is_fused_attention(func) else self.plain
        counter.update(find_products(func, args, kwargs or {}, result))
        return result


def _is_fused_attention(func: Any) -> bool:
    name: str = func.overloadpacket.__name__
    return func.namespace == "aten" and name.startswith(FUSED_ATTENTION)


def find_products(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> list[MatrixProduct]:
    """Matrix products of one call of an operator: one, those of fused attention, or none. A sum over rows that is
    written as a product is none."""
    if _is_fused_attention(func):
        return _products_of_attention(func, args, kwargs)
    if func not in PRODUCT_OPERATORS:
        return []
    at = PRODUCT_OPERATORS[func]
    first, second = args[at], args[at + 1]
    if first.shape[-2] == 1:
        return []
    out_dtype = result.dtype if result.dtype != first.dtype else None
    return [MatrixProduct(MatrixSpec.of(first), MatrixSpec.of(second), at == 1, out_dtype)]


def _products_of_attention(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[MatrixProduct]:
    """Matrix products of one call of fused attention, forward or backward; queries are ``[batch, heads, Q, H]``."""
    arguments = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | dict(kwargs)
    q, k = arguments["query"], arguments["key"]
    heads = q.shape[0] * q.shape[1]
    if arguments.get("is_causal"):
        heads = max(1, heads // 2)
    Q, S, H = q.shape[2], k.shape[2], q.shape[3]

    def factor(rows: int, columns: int, is_transposed: bool = False) -> MatrixSpec:
        return MatrixSpec((heads, rows, columns), is_transposed, q.dtype)

    if not func.overloadpacket.__name__.endswith("_backward"):
        return [MatrixProduct(factor(Q, H), factor(H, S, True)), MatrixProduct(factor(Q, S), factor(S, H))]
    into_scores, into_queries = (
        MatrixProduct(factor(Q, H), factor(H, S, True)),
        MatrixProduct(factor(Q, S), factor(S, H)),
    )
    into_keys = into_values = MatrixProduct(factor(S, Q, True), factor(Q, H))
    return [into_values, into_scores, into_queries, into_keys]


@dataclass(frozen=True)
class StepProducts:
    """The matrix products of a step, with their numbers of calls."""

    plain: Mapping[MatrixProduct, int]
    """Products outside fused attention."""
    attention: Mapping[MatrixProduct, int]
    """Products inside fused attention."""

    @staticmethod
    def of(step: Callable[[], object]) -> StepProducts:
        """Record the matrix products of one call."""
        with MatrixProductRecorder() as recorder:
            step()
        return StepProducts(dict(recorder.plain), dict(recorder.attention))

    @property
    def _counts(self) -> list[tuple[MatrixProduct, int]]:
        return [*self.plain.items(), *self.attention.items()]

    @property
    def count(self) -> int:
        return sum(times for _, times in self._counts)

    @property
    def flops(self) -> int:
        return sum(times * product.flops for product, times in self._counts)

    def replay(self, device: str) -> Callable[[], None]:
        """Build a call that computes all products one after the other on new tensors.

        Equal products share their tensors, whereas a step reads other weights in each layer; the measured time is
        therefore a lower bound.
        """
        calls = [(product.prepare(device), times) for product, times in self._counts]

        def run() -> None:
            with torch.no_grad():
                for call, times in calls:
                    for _ in range(times):
                        call()
            if device == "cuda":
                torch.cuda.synchronize()

        return run
