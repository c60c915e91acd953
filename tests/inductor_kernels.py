"""Registers, spills, shared memory and atomics of the kernels that torch's compiler generates for a training step.

    python -m tests.inductor_kernels

The kernels are generated as in `tests.inductor_cuda`, for an H100, and compiled by Triton and its ptxas for sm_90. No
GPU is needed, and nothing is executed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from unittest.mock import patch

import torch

from benchmarking.harness import make_table
from diffusionlm.kernels.low_rank import dropout_mask
from diffusionlm.models import flex
from logger.pages.markdown import render_table
from tests.flex_kernels import (
    CASES_OF_ALL_GPUS,
    FLEX_CASES,
    SHARED_BYTES,
    TESTED_CASES,
    compile_flex,
    format_flex_table,
)
from tests.inductor_cuda import compile_source, lower, pretend_gpu
from tests.kernels.ahead_of_time import CompiledKernel
from tests.training_graphs import CASES, Graph, make_recorder, record_graphs

TARGET = "sm_90"
NUM_OUTPUTS = (256, 100)
"""Output positions of two steps, which share their graphs."""
ATOMICS = re.compile(r"^\s*(?:@\S+\s+)?(?:atom|red)\.(?!async)", re.MULTILINE)


@dataclass(frozen=True)
class BlockKernel:
    """A compiled kernel of a training step."""

    case: str
    """Of `tests.training_graphs.CASES`."""
    graph: str
    """``block`` or ``last block``, which computes the output positions only; forward or backward."""
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


GRAPHS = ("block, forward", "last block, forward", "last block, backward", "block, backward")
"""Graphs of two steps, in the order in which they are compiled."""


def compile_case(case: str) -> list[BlockKernel]:
    """Generate and compile the kernels of two training steps."""
    graphs = record_graphs(CASES[case], num_outputs=NUM_OUTPUTS, is_dynamic=True)
    kernels = []
    with pretend_gpu() as sources:
        for name, graph in zip(GRAPHS, graphs, strict=True):
            assert graph.is_backward == name.endswith("backward")
            sources.clear()
            lower(graph)
            for kernel_name, source in sources:
                kernel = compile_source(kernel_name, source, TARGET)
                kernels.append(
                    BlockKernel(
                        case,
                        name,
                        kernel_name,
                        kernel.num_threads,
                        kernel.registers,
                        kernel.shared_bytes,
                        kernel.spill_bytes,
                        ATOMICS.search(kernel.assembly) is not None,
                    )
                )
    return kernels


def compile_dropout_mask() -> list[CompiledKernel]:
    """Generate and compile the kernel of an adapter's dropout mask, whose hash has factors above 2^31."""
    graphs: list[Graph] = []
    compiled = torch.compile(dropout_mask, backend=make_recorder(graphs))
    compiled(torch.arange(6), torch.tensor(2**32 - 1), 128, 0.1)
    with pretend_gpu() as sources:
        for graph in graphs:
            lower(graph)
        return [compile_source(name, source, TARGET) for name, source in sources]


def format_table(kernels: Sequence[BlockKernel]) -> str:
    """A row for each graph: its own kernels, then that of attention."""
    rows = []
    for case, graph in dict.fromkeys((kernel.case, kernel.graph) for kernel in kernels):
        members = [kernel for kernel in kernels if (kernel.case, kernel.graph) == (case, graph)]
        own = [kernel for kernel in members if not kernel.is_attention]
        attention = next((kernel for kernel in members if kernel.is_attention), None)
        rows.append(
            [
                case,
                graph,
                str(len(own)),
                str(max(kernel.registers for kernel in own)),
                str(max(kernel.spill_bytes for kernel in own)),
                str(sum(kernel.has_atomics for kernel in own)),
                "SDPA" if attention is None else f"{attention.threads}",
                "" if attention is None else f"{attention.registers}",
                "" if attention is None else f"{attention.shared_bytes:,}",
                "" if attention is None else f"{attention.spill_bytes}",
            ]
        )
    header = ["step", "graph", "kernels", "registers at most", "spilled bytes", "kernels with atomics"]
    header += ["threads of attention", "its registers", "its shared bytes", "its spilled bytes"]
    return render_table(make_table(header, rows))


def main() -> None:
    """Print the tables, or as JSON the kernels and the number of graphs with activation checkpointing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON, with `TESTED_CASES` of FlexAttention alone")
    parser.add_argument("--default-options", action="store_true", help="FlexAttention with torch's options, not ours")
    arguments = parser.parse_args()
    if arguments.default_options:
        with patch.object(flex, "_choose_kernel_options", lambda *_: None):
            report(arguments)
    else:
        report(arguments)


def report(arguments: argparse.Namespace) -> None:
    """Compile all cases, and print them as the arguments say."""
    kernels = [kernel for case in CASES for kernel in compile_case(case)]
    if arguments.json:
        pairs = [(name, TARGET) for name in TESTED_CASES]
    else:
        pairs = [
            (name, target)
            for name in FLEX_CASES
            for target in (SHARED_BYTES if name in CASES_OF_ALL_GPUS else (TARGET,))
        ]
    flex_kernels = [kernel for name, target in pairs for kernel in compile_flex(name, target)]
    if arguments.json:
        case = CASES["block diffusion"]
        num_graphs = len(record_graphs(case, "full", NUM_OUTPUTS, is_dynamic=True))
        results = {
            "kernels": [asdict(kernel) for kernel in kernels],
            "flex_kernels": [asdict(kernel) for kernel in flex_kernels],
            "graphs_with_checkpointing": num_graphs,
            "spilled_bytes_of_dropout": [kernel.spill_bytes for kernel in compile_dropout_mask()],
        }
        print(json.dumps(results))
    else:
        print(format_table(kernels), format_flex_table(flex_kernels), sep="\n\n")


if __name__ == "__main__":
    main()
