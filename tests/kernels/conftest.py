"""Kernels in tests: compiled on a GPU, interpreted without one."""

from __future__ import annotations

import os

import pytest
import torch

# Triton decides while it is imported, so before any test runs. What torch compiles for a CPU does not mind.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def interpreted() -> None:
    """For tests that run Triton's kernels on a CPU."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("on a GPU kernels are compiled: see the tests marked gpu")
