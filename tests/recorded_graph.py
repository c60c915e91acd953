"""CUDA graphs on a CPU: operators are recorded with their tensors, and repeated on the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS_OF_THE_HOST = {
    "_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "unique_consecutive", "_unique2",
}  # fmt: skip
"""Operators that a graph cannot record: the host, or the shape of the result, depends on values."""


@dataclass(frozen=True)
class Operator:
    """A call of an operator, with the tensors of its arguments and results."""

    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    results: tuple[Tensor, ...]
    """Those with memory of their own."""

    def describe(self) -> tuple[Any, ...]:
        """The operator, and the shapes of its tensors."""
        return str(self.function), tuple(tuple(tensor.shape) for tensor in _tensors((self.args, self.kwargs)))


class RecordedGraph:
    """Takes the place of `CudaGraph`. What the host computes happens once, while the function is recorded."""

    def __init__(self) -> None:
        self.operators: list[Operator] = []
        self.num_replays = 0

    def capture(self, forward: Callable[[], None]) -> None:
        """Call the function and record its operators."""
        with _OperatorRecorder(self.operators):
            forward()

    def replay(self) -> None:
        """Repeat the operators, and write each result into the memory of the recorded one. Before, no result has a
        value: an operator that reads what a later one, or another replay, has written gets NaN."""
        self.num_replays += 1
        for operator in self.operators:
            for result in operator.results:
                result.fill_(torch.nan if result.is_floating_point() else 0)
        for operator in self.operators:
            again = _tensors(operator.function(*operator.args, **operator.kwargs))
            if operator.results:
                for result, new in zip(operator.results, again, strict=True):
                    result.copy_(new)


def make_pools_of(make_graph: Callable[[], Any]) -> Any:
    """What takes the place of `CapturePool`, for other graphs."""
    return lambda: SimpleNamespace(make_graph=make_graph)


class _OperatorRecorder(TorchDispatchMode):
    def __init__(self, operators: list[Operator]) -> None:
        super().__init__()
        self.operators = operators

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        assert name not in READS_OF_THE_HOST, f"a graph cannot record {func}"
        inputs = _tensors((args, kwargs))
        assert not name.startswith("index") or all(index.dtype != torch.bool for index in _tensors(args[1:2])), func
        output = func(*args, **kwargs)
        memory = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        results = tuple(tensor for tensor in _tensors(output) if tensor.untyped_storage().data_ptr() not in memory)
        assert len(results) in (0, len(_tensors(output))), func
        if func.namespace != "prim":
            self.operators.append(Operator(func, args, kwargs, results))
        return output


def _tensors(tree: Any) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
