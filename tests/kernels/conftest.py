"""Kernels in tests: compiled on a GPU, interpreted without one."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def interpreted() -> None:
    """Skips tests that run Triton kernels in its interpreter, unless TRITON_INTERPRET=1."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("on a GPU kernels are compiled: see the tests marked gpu")
