"""Kernels compiled ahead of time for GPUs: their variants, their budgets, and what is read from the compilers."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels import ahead_of_time, compiled_kernels
from tests.kernels.accelerators import A100, H100, occupancy
from tests.kernels.ahead_of_time import CompiledKernel, KernelLaunch, parse_ptxas_log, read_launch
from tests.kernels.compiled_kernels import KernelVariant, find_violations, widest_vector_load

ROOT = Path(__file__).parents[2]
PTX = """
    @%p1 ld.global.L1::evict_last.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    ld.global.b16 { %rs1 }, [ %rd2 + 0 ];
    fma.rn.f32 %f1, %f2, %f3, %f4;
    cvt.rn.bf16x2.f32 %r9, %f1, %f2;
"""
LAUNCH = KernelLaunch(None, {"logits": "*bf16", "vocab": "i32"}, {}, ("logits", "vocab"), {"num_warps": 32}, 2)
VARIANT = KernelVariant(16384, "bfloat16", False, True, LAUNCH, LAUNCH)
COMPILED = CompiledKernel("sm_90", 1024, 64, 128, 0, PTX)


def compile_kernels(*arguments: str) -> list[list[str]]:
    """Cells of the table that the command prints, in a process where Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        problem = ahead_of_time.find_compiler_problem()
    if problem is not None:
        pytest.skip(problem)
    command = [sys.executable, "-m", "tests.kernels.compiled_kernels", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=280)
    assert result.returncode == 0, result.stderr
    return [line.split(" | ") for line in result.stdout.splitlines() if line.startswith("| ") and line[2].isdigit()]


def test_a_kernel_is_compiled_for_an_h100_without_spills() -> None:
    rows = compile_kernels("--dtypes", "bfloat16", "--vocabularies", "16384", "--targets", "sm_90")
    assert [row[2:5] for row in rows] == [[cap, grad, "1024"] for cap in ("no", "yes") for grad in ("no", "yes")]
    for row in rows:
        registers, spilled, load = int(row[5]), row[7], row[8]
        assert 16 <= registers <= 64 and spilled == "0" and load == "8"


@pytest.mark.slow
def test_crowded_variants_are_compiled_for_all_kinds_of_gpus() -> None:
    """Where registers are scarce: fp32, a soft cap, and rows that are not aligned; two passes."""
    vocabularies = ("16384", "50257", "151936")
    targets = ("sm_90", "sm_100", "gfx942")
    rows = compile_kernels(
        "--dtypes", "float32", "bfloat16", "--vocabularies", *vocabularies, "--targets", *targets
    )  # fmt: skip
    assert len(rows) == len(vocabularies) * 2 * 4
    assert {row[7] for row in rows} == {"0"}
    assert all(len(row[5].split(" / ")) == len(targets) for row in rows)


def test_every_kernel_that_is_launched_is_in_the_table() -> None:
    launched = set()
    for path in (ROOT / "diffusionlm").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kernels = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and "triton.jit" in {ast.unparse(each) for each in node.decorator_list}
        }
        called = {
            ast.unparse(node.func.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
        }
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        launched |= {(module, name) for name in kernels & called}
    assert launched == set(compiled_kernels.KERNELS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"spill_bytes": 48}, "48 bytes of registers"),
        ({"num_threads": 2048, "registers": 32}, "2048 threads"),
        ({"shared_bytes": 4096}, "4096 bytes of shared memory"),
        ({"registers": 72}, "72 registers"),
        ({"assembly": PTX + "fma.rn.bf16x2 %r1, %r2, %r3, %r4;"}, "fma.rn.bf16x2 is not fp32"),
        ({"assembly": PTX + "@%p1 add.f16 %rs1, %rs2, %rs3;"}, "add.f16 is not fp32"),
        ({"assembly": PTX + "@%p2 red.global.add.f32 [%rd1], %f1;"}, "is an atomic"),
        ({"assembly": PTX + "atom.global.add.u32 %r1, [%rd1], 1;"}, "is an atomic"),
        ({"assembly": "ld.global.b16 { %rs1 }, [ %rd2 + 0 ];"}, "read by 0 bytes at a time"),
    ],
)
def test_budgets(change: dict[str, Any], message: str | None) -> None:
    violations = find_violations(VARIANT, replace(COMPILED, **change))
    assert len(violations) == (message is not None)
    if message is not None:
        assert message in violations[0] and "sm_90" in violations[0] and "16384 logits" in violations[0]


def test_rows_that_are_not_aligned_need_no_wide_loads() -> None:
    narrow = replace(COMPILED, assembly="ld.global.b16 { %rs1 }, [ %rd2 + 0 ];")
    assert not find_violations(replace(VARIANT, launch=replace(LAUNCH, aligned=("logits",))), narrow)


def test_wide_loads() -> None:
    assert widest_vector_load(PTX) == 16
    assert widest_vector_load("ld.global.v2.f32 {%f1, %f2}, [%rd1];") == 8
    assert widest_vector_load("ld.global.b64 {%rd3}, [%rd1];") == 0


def test_bytes_of_a_variant() -> None:
    """Each logit read and written, beside a target of 8 bytes, a weight and two losses."""
    assert VARIANT.num_bytes == 1024 * (16384 * 2 * 2 + 8 + 12)
    assert replace(VARIANT, dtype="float32", needs_grad=False).num_bytes == 1024 * (16384 * 4 + 8 + 12)


def test_a_launch_is_specialized_as_by_triton() -> None:
    def function(x: Any, y: Any, n: Any, one: Any, nothing: Any, p: Any, wide: Any, SIZE: Any) -> None: ...

    names = ("x", "y", "n", "one", "nothing", "p", "wide", "SIZE")
    params = [SimpleNamespace(name=name, is_constexpr=name == "SIZE") for name in names]
    kernel = SimpleNamespace(fn=function, params=params, __name__="function")
    buffer = torch.zeros(32, dtype=torch.bfloat16)
    arguments = (buffer, buffer[1:], 48, 1, None, 0.5, 1 << 40)
    launch = read_launch(kernel, (3, 2), arguments, {"SIZE": 64, "num_warps": 8})
    types = ["*bf16", "*bf16", "i32", "constexpr", "constexpr", "fp32", "i64", "constexpr"]
    assert dict(launch.signature) == dict(zip(names, types, strict=True))
    assert launch.constants == {"one": 1, "nothing": None, "SIZE": 64}
    assert launch.aligned == ("x", "n", "wide")
    assert launch.options == {"num_warps": 8} and launch.num_programs == 6


def test_the_log_of_ptxas() -> None:
    log = """ptxas info    : Function properties for _loss_kernel
    40 bytes stack frame, 36 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 40 bytes cumulative stack size, 440 bytes cmem[0]"""
    assert parse_ptxas_log(log) == (64, 44)


@pytest.mark.parametrize(
    ("version", "message"), [("3.4.0", "3.5 to 3.9"), ("4.0.0+git", "3.5 to 3.9"), (None, "install")]
)
def test_other_versions_of_triton_are_refused(
    version: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_version(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", read_version)
    assert message in str(ahead_of_time.find_compiler_problem())


def test_an_interpreting_process_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.9.0")
    assert "TRITON_INTERPRET" in str(ahead_of_time.find_compiler_problem())


def test_occupancy() -> None:
    """As NVIDIA's occupancy calculator has it."""
    assert occupancy(H100, 1024, 64, 128) == 0.5  # 65,536 registers hold one program of 64 x 1,024
    assert occupancy(H100, 1024, 32, 128) == 1.0
    assert occupancy(H100, 512, 40, 0) == 0.75  # 3 programs of 20,480 registers
    assert occupancy(H100, 32, 16, 0) == 0.5  # at most 32 programs
    assert occupancy(A100, 128, 32, 100 << 10) == 1 / 16  # one program of 101 KiB in 164
    assert occupancy(H100, 128, 32, 100 << 10) == 2 / 16
