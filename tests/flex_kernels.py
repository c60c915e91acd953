"""FlexAttention's kernels alone, for head widths, dtypes and masks that no model of `tests.training_graphs` has.

They are generated and compiled as those, for an H100 or for another GPU, for which torch has other tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarking.harness import make_table
from diffusionlm.models.dense_attention import AttentionScale
from diffusionlm.models.flex import attend_flex, build_block_mask
from diffusionlm.models.patterns import AttentionPattern, BlockDiffusion, Causal
from logger.pages.markdown import render_table
from tests.inductor_cuda import compile_source, lower, pretend_gpu
from tests.kernels.ahead_of_time import CompiledKernel
from tests.training_graphs import BATCH, DOCUMENTS, LENGTH, SEGMENTS, Graph, flex_as_on_a_gpu, make_recorder

SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}
"""Shared memory that a program may have: a kernel with more cannot be launched. A100, H100 and H200, B200."""
QUERY_HEADS, KEY_HEADS = 4, 2
TWO_STREAMS = BlockDiffusion(16, DOCUMENTS, SEGMENTS)


@dataclass(frozen=True)
class FlexCase:
    """What decides the kernels of a model's FlexAttention: head width, dtype, pattern and soft cap."""

    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    pattern: AttentionPattern = TWO_STREAMS
    softcap: float | None = None
    window: int | None = None
    has_gradients: bool = True
    """False: a validation or a sample."""


FLEX_CASES = {
    "width 32": FlexCase(32),
    "width 64, no gradients": FlexCase(64, has_gradients=False),
    "width 128": FlexCase(128),
    "width 128, no gradients": FlexCase(128, has_gradients=False),
    "width 256": FlexCase(256),
    "width 256, soft cap, window": FlexCase(256, pattern=Causal(DOCUMENTS), softcap=50.0, window=128),
    "width 64, float32": FlexCase(64, torch.float32),
    "width 128, float32": FlexCase(128, torch.float32),
    "width 256, float32": FlexCase(256, torch.float32),
}
TESTED_CASES = ("width 256, soft cap, window", "width 128, float32")
"""Cases that the slow test compiles, for sm_90; the command compiles all."""
CASES_OF_ALL_GPUS = (
    "width 64, no gradients",
    "width 256, soft cap, window",
    "width 64, float32",
    "width 128, float32",
    "width 256, float32",
)
"""Cases with options for any GPU: they must fit into the shared memory of each of `SHARED_BYTES`."""


@dataclass(frozen=True)
class FlexKernel:
    """A compiled kernel of FlexAttention."""

    case: str
    """Of `FLEX_CASES`."""
    direction: str
    """``forward`` or ``backward``."""
    target: str
    threads: int
    registers: int
    shared_bytes: int
    spill_bytes: int


def compile_flex(name: str, target: str) -> list[FlexKernel]:
    """Generate and compile the kernels of a case for one of `SHARED_BYTES`: the forward and, with gradients, the
    backward."""
    major, minor = divmod(int(target.removeprefix("sm_")), 10)
    graphs = record_flex(FLEX_CASES[name], is_on_hopper=target == "sm_90")
    kernels = []
    with pretend_gpu((major, minor)) as sources:
        for graph in graphs:
            sources.clear()
            lower(graph)
            attention = [compile_source(*kernel, target) for kernel in sources if kernel[0].startswith("triton_tem")]
            kernels += [_describe(name, graph, kernel) for kernel in attention]
    return kernels


def _describe(name: str, graph: Graph, kernel: CompiledKernel) -> FlexKernel:
    direction = "backward" if graph.is_backward else "forward"
    return FlexKernel(
        name,
        direction,
        kernel.target,
        kernel.num_threads,
        kernel.registers,
        kernel.shared_bytes,
        kernel.spill_bytes,
    )


def record_flex(case: FlexCase, *, is_on_hopper: bool) -> list[Graph]:
    """Graphs of the attention of a case."""
    graphs: list[Graph] = []
    length = LENGTH * case.pattern.positions_per_token
    intervals = case.pattern.intervals(length, window=case.window)
    assert intervals is not None
    q, k, v = (
        torch.zeros(BATCH, length, heads, case.head_dim, dtype=case.dtype, requires_grad=case.has_gradients)
        for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS)
    )
    torch._dynamo.reset()
    with flex_as_on_a_gpu(), torch.set_grad_enabled(case.has_gradients):
        attend = torch.compile(attend_flex, backend=make_recorder(graphs))
        scale = AttentionScale(softcap=case.softcap)
        out = attend(q, k, v, build_block_mask(intervals, length), scale, is_on_hopper=is_on_hopper)
        if case.has_gradients:
            out.sum().backward()
    return graphs


def format_flex_table(kernels: Sequence[FlexKernel]) -> str:
    """A row for each kernel."""
    header = ["attention", "direction", "target", "threads", "registers", "shared bytes", "spilled bytes"]
    rows = [[kernel.case, kernel.direction, kernel.target] for kernel in kernels]
    for row, kernel in zip(rows, kernels, strict=True):
        numbers = (kernel.threads, kernel.registers, kernel.shared_bytes, kernel.spill_bytes)
        row += [f"{number:,}" for number in numbers]
    return render_table(make_table(header, rows))
