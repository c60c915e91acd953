"""Kernels that torch's compiler generates for the blocks of a training step on an H100: their number, and atomics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.inductor_cuda import SHAPE, TORCH_VERSION

ROOT = Path(__file__).parents[3]
MAX_FORWARD_KERNELS, MAX_BACKWARD_KERNELS = 13, 20
"""Budgets per layer, beside matrix products and attention: 25 and 38 for two layers with torch 2.15."""


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.__version__.startswith(f"{TORCH_VERSION}."),
    reason=f"the private parts of the compiler that are replaced are those of torch {TORCH_VERSION}",
)
def test_blocks_are_compiled_to_few_kernels_for_an_h100() -> None:
    """Every graph can be lowered. The only atomics add the gradients of gathered positions, which are distinct."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.inductor_cuda"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-3000:]
    results = json.loads(result.stdout.splitlines()[-1])
    graphs, num_layers = results["graphs"], SHAPE["num_hidden_layers"]
    for is_backward, limit in ((False, MAX_FORWARD_KERNELS), (True, MAX_BACKWARD_KERNELS)):
        counts = [len(graph["kernels"]) for graph in graphs if graph["is_backward"] == is_backward]
        assert 0 < sum(counts) <= limit * num_layers
    atomics = [(graph["is_backward"], name) for graph in graphs for name in graph["atomics"]]
    assert all(is_backward and "index_put" in name for is_backward, name in atomics)
    assert len(atomics) <= 3
    assert results["graphs_with_checkpointing"] == len(graphs), "checkpointing compiles something else"
