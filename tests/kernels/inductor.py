"""The kernels that torch's compiler generates for the blocks of a training step on an H100, without a GPU.

Graphs of `tests.training_graphs`, recorded on the CPU, are moved to fake tensors on ``cuda`` and lowered with the
properties of an H100. Nothing is executed there, and nothing is measured.

It replaces private parts of torch, so it works with `TORCH_VERSION` alone. The parts stay replaced: run it in a process
of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tests.kernels.ahead_of_time import LAUNCH_OPTIONS, CompiledKernel, KernelLaunch, compile_launch
from tests.training_graphs import Graph

TORCH_VERSION = "2.15"
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 << 30,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    L2_cache_size=50 << 20,
    gcnArchName="",
    is_integrated=False,
    clock_rate=1_980_000,
    memory_clock_rate=2_619_000,
    memory_bus_width=5120,
)


@contextlib.contextmanager
def pretend_gpu(capability: tuple[int, int] = (9, 0)) -> Iterator[list[tuple[str, str]]]:
    """Let torch's compiler find an H100; name and source of each kernel are collected in place of its compilation.

    Args:
        capability: of another GPU, for which torch has other tiles; the other properties remain.
    """
    import torch._inductor.scheduler as scheduler
    import torch.utils._triton as triton_support
    import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from torch._dynamo import device_interface
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped,import-not-found,unused-ignore]

    kernels: list[tuple[str, str]] = []
    properties = SimpleNamespace(**{**vars(H100), "major": capability[0], "minor": capability[1]})

    def collect(self: Any, kernel_name: str, source_code: str, device_str: str = "cuda", **_: Any) -> Any:
        kernels.append((kernel_name, source_code))
        return SimpleNamespace(run=lambda *args, **options: None)

    facts: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: H100.name,
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": lambda device=None: None,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "device": lambda *args: contextlib.nullcontext(),
    }
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * capability[0] + capability[1], 32),
        get_current_device=lambda: 0,
        get_device_interface=lambda: torch.cuda,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    triton.runtime.driver.set_active(driver)
    device_interface.caching_worker_device_properties["cuda"] = [properties]
    device_interface.caching_worker_current_devices["cuda"] = 0
    interface = device_interface.CudaInterface
    with contextlib.ExitStack() as stack:
        for name, value in facts.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
            public = {"_exchange_device": "exchange_device", "_maybe_exchange_device": "maybe_exchange_device"}
            if hasattr(interface, public.get(name, name)):
                stack.enter_context(patch.object(interface, public.get(name, name), staticmethod(value)))
        stack.enter_context(patch.object(interface, "get_multi_processor_count", staticmethod(lambda device=None: 132)))
        for owner in (scheduler, triton_support):
            stack.enter_context(patch.object(owner, "has_triton", lambda *args, **options: True))
        for name, number in {"_cuda_getCurrentRawStream": 0, "_cuda_getDevice": 0, "_cuda_getDeviceCount": 1}.items():
            stack.enter_context(patch.object(torch._C, name, lambda *args, number=number: number, create=True))
        for module in (torch.cuda, torch.cuda.random):
            stack.enter_context(patch.object(module, "get_rng_state", lambda device="cuda": torch.zeros(16).byte()))
            stack.enter_context(patch.object(module, "set_rng_state", lambda state, device="cuda": None))
        stack.enter_context(patch.object(AsyncCompile, "triton", collect))
        stack.enter_context(patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        stack.enter_context(config.patch(compile_threads=1, fx_graph_cache=False))
        yield kernels


def lower(graph: Graph) -> None:
    """Lower a graph with its inputs on ``cuda``; inside of `pretend_gpu`."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    modes = [value.fake_mode for value in graph.inputs if isinstance(value, FakeTensor)]
    mode = modes[0] if modes else FakeTensorMode()

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        with mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

    with patch.object(type(mode), "avoid_device_init", True):
        inputs = [move(value) for value in graph.inputs]
        for module in graph.module.modules():
            if not isinstance(module, torch.fx.GraphModule):
                continue
            for node in module.graph.nodes:
                if "device" in node.kwargs:
                    node.update_kwarg("device", torch.device("cuda", 0))
                if module is not graph.module:  # of FlexAttention: the propagation below does not enter it
                    node.meta["val"] = tree_map(move, node.meta.get("val"))
            module.recompile()
        FakeTensorProp(graph.module, mode=mode).propagate_dont_convert_inputs(*inputs)
        with tracing(TracingContext(mode)), V.set_fake_mode(mode):
            compile_fx_inner(graph.module, inputs, is_backward=graph.is_backward, static_input_idxs=[])


def compile_source(name: str, source: str, target: str) -> CompiledKernel:
    """Compile a generated module in its first configuration; inside of `pretend_gpu`."""
    from torch._inductor.codecache import PyCodeCache

    tuner: Any = getattr(PyCodeCache.load(source), name)
    config, meta = tuner.configs[0], tuner.triton_meta
    constants = {**meta["constants"], **config.kwargs}
    signature = {key: "constexpr" if key in constants else meta["signature"][key] for key in tuner.fn.arg_names}
    constants = {key: value for key, value in constants.items() if key in signature}
    aligned = tuple(tuner.fn.arg_names[index] for (index,) in meta["configs"][0])
    options = {key: getattr(config, key) for key in LAUNCH_OPTIONS if getattr(config, key, None) is not None}
    return compile_launch(KernelLaunch(tuner.fn, signature, constants, aligned, options), target)
