"""Record every operator of torch that computes something: FLOPs, bytes, and the part of a step that it belongs to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarking.implementations.matrix_products import MatrixProduct, find_products
from benchmarking.serving.count_kernels import WITHOUT_KERNELS
from diffusionlm.models.attention import Attention
from diffusionlm.models.layers import Embedding, Linear, RMSNorm, RotaryEmbedding, SwiGLU
from diffusionlm.models.moe import MoE
from diffusionlm.models.transformer import Block, Transformer

Phase = Literal["forward", "recomputed", "backward", "update"]
PARTS = (
    "embedding", "norms", "projections", "attention", "feed-forward", "experts", "residuals", "casts",
    "head and loss", "gradients", "batch", "clipping", "optimizer", "averages", "sampling",
)  # fmt: skip
"""Parts of a step or of a round, in the order of tables."""

GATHERS = {"embedding", "index", "index_select", "gather"}
"""Operators that read rows of their first tensor, as many as they return."""
SCATTERS = {"index_copy_", "index_put_", "_index_put_impl_", "index_add_", "scatter_", "scatter_add_"}
"""Operators that write elements of their first tensor, as many as their last one has."""
ADDING_SCATTERS = {"index_add_", "scatter_add_"}
"""Those that read them as well."""
OVERWRITES = {"copy_", "zero_", "fill_", "uniform_", "normal_"}
"""Operators that do not read the tensor that they write."""


@dataclass(frozen=True)
class TensorUse:
    """A tensor that an operator reads or writes."""

    storage: int
    """Identity of its memory."""
    num_bytes: int
    """Bytes that are moved; those of a dimension that is expanded count once."""
    dtype: torch.dtype


@dataclass(frozen=True)
class Operator:
    """One call of an operator."""

    name: str
    """Without its namespace and overload."""
    part: str
    """One of `PARTS`."""
    phase: Phase
    layer: int | None
    """Index of the block. None: outside of the blocks."""
    products: tuple[MatrixProduct, ...]
    """One, those of fused attention, or none. A sum over rows that is written as a product does not count."""
    reads: tuple[TensorUse, ...]
    writes: tuple[TensorUse, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the tensors that are read."""

    @property
    def flops(self) -> int:
        """Two operations for each multiplication and addition of a product."""
        return sum(product.flops for product in self.products)

    @property
    def num_bytes(self) -> int:
        return sum(use.num_bytes for use in (*self.reads, *self.writes))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the factors of a product, else of the first result."""
        return self.products[0].first.dtype if self.products else (*self.writes, *self.reads)[0].dtype


@dataclass(frozen=True)
class _PartOfLayer:
    """Where the code is that runs: the part and the block."""

    part: str
    layer: int | None = None


class PartTracker:
    """Knows the part of a step that runs: in the forward by hooks of the model's modules, in the backward by the number
    that autograd gave to the node when the forward created it."""

    def __init__(self, model: Transformer) -> None:
        self._stack: list[_PartOfLayer] = []
        self._outside = _PartOfLayer("batch")
        self._numbers: list[int] = []
        self._places: list[_PartOfLayer] = []
        self._handles: list[Any] = []
        self._is_forward_done = False
        self._hook(model, model)

    def _hook(self, module: nn.Module, model: Transformer, layer: int | None = None, inside: str = "") -> None:
        """Hook a module and those in it; ``inside``: part of the module around it."""
        if isinstance(module, Block):
            layer = list(model.model.layers).index(module)
        part = _part_of(module, inside)
        if part is not None:
            place = _PartOfLayer(part, layer)
            self._handles.append(module.register_forward_pre_hook(lambda *_: self._enter(place)))
            self._handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        for child in module.children():
            self._hook(child, model, layer, part or inside)
        if module is model.model:  # what follows the final norm is the head
            self._handles.append(
                module.norm.register_forward_hook(lambda *_: self._replace(_PartOfLayer("head and loss")))
            )

    def follow_optimizers(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Let the step of each optimizer be the part `optimizer`; what runs before it, after the backward, is
        `clipping`, and what runs after it is `averages`."""

        def begin(*_: Any) -> None:
            self._outside = _PartOfLayer("optimizer")

        def end(*_: Any) -> None:
            self._outside = _PartOfLayer("averages")

        for optimizer in optimizers:
            self._handles += [optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)]

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, place: _PartOfLayer) -> None:
        self._stack.append(place)
        self._note()

    def _leave(self) -> None:
        self._stack.pop()
        if not self._stack:
            self._outside = _PartOfLayer("clipping")
        self._note()

    def _replace(self, place: _PartOfLayer) -> None:
        if len(self._stack) == 1:
            self._stack[0] = place
            self._note()

    def _note(self) -> None:
        """Nodes that are created from now on belong to the current place."""
        if torch._C._current_autograd_node() is None:
            self._numbers.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
            self._places.append(self._stack[-1] if self._stack else self._outside)

    def locate(self) -> tuple[str, Phase, int | None]:
        """Part, phase and block of the operator that runs."""
        node = torch._C._current_autograd_node()
        if self._stack:
            place = self._stack[-1]
            return place.part, "forward" if node is None else "recomputed", place.layer
        if node is None:
            return self._outside.part, "update" if self._outside.part != "batch" else "forward", None
        number = node._sequence_nr()
        index = bisect_right(self._numbers, number) - 1
        if index < 0 or number > self._numbers[-1]:  # it adds a gradient to that of a parameter
            return "gradients", "backward", None
        place = self._places[index]
        return place.part, "backward", place.layer


def _part_of(module: nn.Module, inside: str) -> str | None:
    """Part of the operators that run in a module, outside of the modules in it. None: ``inside``, that of the module
    around it."""
    if isinstance(module, Linear):
        return "projections" if inside == "attention" else None
    parts: list[tuple[type[nn.Module], str]] = [
        (Transformer, "embedding"),
        (Embedding, "embedding"),
        (RotaryEmbedding, "embedding"),
        (RMSNorm, "norms"),
        (Attention, "attention"),
        (MoE, "experts"),
        (SwiGLU, "feed-forward"),
        (Block, "residuals"),
    ]
    return next((part for kind, part in parts if isinstance(module, kind)), None)


class OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class
    """Records the operators that run in its context, the backward included."""

    def __init__(self, tracker: PartTracker, *, keeps_tensors: bool = False) -> None:
        """``keeps_tensors``: for fake tensors, which take no memory."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker, self.keeps_tensors = tracker, keeps_tensors
        self.operators: list[Operator] = []
        self._kept: list[Tensor] = []  # their memory is given to no others, so that identities are unique

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.is_inference_mode_enabled() and func.namespace != "prim" and func._can_decompose():
            with self:  # without autograd composite operators arrive here whole
                return func.decompose(*args, **(kwargs or {}))
        output = func(*args, **(kwargs or {}))
        if not (func.is_view or func.namespace == "prim" or func.overloadpacket.__name__ in WITHOUT_KERNELS):
            self.add(func, args, kwargs or {}, output)
        return output

    def add(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """Add the call of an operator to the record."""
        reads, writes = find_uses(func, args, kwargs, output)
        self.append(func.overloadpacket.__name__, find_products(func, args, kwargs, output), reads, writes)

    def append(
        self, name: str, products: Sequence[MatrixProduct], reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> None:
        """Add an operator to the record."""
        part, phase, layer = self.tracker.locate()
        dtypes = {tensor.dtype for tensor in (*reads[-1:], *writes)}
        if name in ("_to_copy", "copy_") and len(dtypes) > 1 and phase != "update":
            part = "casts"
        uses_read, uses_written = list(map(_use_of, reads)), list(map(_use_of, writes))
        if name in GATHERS:
            uses_read[0] = TensorUse(uses_read[0].storage, uses_written[0].num_bytes, uses_read[0].dtype)
        elif name in SCATTERS:
            uses_written[0] = TensorUse(uses_written[0].storage, uses_read[-1].num_bytes, uses_written[0].dtype)
            num_bytes_read = uses_read[-1].num_bytes if name in ADDING_SCATTERS else 0
            uses_read[0] = TensorUse(uses_read[0].storage, num_bytes_read, uses_read[0].dtype)
        shapes = tuple(tuple(tensor.shape) for tensor in reads)
        self.operators.append(
            Operator(name, part, phase, layer, tuple(products), tuple(uses_read), tuple(uses_written), shapes)
        )
        if self.keeps_tensors:
            self._kept += (*reads, *writes)


def find_uses(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that an operator reads, and those that it writes, as its schema says."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    name, scaled = func.overloadpacket.__name__, kwargs.get("grad_scale") is not None
    for index, argument in enumerate(func._schema.arguments):
        value = kwargs.get(argument.name, args[index] if index < len(args) else None)
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if argument.name == "grads" and not scaled:  # of fused optimizers, which unscale them in place
            is_written = False
        if is_written:
            writes += tensors
        if not (is_written and (argument.is_out or name in OVERWRITES)):
            reads += tensors
    if not writes:
        writes = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return reads, writes


def _use_of(tensor: Tensor) -> TensorUse:
    numbers = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numbers *= size if stride or not size else 1
    return TensorUse(tensor.untyped_storage()._cdata, numbers * tensor.element_size(), tensor.dtype)


@contextmanager
def record_operators(
    model: Transformer,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    make_recorder: Callable[[PartTracker], OperatorRecorder] = OperatorRecorder,
) -> Iterator[OperatorRecorder]:
    """Record the operators that run in the context."""
    tracker = PartTracker(model)
    tracker.follow_optimizers(optimizers)
    try:
        with make_recorder(tracker) as recorder:
            yield recorder
    finally:
        tracker.remove()
