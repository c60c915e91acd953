"""Registers, spills, shared memory and atomics of the kernels that torch's compiler generates for GPUs.

They are those of the blocks of a training step on an H100, and of FlexAttention alone, for widths, dtypes and masks
that no block here has.

    python -m tests.kernels.inductor_kernels        # a line of JSON for each kernel

The kernels are generated as in `tests.kernels.inductor` and compiled by Triton and its ptxas. No GPU is needed, and
nothing is executed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from diffusionlm.kernels.low_rank import dropout_mask
from diffusionlm.models.dense_attention import AttentionScale
from diffusionlm.models.flex import attend_flex, build_block_mask
from diffusionlm.models.patterns import AttentionPattern, BlockDiffusion, Causal
from tests.kernels.inductor import compile_source, lower, pretend_gpu
from tests.training_graphs import (
    BATCH,
    CASES,
    DOCUMENTS,
    LENGTH,
    SEGMENTS,
    Graph,
    flex_as_on_a_gpu,
    make_recorder,
    record_graphs,
)

HOPPER = "sm_90"
SHARED_BYTES = {"sm_80": 163 << 10, HOPPER: 227 << 10, "sm_100": 227 << 10}
"""Shared memory that a program may have: a kernel with more cannot be launched. A100, H100 and H200, B200."""
NUM_OUTPUTS = (256, 100)
"""Output positions of two steps, which share their graphs."""
GRAPHS = ("block, forward", "last block, forward", "last block, backward", "block, backward")
"""Graphs of two steps, in the order in which they are compiled; the last block computes the output positions only."""
ATOMICS = re.compile(r"^\s*(?:@\S+\s+)?(?:atom|red)\.(?!async)", re.MULTILINE)
DROPOUT = "dropout of adapters"
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


FLEX_CASES = {
    "width 256, soft cap, window": FlexCase(256, pattern=Causal(DOCUMENTS), softcap=50.0, window=128),
    "width 64, float32": FlexCase(64, torch.float32),
    "width 128, float32": FlexCase(128, torch.float32),
    "width 256, float32": FlexCase(256, torch.float32),
}
TESTED_CASES = ("width 256, soft cap, window", "width 128, float32")
"""Cases that the slow test compiles, for an H100; the command compiles all."""


@dataclass(frozen=True)
class GraphKernel:
    """A compiled kernel of a graph."""

    case: str
    """Of `CASES` or `FLEX_CASES`, or `DROPOUT`."""
    graph: str
    """Of `GRAPHS`; ``forward`` or ``backward`` of the others."""
    target: str
    name: str
    threads: int
    registers: int
    shared_bytes: int
    spill_bytes: int
    has_atomics: bool

    @property
    def is_attention(self) -> bool:
        """True for a kernel of FlexAttention, from a template of torch."""
        return self.name.startswith("triton_tem")


def compile_graphs(case: str, graphs: Mapping[str, Graph], target: str) -> list[GraphKernel]:
    """Generate and compile the kernels of graphs for one of `SHARED_BYTES`."""
    major, minor = divmod(int(target.removeprefix("sm_")), 10)
    kernels = []
    with pretend_gpu((major, minor)) as sources:
        for graph_name, graph in graphs.items():
            assert graph.is_backward == graph_name.endswith("backward")
            sources.clear()
            lower(graph)
            for name, source in sources:
                compiled = compile_source(name, source, target)
                numbers = (compiled.num_threads, compiled.registers, compiled.shared_bytes, compiled.spill_bytes)
                has_atomics = ATOMICS.search(compiled.assembly) is not None
                kernels.append(GraphKernel(case, graph_name, target, name, *numbers, has_atomics))
    return kernels


def compile_blocks(case: str) -> list[GraphKernel]:
    """The kernels of two training steps on an H100."""
    graphs = record_graphs(CASES[case], num_outputs=NUM_OUTPUTS, is_dynamic=True)
    return compile_graphs(case, dict(zip(GRAPHS, graphs, strict=True)), HOPPER)


def compile_flex(name: str, target: str) -> list[GraphKernel]:
    """The forward and the backward of the attention of a case."""
    graphs = record_flex(FLEX_CASES[name], is_on_hopper=target == HOPPER)
    by_direction = {"backward" if graph.is_backward else "forward": graph for graph in graphs}
    return [kernel for kernel in compile_graphs(name, by_direction, target) if kernel.is_attention]


def record_flex(case: FlexCase, *, is_on_hopper: bool) -> list[Graph]:
    """Graphs of the attention of a case."""
    graphs: list[Graph] = []
    length = LENGTH * case.pattern.positions_per_token
    intervals = case.pattern.intervals(length, window=case.window)
    assert intervals is not None
    q, k, v = (
        torch.zeros(BATCH, length, heads, case.head_dim, dtype=case.dtype, requires_grad=True)
        for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS)
    )
    torch._dynamo.reset()
    with flex_as_on_a_gpu():
        attend = torch.compile(attend_flex, backend=make_recorder(graphs))
        scale = AttentionScale(softcap=case.softcap)
        attend(q, k, v, build_block_mask(intervals, length, length), scale, is_on_hopper=is_on_hopper).sum().backward()
    return graphs


def compile_dropout_mask() -> list[GraphKernel]:
    """The mask of an adapter's dropout, whose hash has factors above 2^31."""
    graphs: list[Graph] = []
    compiled = torch.compile(dropout_mask, backend=make_recorder(graphs))
    compiled(torch.arange(6), torch.tensor(2**32 - 1), 128, 0.1)
    [graph] = graphs
    return compile_graphs(DROPOUT, {"forward": graph}, HOPPER)


def main() -> None:
    """Compile all cases, and print their kernels."""
    parser = argparse.ArgumentParser(description="Compile the kernels of torch's compiler for GPUs that are not here.")
    parser.add_argument("--tested", action="store_true", help="of FlexAttention alone only the cases of the test")
    if parser.parse_args().tested:
        flex = [(name, HOPPER) for name in TESTED_CASES]
    else:
        flex = list(itertools.product(FLEX_CASES, SHARED_BYTES))
    blocks = (kernel for case in CASES for kernel in compile_blocks(case))
    attention = (kernel for name, target in flex for kernel in compile_flex(name, target))
    for kernel in itertools.chain(blocks, attention, compile_dropout_mask()):
        print(json.dumps(asdict(kernel)), flush=True)


if __name__ == "__main__":
    main()
