"""Kernels compiled ahead of time for GPUs: their variants, their budgets, and what is read from the compilers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kernels import compiled_kernels
from tests.kernels.ahead_of_time import CompiledKernel, KernelLaunch
from tests.kernels.compiled_kernels import KernelVariant, find_violations

ROOT = Path(__file__).parents[2]
PTX = """
    @%p1 ld.global.L1::evict_last.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    ld.global.b16 { %rs1 }, [ %rd2 + 0 ];
    fma.rn.f32 %f1, %f2, %f3, %f4;
    cvt.rn.bf16x2.f32 %r9, %f1, %f2;
"""
LAUNCH = KernelLaunch(None, {"logits": "*bf16", "vocab": "i32"}, {}, ("logits", "vocab"), {"num_warps": 32})
VARIANT = KernelVariant(16384, "bfloat16", False, True, LAUNCH, LAUNCH)
COMPILED = CompiledKernel("sm_90", 1024, 64, 128, 0, PTX)


def compile_kernels(*arguments: str) -> list[dict[str, Any]]:
    """What the command prints, in a process where Triton compiles; it ends with an error if a budget is exceeded."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiled_kernels", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=280)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_kernel_is_compiled_for_an_h100_without_spills() -> None:
    kernels = compile_kernels("--dtypes", "bfloat16", "--vocabularies", "16384", "--targets", "sm_90")
    assert len(kernels) == 4
    for kernel in kernels:
        assert 16 <= kernel["registers"] <= 64 and (kernel["num_threads"], kernel["load_bytes"]) == (1024, 16)


@pytest.mark.slow
def test_crowded_variants_are_compiled_for_all_kinds_of_gpus() -> None:
    """Where registers are scarce: fp32, a soft cap, and rows that are not aligned; two passes."""
    options = "--dtypes float32 bfloat16 --vocabularies 16384 50257 151936 --targets sm_90 sm_100 gfx942"
    assert len(compile_kernels(*options.split())) == 3 * 2 * 4 * 3


def test_every_kernel_that_is_launched_is_in_the_table() -> None:
    launched = set()
    for path in (ROOT / "diffusionlm").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        kernels = re.findall(r"^@triton\.jit.*\n(?:@.*\n)*def (\w+)", text, re.MULTILINE)
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        launched |= {(module, name) for name in kernels if re.search(rf"\b{name}\[", text)}
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
        ({"assembly": PTX + "@%p2 red.global.add.f32 [%rd1], %f1;"}, "is an atomic"),
        ({"assembly": "ld.global.b16 { %rs1 }, [ %rd2 + 0 ];"}, "read by 0 bytes at a time"),
    ],
)
def test_budgets(change: dict[str, Any], message: str | None) -> None:
    violations = find_violations(VARIANT, replace(COMPILED, **change))
    assert len(violations) == (message is not None)
    if message is not None:
        assert message in violations[0] and "sm_90" in violations[0] and "16384 logits" in violations[0]
