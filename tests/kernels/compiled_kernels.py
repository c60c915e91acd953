"""Registers, shared memory and spills of the project's Triton kernels on GPUs, without a GPU.

    python -m tests.kernels.compiled_kernels        # a line of JSON for each kernel

Each variant that can run is compiled ahead of time, and held to budgets: see `find_violations`. Nothing is executed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from unittest.mock import patch

import torch

from diffusionlm.kernels.loss_types import LossOptions
from tests.kernels.ahead_of_time import (
    AMD_TARGETS,
    TARGETS,
    CompiledKernel,
    KernelLaunch,
    compile_launch,
    record_launches,
)

LOSS_MODULE, LOSS_KERNEL = "diffusionlm.kernels.triton_cross_entropy", "_loss_kernel"
KERNELS = ((LOSS_MODULE, LOSS_KERNEL),)
"""Module and name of every Triton kernel of the project that is launched."""
VOCABULARIES = (1000, 4095, 4096, 8191, 8192, 16383, 16384, 50257, 151936)
"""A vocabulary of each class: every size of block, in one pass or two, a multiple of 16 or not. Other vocabularies run
one of these variants."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MAX_THREADS = 1024
"""Threads of a program that every GPU can launch."""
MAX_SHARED_BYTES = 1 << 10
"""Budget: the reductions over a row exchange a few words per warp."""
REGISTER_FILE = 65536
NARROW_ARITHMETIC = re.compile(
    r"^\s*(?:@\S+\s+)?((?:add|sub|mul|fma|max|min|ex2|tanh)\.\S*(?:f16|bf16)\S*)", re.MULTILINE
)
ATOMICS = re.compile(r"^\s*(?:@\S+\s+)?((?:atom|red)\.\S+)", re.MULTILINE)
VECTOR_LOADS = re.compile(r"\bld\.global\.(?:\w+::\w+\.)*v(\d)\.[bfus](\d+)")


@dataclass(frozen=True)
class KernelVariant:
    """A variant of the loss kernel and the launch that compiles to it."""

    vocabulary: int
    dtype: str
    has_cap: bool
    needs_grad: bool
    launch: KernelLaunch
    amd_launch: KernelLaunch
    """The launch on a GPU with warps of 64 threads."""

    def __str__(self) -> str:
        options = f"{', soft cap' if self.has_cap else ''}{', gradient' if self.needs_grad else ''}"
        return f"{LOSS_KERNEL} of {self.vocabulary} logits in {self.dtype}{options}"


def list_variants(vocabularies: Sequence[int], dtypes: Sequence[str]) -> list[KernelVariant]:
    """The variants of the loss kernel, from launches of the code that trains and validates."""
    from diffusionlm.kernels.triton_cross_entropy import compute_chunk_loss

    variants = []
    for vocabulary, dtype, has_cap, needs_grad in itertools.product(vocabularies, dtypes, (False, True), (False, True)):
        options = LossOptions(vocabulary - 1, 0.1, 0.1, 30.0 if has_cap else None, DTYPES[dtype], "triton")
        logits_CV = torch.empty(2, vocabulary, dtype=DTYPES[dtype])
        with record_launches(LOSS_MODULE, LOSS_KERNEL) as launches:
            for warp_size in (32, 64):
                with patch(f"{LOSS_MODULE}.WARP_SIZE", warp_size):
                    compute_chunk_loss(logits_CV, torch.zeros(2, dtype=torch.int64), torch.ones(2), options, needs_grad)
        variants.append(KernelVariant(vocabulary, dtype, has_cap, needs_grad, *launches))
    return variants


def compile_variant(variant: KernelVariant, target: str) -> CompiledKernel:
    return compile_launch(variant.amd_launch if target in AMD_TARGETS else variant.launch, target)


def find_violations(variant: KernelVariant, compiled: CompiledKernel) -> list[str]:
    """Budgets that a compiled kernel exceeds, one sentence each.

    Registers do not spill. A program can be launched: at most `MAX_THREADS` threads, whose registers the register file
    holds. Of NVIDIA's targets: arithmetic is fp32, there are no atomics, and rows of aligned logits are read by 16
    bytes per thread and load.
    """
    violations = []
    if compiled.spill_bytes:
        violations.append(f"{compiled.spill_bytes} bytes of registers per thread are spilled")
    if compiled.num_threads > MAX_THREADS:
        violations.append(f"a program has {compiled.num_threads} threads, more than {MAX_THREADS}")
    if compiled.shared_bytes > MAX_SHARED_BYTES:
        violations.append(f"{compiled.shared_bytes} bytes of shared memory, more than {MAX_SHARED_BYTES}")
    if compiled.target not in AMD_TARGETS:
        if compiled.registers * compiled.num_threads > REGISTER_FILE:
            violations.append(f"{compiled.registers} registers of {compiled.num_threads} threads exceed the file")
        violations += [f"{name} is not fp32" for name in sorted(set(NARROW_ARITHMETIC.findall(compiled.assembly)))]
        violations += [f"{name} is an atomic" for name in sorted(set(ATOMICS.findall(compiled.assembly)))]
        width = widest_vector_load(compiled.assembly)
        if "logits" in variant.launch.aligned and "vocab" in variant.launch.aligned and width < 16:
            violations.append(f"logits are read by {width} bytes at a time, not 16")
    return [f"{variant}, {compiled.target}: {violation}" for violation in violations]


def widest_vector_load(ptx: str) -> int:
    """Bytes of the widest load of several values at once from global memory; 0: there is none."""
    return max((int(count) * int(bits) // 8 for count, bits in VECTOR_LOADS.findall(ptx)), default=0)


def compile_variants(vocabularies: Sequence[int], dtypes: Sequence[str], targets: Sequence[str]) -> Iterator[str]:
    """Compile the selected variants; yields JSON of each for each target.

    Raises:
        ValueError: kernels exceed a budget.
    """
    violations = []
    for variant, target in itertools.product(list_variants(vocabularies, dtypes), targets):
        compiled = compile_variant(variant, target)
        violations += find_violations(variant, compiled)
        values = asdict(compiled) | {"kernel": str(variant), "load_bytes": widest_vector_load(compiled.assembly)}
        yield json.dumps({name: value for name, value in values.items() if name != "assembly"})
    if violations:
        raise ValueError("kernels exceed their budgets:\n" + "\n".join(violations))


def main() -> None:
    """Print the selected variants."""
    parser = argparse.ArgumentParser(description="Compile the Triton kernels for GPUs that are not here.")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES, help="default: all classes")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="of logits (default: all)")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS, help="GPUs (default: all)")
    try:
        for line in compile_variants(**vars(parser.parse_args())):
            print(line, flush=True)
    except ValueError as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
