"""Record every operator of torch that computes something: FLOPs, bytes, and the part of a step that it belongs to."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

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


def read_clock() -> float:
    """Seconds of an arbitrary clock: CPU time of this thread, which other processes affect less, if torch has no other
    thread."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


@dataclass(frozen=True)
class TensorSpec:
    """Shape, strides, dtype and device of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        return TensorSpec(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device.type)

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def make(self) -> Tensor:
        """Allocate such a tensor of ones, or if it is one of integers, which may be indices, of zeros."""
        tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        return (
            tensor.as_strided((_extent(self),), (1,))
            .fill_(1 if self.dtype.is_floating_point else 0)
            .as_strided(self.shape, self.strides)
        )


def _extent(spec: TensorSpec) -> int:
    """Elements between the first and the last one of a tensor in memory, both included."""
    if 0 in spec.shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.strides, strict=True))


@dataclass(frozen=True)
class OperatorCall:
    """An operator and its arguments, with a `TensorSpec` in place of each tensor."""

    function: Any
    args: Any
    kwargs: Any

    @staticmethod
    def of(function: Any, args: Any, kwargs: Any) -> OperatorCall:
        return OperatorCall(function, *tree_map_only(Tensor, TensorSpec.of, (tuple(args), dict(kwargs))))

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, TensorSpec))

    def prepare(self) -> Callable[[], object]:
        """Build a call with new tensors."""
        args, kwargs = tree_map_only(TensorSpec, TensorSpec.make, (self.args, self.kwargs))
        return lambda: self.function(*args, **kwargs)


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
    call: OperatorCall | None
    """What `calibration` repeats. None: a stand-in for a kernel of a GPU."""
    seconds: float
    """Duration of the call where it was recorded."""

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

    def __init__(self, model: Transformer, after_forward: str = "clipping") -> None:
        """``after_forward``: part of what runs outside of the model once it has been called."""
        self._after_forward = after_forward
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

    def begin_step(self) -> None:
        """Let what runs from now on belong to the batch of a step."""
        self._outside = _PartOfLayer("batch")

    def remove(self) -> None:
        """Remove the hooks from the modules of the model."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, place: _PartOfLayer) -> None:
        self._stack.append(place)
        self._note()

    def _leave(self) -> None:
        self._stack.pop()
        if not self._stack:
            self._outside = _PartOfLayer(self._after_forward)
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
            return self._outside.part, "forward" if self._outside.part in ("batch", "sampling") else "update", None
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

    def __init__(self, tracker: PartTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = tracker
        self.operators: list[Operator] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.is_inference_mode_enabled() and _is_composite(func):
            with self:  # without autograd composite operators arrive here whole
                return func.decompose(*args, **(kwargs or {}))
        start = read_clock()
        output = func(*args, **(kwargs or {}))
        seconds = read_clock() - start
        if not (
            func.is_view or func.namespace in ("prim", "profiler") or func.overloadpacket.__name__ in WITHOUT_KERNELS
        ):
            reads, writes = find_uses(func, args, kwargs or {}, output)
            products = find_products(func, args, kwargs or {}, output)
            call = OperatorCall.of(func, args, kwargs or {})
            self.add(func.overloadpacket.__name__, products, reads, writes, call, seconds)
        return output

    def clear(self) -> None:
        """Forget all operators that were recorded, as between two steps."""
        self.operators.clear()
        self.tracker.begin_step()

    def add(
        self,
        name: str,
        products: Sequence[MatrixProduct],
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        call: OperatorCall | None = None,
        seconds: float = 0.0,
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
        self.operators.append(
            Operator(name, part, phase, layer, tuple(products), tuple(uses_read), tuple(uses_written), call, seconds)
        )


def _is_composite(func: Any) -> bool:
    """Whether an operator is computed by others: a GPU has no kernel of its own for it, as it has for RMSNorm."""
    if func.namespace == "prim" or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CUDA"):
        return False
    return bool(func._can_decompose())


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
    recorder_class: type[OperatorRecorder] = OperatorRecorder,
    *,
    after_forward: str = "clipping",
) -> Iterator[OperatorRecorder]:
    """Record the operators that run in the context."""
    tracker = PartTracker(model, after_forward)
    tracker.follow_optimizers(optimizers)
    try:
        with recorder_class(tracker) as recorder:
            yield recorder
    finally:
        tracker.remove()
