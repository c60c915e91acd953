"""Compile Triton kernels for GPUs that this machine does not have, from the launches that the project's own code makes.

A launch is recorded instead of executed: its arguments decide, as in a real launch, which variant Triton compiles
(dtypes, constants, integers and addresses that are multiples of 16).

Tried with Triton 3.5 to 3.9, whose `triton.compile` takes a target and whose package contains ptxas.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

ALIGNMENT = 16
"""Triton compiles separate variants for addresses and integers that are multiples of it."""
AMD_TARGETS = ("gfx942",)
TARGETS = ("sm_80", "sm_90", "sm_100", *AMD_TARGETS)
"""A100; H100 and H200; B200; MI300."""
LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
TYPE_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.bool: "u1",
}


@dataclass(frozen=True)
class KernelLaunch:
    """A call of a kernel: what Triton's compiler depends on."""

    kernel: Any
    """The function that ``triton.jit`` returned."""
    signature: Mapping[str, str]
    """Parameter -> Triton's type, ``constexpr`` for constants."""
    constants: Mapping[str, Any]
    aligned: tuple[str, ...]
    """Parameters that are multiples of `ALIGNMENT`."""
    options: Mapping[str, int]
    """`LAUNCH_OPTIONS` of the call."""


def read_launch(kernel: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> KernelLaunch:
    """The launch ``kernel[...](*args, **options)``; arguments are specialized as Triton's launcher does."""
    bound = inspect.signature(kernel.fn).bind(*args, **{k: v for k, v in options.items() if k not in LAUNCH_OPTIONS})
    bound.apply_defaults()
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned = []
    for parameter in kernel.params:
        value = bound.arguments[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = _type_of(value)
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if type(number) is int and number % ALIGNMENT == 0:
            aligned.append(parameter.name)
    chosen = {name: options[name] for name in LAUNCH_OPTIONS if name in options}
    return KernelLaunch(kernel, signature, constants, tuple(aligned), chosen)


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{TYPE_NAMES[value.dtype]}"
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"{type(value).__name__} is no argument of a Triton kernel")


class _LaunchRecorder:
    """Takes the place of a kernel: ``recorder[grid](...)`` records a launch and computes nothing."""

    def __init__(self, kernel: Any, launches: list[KernelLaunch]) -> None:
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.launches.append(read_launch(self.kernel, args, options))

        return launch


@contextmanager
def record_launches(module: str, kernel: str) -> Iterator[list[KernelLaunch]]:
    """Record the launches of one kernel of a module; the list grows while the context is open."""
    original = getattr(importlib.import_module(module), kernel)
    launches: list[KernelLaunch] = []
    with patch(f"{module}.{kernel}", _LaunchRecorder(original, launches)):
        yield launches


@dataclass(frozen=True)
class CompiledKernel:
    """What the assembler says of a kernel for one target."""

    target: str
    num_threads: int
    """Threads of a program."""
    registers: int
    """Registers of a thread, 32 bits each."""
    shared_bytes: int
    spill_bytes: int
    """Bytes of registers of a thread that are kept in memory; written and read again, they are counted once."""
    assembly: str
    """PTX, or AMD's assembly."""


def compile_launch(launch: KernelLaunch, target: str) -> CompiledKernel:
    """Compile the variant of a launch for one of `TARGETS`."""
    import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from triton.compiler import ASTSource  # type: ignore[import-untyped,import-not-found,unused-ignore]

    is_amd = target in AMD_TARGETS
    names = list(launch.signature)
    attributes = {(names.index(name),): [["tt.divisibility", ALIGNMENT]] for name in launch.aligned}
    source = ASTSource(launch.kernel, dict(launch.signature), dict(launch.constants), attributes)
    gpu = GPUTarget("hip", target, 64) if is_amd else GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    compiled = triton.compile(source, target=gpu, options=dict(launch.options))
    num_threads = compiled.metadata.num_warps * gpu.warp_size
    if is_amd:
        assembly = compiled.asm["amdgcn"]
        registers, *spilled = (
            _read_number(rf"\.{name}:\s+(\d+)", assembly)
            for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
        )
        spill_bytes = 4 * sum(spilled)
    else:
        assembly = compiled.asm["ptx"]
        registers, spill_bytes = parse_ptxas_log(_assemble(assembly, target))
    return CompiledKernel(target, num_threads, registers, compiled.metadata.shared, spill_bytes, assembly)


def _assemble(ptx: str, target: str) -> str:
    """What ptxas says of a kernel. Triton has two versions of it, of which the newer one compiles for newer targets."""
    folder = Path(importlib.import_module("triton").__file__ or "").parent / "backends" / "nvidia" / "bin"
    names = ("ptxas", "ptxas-blackwell") if target == "sm_80" else ("ptxas-blackwell", "ptxas")
    version = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    assert version is not None, "PTX without a target"
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "kernel.ptx"
        path.write_text(ptx, encoding="utf-8")
        for name in [name for name in names if (folder / name).exists()]:
            command = [str(folder / name), "--verbose", "--gpu-name", version[1], str(path), "-o", os.devnull]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode == 0:
                return result.stderr
    raise ValueError(f"ptxas cannot compile a kernel for {target}: {result.stderr.strip()}")


def parse_ptxas_log(log: str) -> tuple[int, int]:
    """Registers per thread and spilled bytes, from the output of ``ptxas --verbose``.

    Spilled bytes are the greater of stores and loads.
    """
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert spills is not None, log
    return _read_number(r"Used (\d+) registers", log), max(int(spills[1]), int(spills[2]))


def _read_number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match is not None, f"{pattern} is not in the compiler's output"
    return int(match[1])
