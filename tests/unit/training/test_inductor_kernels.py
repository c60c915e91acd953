"""Kernels that torch's compiler generates for the blocks of a training step on an H100, compiled without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.flex_kernels import SHARED_BYTES, TESTED_CASES, FlexKernel
from tests.inductor_cuda import H100, TORCH_VERSION
from tests.inductor_kernels import GRAPHS, BlockKernel
from tests.training_graphs import CASES

ROOT = Path(__file__).parents[3]
MAX_KERNELS = dict(zip(GRAPHS, (10, 14, 23, 17), strict=True))
"""Budgets beside matrix products and attention."""


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.__version__.startswith(f"{TORCH_VERSION}."),
    reason=f"the private parts of the compiler that are replaced are those of torch {TORCH_VERSION}",
)
def test_kernels_of_blocks_stay_within_budgets_on_an_h100() -> None:
    """Every graph can be lowered and compiled. The only atomics add the gradients of gathered positions, which are
    distinct. Activation checkpointing compiles nothing else."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.inductor_kernels", "--json"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=700)
    assert result.returncode == 0, result.stderr[-3000:]
    results = json.loads(result.stdout.splitlines()[-1])
    kernels = [BlockKernel(**values) for values in results["kernels"]]
    own = [kernel for kernel in kernels if not kernel.is_attention]
    counts = Counter((kernel.case, kernel.graph) for kernel in own)
    assert set(counts) == {(case, graph) for case in CASES for graph in GRAPHS}
    assert not {place: count for place, count in counts.items() if count > MAX_KERNELS[place[1]]}
    assert not [kernel for kernel in own if kernel.spill_bytes]
    assert not [kernel for kernel in kernels if kernel.shared_bytes > H100.shared_memory_per_block_optin]
    atomics = [kernel for kernel in kernels if kernel.has_atomics]
    assert not [kernel for kernel in atomics if "index_put" not in kernel.name]
    assert set(Counter((kernel.case, kernel.graph) for kernel in atomics)) <= {
        (case, "last block, backward") for case in CASES
    }
    attention = [kernel for kernel in kernels if kernel.is_attention]
    uses_flex = [case for case in CASES if CASES[case].backend == "flex"]
    assert Counter((kernel.case, kernel.graph) for kernel in attention) == Counter(
        (case, graph) for case in uses_flex for graph in GRAPHS
    )
    flex_kernels = [FlexKernel(**values) for values in results["flex_kernels"]]
    assert Counter((kernel.case, kernel.direction) for kernel in flex_kernels) == Counter(
        (case, direction) for case in TESTED_CASES for direction in ("forward", "backward")
    )
    assert not [kernel for kernel in attention if kernel.spill_bytes]
    assert not [kernel for kernel in flex_kernels if kernel.spill_bytes]
    assert not [kernel for kernel in flex_kernels if kernel.shared_bytes > SHARED_BYTES[kernel.target]]
    assert results["graphs_with_checkpointing"] == len(GRAPHS)
    assert results["spilled_bytes_of_dropout"] and not any(results["spilled_bytes_of_dropout"])
