"""The kernels that torch's compiler generates for the blocks of a training step on an H100, without a GPU.

    python -m tests.inductor_cuda

The blocks run on the CPU, where their graphs, forward and backward, are recorded; then each graph is moved to fake
tensors on ``cuda`` and lowered with the properties of an H100. Nothing is executed there, and nothing is measured.

It replaces private parts of torch, so it works with `TORCH_VERSION` alone. The parts stay replaced: run it in a process
of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from config.model import ModelConfig
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.models import attention
from diffusionlm.models.init import init_weights
from diffusionlm.models.patterns import Bidirectional
from diffusionlm.models.transformer import Transformer
from diffusionlm.training.block_wrapping import checkpoint_activations, compile_blocks

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
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "max_position_embeddings": 256,
    "qk_norm": True,
}
BATCH, LENGTH = 2, 256


@dataclass(frozen=True)
class Graph:
    """A graph that the compiler got, with its fake inputs."""

    is_backward: bool
    module: torch.fx.GraphModule
    inputs: Sequence[Any]


def record_graphs(checkpointing: str) -> list[Graph]:
    """Graphs of the blocks in a step of masked diffusion with bfloat16 autocast: two layers, the last at every second
    position."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    graphs: list[Graph] = []

    def record(is_backward: bool) -> Callable[..., Any]:
        def compile_graph(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            graphs.append(Graph(is_backward, module, inputs))
            return module.forward

        return compile_graph

    backend = aot_autograd(
        fw_compiler=record(False),
        bw_compiler=record(True),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    model = Transformer(ModelConfig.model_validate(SHAPE))
    init_weights(model, seed=0)
    compile_blocks(model, backend)
    checkpoint_activations(model, checkpointing)  # type: ignore[arg-type]
    positions = torch.arange(0, BATCH * LENGTH, 2)
    loss_inputs = LossInputs(torch.zeros_like(positions), torch.ones(len(positions)))
    tokens_BL = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    with (
        torch.autocast("cpu", torch.bfloat16),
        patch.object(attention, "attend_at_positions", _attend_at_all_positions),
        # Graphs of one number of positions: symbolic sizes cannot be moved to another device.
        patch.object(torch._dynamo, "maybe_mark_dynamic", lambda *_: None),
    ):
        output = model(tokens_BL, pattern=Bidirectional(), output_positions=positions, loss_inputs=loss_inputs)
        output.loss_sum.backward()
    return graphs


def _attend_at_all_positions(
    attend: attention.PreparedAttention, q_PNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, positions: Tensor
) -> Tensor:
    """`attend_at_positions` as on a GPU: queries of all positions, whose number the host knows."""
    B, L = k_BSKH.shape[:2]
    q_BQNH = q_PNH.new_zeros(B * L, *q_PNH.shape[1:]).index_copy_(0, positions, q_PNH).unflatten(0, (B, L))
    return attend(q_BQNH, k_BSKH, v_BSKH).flatten(0, 1)[positions]


@contextlib.contextmanager
def pretend_h100() -> Iterator[list[tuple[str, str]]]:
    """Let torch's compiler find an H100; name and source of each kernel are collected, and not compiled."""
    import torch._inductor.scheduler as scheduler
    import torch.utils._triton as triton_support
    import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from torch._dynamo import device_interface
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped,import-not-found,unused-ignore]

    kernels: list[tuple[str, str]] = []

    def collect(self: Any, kernel_name: str, source_code: str, device_str: str = "cuda", **_: Any) -> Any:
        kernels.append((kernel_name, source_code))
        return SimpleNamespace(run=lambda *args, **options: None)

    facts: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: H100,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: H100.name,
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": lambda device=None: None,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "device": lambda *args: contextlib.nullcontext(),
    }
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_device_interface=lambda: torch.cuda,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    triton.runtime.driver.set_active(driver)
    device_interface.caching_worker_device_properties["cuda"] = [H100]
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
        stack.enter_context(config.patch(compile_threads=1, fx_graph_cache=False))
        yield kernels


def lower(graph: Graph) -> None:
    """Lower a graph with its inputs on ``cuda``; inside of `pretend_h100`."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    modes = [value.fake_mode for value in graph.inputs if isinstance(value, FakeTensor)]
    mode = modes[0] if modes else FakeTensorMode()
    with patch.object(type(mode), "avoid_device_init", True):
        with mode:
            inputs = [
                torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
                if isinstance(value, Tensor)
                else value
                for value in graph.inputs
            ]
        for node in graph.module.graph.nodes:
            if "device" in node.kwargs:
                node.update_kwarg("device", torch.device("cuda", 0))
        graph.module.recompile()
        FakeTensorProp(graph.module, mode=mode).propagate_dont_convert_inputs(*inputs)
        with tracing(TracingContext(mode)), V.set_fake_mode(mode):
            compile_fx_inner(graph.module, inputs, is_backward=graph.is_backward, static_input_idxs=[])


def main() -> None:
    """Print as JSON the kernels of each graph of a step with their atomics, and the number of graphs of a step with
    checkpointing."""
    records = []
    graphs = record_graphs("none")
    with pretend_h100() as kernels:
        for graph in graphs:
            kernels.clear()
            lower(graph)
            atomics = [name for name, source in kernels if "tl.atomic" in source]
            names = [name for name, _ in kernels]
            records.append({"is_backward": graph.is_backward, "kernels": names, "atomics": atomics})
    torch._dynamo.reset()
    print(json.dumps({"graphs": records, "graphs_with_checkpointing": len(record_graphs("full"))}))


if __name__ == "__main__":
    main()
