"""A GPU that computes nothing: fake tensors on ``cuda``, and a record of the operators that would be launched.

Shapes, dtypes, devices and the choice of code paths are those of a GPU. Values do not exist: where the host reads one,
the place is recorded, and the value is 1.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarking.serving.count_kernels import WITHOUT_KERNELS
from diffusionlm.kernels import chunked_loss
from profiling import triton_setup

PROJECT = Path(__file__).parents[1]
FUSED_ATTENTION = "scaled_dot_product_attention"
"""Name of the launch of torch's fused attention."""


@dataclass(frozen=True)
class Launch:
    """An operator that computes on the GPU."""

    name: str
    """Without its namespace and overload."""
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @property
    def is_product(self) -> bool:
        return self.name in ("mm", "addmm", "bmm", "baddbmm", FUSED_ATTENTION)


@dataclass
class LaunchRecord:
    """The operators that computed on the GPU, in order, and where the host waited for it."""

    launches: list[Launch] = field(default_factory=list)
    waits: Counter[str] = field(default_factory=Counter)
    """``file:function`` of the project's innermost call -> values, indices or tensors that the host waited for. A copy
    of pageable memory counts: the driver may wait."""
    pinned: dict[int, Tensor] = field(default_factory=dict)
    """Tensors in pinned memory, by identity."""

    def attend(
        self, q_BNQH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, attn_mask: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Record fused attention, and return a tensor of its shape."""
        out_BNQH = torch.empty_like(q_BNQH)
        inputs = (q_BNQH, k_BKSH, v_BKSH) if attn_mask is None else (q_BNQH, k_BKSH, v_BKSH, attn_mask)
        self.launches.append(Launch(FUSED_ATTENTION, inputs, (out_BNQH,)))
        return out_BNQH

    def pin_memory(self, tensor: Tensor) -> Tensor:
        """Take the place of `torch.Tensor.pin_memory`, which looks for a GPU."""
        self.pinned[id(tensor)] = tensor
        return tensor

    def add_wait(self) -> None:
        """Record that the host waits here."""
        if (place := find_place()) is not None:
            self.waits[place] += 1

    def clear(self) -> None:
        """Forget what was recorded."""
        self.launches.clear()
        self.waits.clear()

    def count(self) -> Counter[str]:
        """Number of launches of each operator."""
        return Counter(launch.name for launch in self.launches)

    def product_dtypes(self) -> set[torch.dtype]:
        """Dtypes of the factors of all matrix products."""
        return {tensor.dtype for launch in self.launches if launch.is_product for tensor in launch.inputs}


class _Recorder(TorchDispatchMode):
    def __init__(self, record: LaunchRecord, mode: FakeTensorMode) -> None:
        super().__init__()
        self.record, self.mode = record, mode

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if torch.is_inference_mode_enabled() and _is_composite(func):
            with self:  # without autograd composite operators arrive here whole
                return func.decompose(*args, **kwargs)
        if name == "_local_scalar_dense" and isinstance(args[0], FakeTensor):
            if args[0].is_cuda:
                self.record.add_wait()
            return {True: 1.0, False: 1}[args[0].is_floating_point()] if args[0].dtype != torch.bool else True
        if name == "nonzero" and args[0].is_cuda:
            self.record.add_wait()
            return args[0].new_zeros(1, args[0].dim(), dtype=torch.int64)
        if name.startswith("index") and any(_is_mask(index) for index in tree_leaves(args[1:2])):
            self.record.add_wait()
            indices = [index.flatten()[:1].long() if _is_mask(index) else index for index in args[1]]
            args = (args[0], indices, *args[2:])
        source: Any = args[1] if name == "copy_" else args[0] if args else None
        if name == "_to_copy":  # the mode itself would copy a tiny tensor, whose value it knows, to a real GPU
            args = (source if isinstance(source, FakeTensor) else self.mode.from_tensor(source), *args[1:])
            args[0].constant = None
        output = func(*args, **kwargs)
        inputs, outputs = _tensors((args, kwargs)), _tensors(output)
        if name in ("_to_copy", "copy_"):
            target = outputs[0]
            is_asynchronous = kwargs.get("non_blocking") or True in args[2:]
            is_pageable = not source.is_cuda and id(source) not in self.record.pinned
            if source.is_cuda != target.is_cuda and source.dim() and (is_pageable or not is_asynchronous):
                self.record.add_wait()
        computes = not func.is_view and name not in WITHOUT_KERNELS and func.namespace != "prim"
        if computes and any(tensor.is_cuda for tensor in (*inputs, *outputs)):
            self.record.launches.append(Launch(name, inputs, outputs))
        return output


def _is_composite(func: Any) -> bool:
    """Whether a GPU computes an operator by others: it has no kernel of its own, such as RMSNorm has."""
    if func.namespace == "prim" or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CUDA"):
        return False
    return bool(func._can_decompose())


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.is_cuda and index.dtype == torch.bool


def find_place() -> str | None:
    """``file:function`` of the project's innermost call that is running. None: a test waits by itself."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(PROJECT) and not path.is_relative_to(PROJECT / "tests") and ".venv" not in path.parts:
            if frame.name.startswith("<"):  # a comprehension
                continue
            return f"{path.relative_to(PROJECT)}:{frame.name}"
    return None


def _tensors(tree: Any) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


@contextlib.contextmanager
def fake_cuda() -> Iterator[LaunchRecord]:
    """Context in which tensors are fake, a GPU with bfloat16 seems to be there, and launches are recorded.

    Stubs with the right shapes take the place of the loss kernel, which fake tensors cannot enter, and of fused
    attention, which torch selects by the properties of a real GPU. Build in the context what is used in it.
    """
    record = LaunchRecord()
    with contextlib.ExitStack() as stack:
        mode = stack.enter_context(
            FakeTensorMode(allow_non_fake_inputs=True)
        )  # before a GPU seems to be there: it would initialize CUDA
        for name in ("is_available", "is_bf16_supported"):
            stack.enter_context(patch.object(torch.cuda, name, lambda *_, **__: True))
        stack.enter_context(patch.object(torch.Tensor, "pin_memory", lambda tensor: record.pin_memory(tensor)))
        stack.enter_context(patch.object(triton_setup, "find_triton_problem", lambda: None))
        stack.enter_context(patch.object(chunked_loss, "load_loss_backend", _load_fake_loss))
        stack.enter_context(patch.object(torch.nn.functional, FUSED_ATTENTION, record.attend))
        stack.enter_context(_Recorder(record, mode))
        yield record


def _load_fake_loss(backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    assert backend == "triton", "a GPU uses the kernel"

    def compute_chunk_loss(logits_CV: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        nll_C = logits_CV.new_empty(len(logits_CV), dtype=torch.float32)
        return nll_C, nll_C

    return compute_chunk_loss
