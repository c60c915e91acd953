"""A GPU that computes nothing: fake tensors on ``cuda``, and a record of the operators that would be launched.

Shapes, dtypes, devices and the choice of code paths are those of a GPU. Its values do not exist: where the host reads
one, the place is recorded, and the value is 1. Tensors on the CPU are real.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode, fake_tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diffusionlm.kernels import chunked_loss
from diffusionlm.models import flex
from diffusionlm.models.moe import ExpertGroups
from profiling import triton_setup
from tests.python_backward import python_backward

PROJECT = Path(__file__).parents[1]
FUSED_ATTENTION = "scaled_dot_product_attention"
"""Name of the launch of torch's fused attention."""
FLEX_ATTENTION = "flex_attention"
"""Name of the launch of FlexAttention."""
BACKWARD = "_backward"
"""End of the name of the launch of an attention's backward."""
WITHOUT_KERNELS = {
    "empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "detach", "lift_fresh", "_local_scalar_dense",
    "promote_types",
}  # fmt: skip
"""Operators that compute nothing."""
RecordAttention = Callable[[Sequence[Tensor], Sequence[Tensor], bool], None]


class FusedAttention(torch.autograd.Function):
    """Stands for torch's fused attention or FlexAttention. Queries, keys and values have the width of a head last.

    ``record`` is called with the tensors that are read and written, and whether by the backward.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, record: RecordAttention) -> Tensor:
        out = torch.empty_like(q)
        log_sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.record = record
        record((q, k, v), (out, log_sums), False)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        gradients = tuple(torch.empty_like(tensor) for tensor in saved[:3])
        ctx.record((*saved, *grads), gradients, True)
        return (*gradients, None)


@dataclass(frozen=True)
class Launch:
    """An operator that computes on the GPU."""

    name: str
    """Without its namespace and overload."""
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    is_backward: bool
    """Whether a backward pass runs, also if it recomputes an activation."""

    @property
    def is_product(self) -> bool:
        return self.name in ("mm", "addmm", "bmm", "baddbmm", FUSED_ATTENTION, FLEX_ATTENTION)


@dataclass
class LaunchRecord:
    """The operators that computed on the GPU, in order, and where the host waited for it."""

    launches: list[Launch] = field(default_factory=list)
    waits: Counter[str] = field(default_factory=Counter)
    """``file:function`` of the project's innermost call -> values, indices or tensors that the host waited for. A copy
    of pageable memory counts: the driver may wait."""
    pinned: dict[int, Tensor] = field(default_factory=dict)
    """Tensors in pinned memory, by address."""
    registered: dict[int, int] = field(default_factory=dict)
    """Memory that was pinned afterwards: its address and bytes."""

    def add(self, name: str, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        """Record a launch, and whether it belongs to a backward."""
        self.launches.append(Launch(name, inputs, outputs, torch._C._current_autograd_node() is not None))

    def attend(
        self, q_BNQH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, attn_mask: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Record fused attention and its backward, and return a tensor of its shape."""
        add = partial(self._add_attention, FUSED_ATTENTION, () if attn_mask is None else (attn_mask,))
        out: Tensor = FusedAttention.apply(q_BNQH, k_BKSH, v_BKSH, add)
        return out

    def attend_flex(self, q_BNQH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, *, block_mask: Any, **_: Any) -> Tensor:
        """Record FlexAttention and its backward with the tables of its mask, and return a tensor of its shape."""
        tables = (block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks)
        out: Tensor = FusedAttention.apply(q_BNQH, k_BKSH, v_BKSH, partial(self._add_attention, FLEX_ATTENTION, tables))
        return out

    def _add_attention(
        self,
        name: str,
        mask: Sequence[Tensor],
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        is_backward: bool,
    ) -> None:
        self.add(name + BACKWARD * is_backward, (*reads, *mask), tuple(writes))

    def pin_memory(self, tensor: Tensor) -> Tensor:
        """Take the place of `torch.Tensor.pin_memory`, which looks for a GPU."""
        self.pinned[tensor.data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a CPU tensor is in pinned memory."""
        address = tensor.data_ptr()
        return address in self.pinned or any(
            start <= address < start + num_bytes for start, num_bytes in self.registered.items()
        )

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        """Take the place of CUDA's function."""
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        """Take the place of CUDA's function."""
        del self.registered[address]
        return 0

    def add_wait(self) -> None:
        """Record that the host waits here."""
        if (place := find_place()) is not None:
            self.waits[place] += 1

    def synchronize(self, *_: Any) -> None:
        """Take the place of a function that waits for a stream or an event."""
        self.add_wait()

    def clear(self) -> None:
        """Forget what was recorded."""
        self.launches.clear()
        self.waits.clear()

    def count(self, *, of_backward: bool = False) -> Counter[str]:
        """Number of launches of each operator, all or those of backward passes."""
        return Counter(launch.name for launch in self.launches if launch.is_backward or not of_backward)

    def product_dtypes(self) -> set[torch.dtype]:
        """Dtypes of the factors of all matrix products."""
        inputs = [tensor for launch in self.launches if launch.is_product for tensor in launch.inputs]
        return {tensor.dtype for tensor in inputs if tensor.is_floating_point()}


class FakeStream:
    """Takes the place of `torch.cuda.Stream` and of `torch.cuda.Event`."""

    def __init__(self, record: LaunchRecord) -> None:
        self.synchronize = record.synchronize

    def wait_stream(self, stream: FakeStream) -> None:
        """Do nothing: operators of all streams run in the order of the calls."""

    wait_event = wait_stream

    def record(self, stream: FakeStream | None = None) -> None:
        """Do nothing: what an event would wait for has run already."""

    def record_event(self) -> FakeStream:
        """An event that has passed."""
        return self


class _CPUGenerator(torch.Generator):
    """A generator on the CPU, whichever device is asked for."""

    def __new__(cls, device: torch.device | str = "cpu") -> _CPUGenerator:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


class _Recorder(TorchDispatchMode):
    def __init__(self, record: LaunchRecord, mode: FakeTensorMode) -> None:
        super().__init__()
        self.record, self.mode = record, mode

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.overloadpacket.__name__, dict(kwargs or {})
        if not _is_on_gpu((args, kwargs)):
            return self._compute_on_cpu(func, args, kwargs)
        if torch.is_inference_mode_enabled() and _is_composite(func):
            with self:  # without autograd composite operators arrive here whole
                return func.decompose(*args, **kwargs)
        if name == "_local_scalar_dense":
            self.record.add_wait()
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if name == "nonzero":
            self.record.add_wait()
            return args[0].new_zeros(1, args[0].dim(), dtype=torch.int64)
        if name.startswith("index") and any(_is_mask(index) for index in tree_leaves(args[1:2])):
            self.record.add_wait()
            indices = [index.flatten()[:1].long() if _is_mask(index) else index for index in args[1]]
            args = (args[0], indices, *args[2:])
        if name in ("_to_copy", "copy_"):
            args, copy_on_cpu = self._record_transfer(name, args, kwargs)
            if copy_on_cpu is not None:
                return copy_on_cpu
        # Fake tensors of torch 2.11 have no product with an output dtype.
        output = kwargs["out"] if func is torch.ops.aten.addmm.dtype_out else func(*args, **kwargs)
        inputs, outputs = _tensors((args, kwargs)), _tensors(output)
        if not func.is_view and name not in WITHOUT_KERNELS and func.namespace != "prim":
            self.record.add(name, inputs, outputs)
        return output

    def _record_transfer(
        self, name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], Tensor | None]:
        """Record a copy between the CPU and the GPU. Returns arguments with a fake source, and the copy if it is on the
        CPU."""
        source, target = (args[0], None) if name == "_to_copy" else (args[1], args[0])
        is_asynchronous = bool(kwargs.get("non_blocking")) or True in args[2:]
        if not source.is_cuda:
            self._record_copy(source, is_asynchronous)
            source = self.mode.from_tensor(source)
            return ((source, *args[1:]) if target is None else (target, source, *args[2:])), None
        if target is not None and not target.is_cuda:
            self._record_copy(target, is_asynchronous)
            return args, self._compute_on_cpu(target.fill_, (1,), {})
        if target is None and torch.device(kwargs.get("device") or "cuda").type == "cpu":
            if source.dim() and source.numel():
                self.record.add_wait()
            dtype = kwargs.get("dtype", source.dtype)
            return args, self._compute_on_cpu(torch.ones, (source.shape,), {"dtype": dtype})
        return args, None

    def _compute_on_cpu(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        is_pinned = kwargs.get("pin_memory") and kwargs.pop("pin_memory")  # which would look for a GPU
        with unset_fake_temporarily():
            output = function(*args, **kwargs)
        return self.record.pin_memory(output) if is_pinned else output

    def _record_copy(self, cpu_tensor: Tensor, is_asynchronous: bool) -> None:
        """Record that the host waits for a copy, unless it is an asynchronous one of pinned memory."""
        is_pinned = self.record.is_pinned(cpu_tensor)
        if cpu_tensor.dim() and cpu_tensor.numel() and not (is_asynchronous and is_pinned):
            self.record.add_wait()


def _is_on_gpu(tree: Any) -> bool:
    return any(
        isinstance(leaf, FakeTensor) or (isinstance(leaf, torch.device) and leaf.type == "cuda")
        for leaf in tree_leaves(tree)
    )


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
    """Context in which tensors on ``cuda`` are fake, an H200 seems to be there, and launches are recorded.

    Stubs with the right shapes take the place of the loss kernel, which fake tensors cannot enter, and of fused
    attention and FlexAttention and their backward, which torch selects by the properties of a real GPU. Backward passes
    run every node of their graph.
    """
    record = LaunchRecord()
    stream = FakeStream(record)
    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        (torch.cuda, "get_device_name", lambda *_: "NVIDIA H200"),
        (torch.cuda, "stream", lambda _: contextlib.nullcontext()),
        (torch.cuda, "synchronize", record.synchronize),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch, "Generator", _CPUGenerator),
        *((torch.cuda, name, lambda *_, **__: stream) for name in ("Stream", "Event", "current_stream")),
        (torch.cuda, "cudart", lambda: record),
        (fake_tensor, "init_gpu_context", lambda *_: None),
        (nn.Module, "to", _move_module),
        (Tensor, "pin_memory", lambda tensor: record.pin_memory(tensor)),
        (Tensor, "record_stream", lambda tensor, _: None),
        (triton_setup, "find_triton_problem", lambda: None),
        (chunked_loss, "load_loss_backend", _load_fake_loss),
        (torch.nn.functional, FUSED_ATTENTION, record.attend),
        (flex, "_compiled_flex_attention", lambda: record.attend_flex),
    ]
    with contextlib.ExitStack() as stack:
        # First, before a GPU seems to be there: it would initialize CUDA.
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        for owner, name, function in replaced:
            stack.enter_context(patch.object(owner, name, function))
        stack.enter_context(python_backward())
        stack.enter_context(_Recorder(record, mode))
        yield record


@contextlib.contextmanager
def even_experts() -> Iterator[None]:
    """Context in which each expert computes as many tokens as the others: on a fake GPU the counts have no values."""
    from_experts = ExpertGroups.from_experts

    def group_evenly(experts_TK: Tensor, num_experts: int) -> ExpertGroups:
        groups = from_experts(experts_TK, num_experts)
        size, rest = divmod(experts_TK.numel(), num_experts)
        return replace(groups, counts=[size + (index < rest) for index in range(num_experts)])

    with patch.object(ExpertGroups, "from_experts", group_evenly):
        yield


def _move_module(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Take the place of `torch.nn.Module.to`, which cannot give a parameter fake values. Shared ones stay shared."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    moved: dict[Tensor, Tensor] = {}
    for part in module.modules():
        groups: list[dict[str, Any]] = [part._parameters, part._buffers]
        for tensors in groups:
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in moved:
                    values = tensor.detach().to(device, dtype if tensor.is_floating_point() else None)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    moved[tensor] = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
                tensors[name] = None if tensor is None else moved[tensor]
    return module


def _load_fake_loss(backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    assert backend == "triton", "a GPU uses the kernel"

    def compute_chunk_loss(logits_CV: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        nll_C = logits_CV.new_empty(len(logits_CV), dtype=torch.float32)
        return nll_C, nll_C

    return compute_chunk_loss
