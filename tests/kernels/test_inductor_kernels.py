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

from tests.kernels.inductor import TORCH_VERSION
from tests.kernels.inductor_kernels import DROPOUT, GRAPHS, NUM_OUTPUTS, SHARED_BYTES, TESTED_CASES, GraphKernel
from tests.training_graphs import CASES, record_graphs

ROOT = Path(__file__).parents[2]
MAX_KERNELS = dict(zip(GRAPHS, (10, 14, 23, 17), strict=True))
"""Budgets beside matrix products and attention."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.__version__.startswith(f"{TORCH_VERSION}."),
        reason=f"the private parts of the compiler that are replaced are those of torch {TORCH_VERSION}",
    ),
]


@pytest.mark.timeout(800)
def test_kernels_stay_within_budgets_on_an_h100() -> None:
    """Every graph can be lowered and compiled. The only atomics add the gradients of gathered positions, which are
    distinct."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.inductor_kernels", "--tested"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=700)
    assert result.returncode == 0, result.stderr[-3000:]
    kernels = [GraphKernel(**json.loads(line)) for line in result.stdout.splitlines() if line.startswith("{")]
    assert not [kernel for kernel in kernels if kernel.spill_bytes]
    assert not [kernel for kernel in kernels if kernel.shared_bytes > SHARED_BYTES[kernel.target]]
    counts = Counter((kernel.case, kernel.graph) for kernel in kernels if not kernel.is_attention)
    assert counts.pop((DROPOUT, "forward")) > 0
    assert set(counts) == {(case, graph) for case in CASES for graph in GRAPHS}
    assert not {place: count for place, count in counts.items() if count > MAX_KERNELS[place[1]]}
    atomics = {(kernel.graph, "index_put" in kernel.name) for kernel in kernels if kernel.has_atomics}
    assert atomics <= {("last block, backward", True)}
    attention = Counter((kernel.case, kernel.graph) for kernel in kernels if kernel.is_attention)
    expected = [(case, graph) for case in CASES if CASES[case].backend == "flex" for graph in GRAPHS]
    expected += [(case, direction) for case in TESTED_CASES for direction in ("forward", "backward")]
    assert attention == Counter(expected)


def test_activation_checkpointing_compiles_nothing_else() -> None:
    graphs = record_graphs(CASES["block diffusion"], "full", NUM_OUTPUTS, is_dynamic=True)
    assert len(graphs) == len(GRAPHS)
