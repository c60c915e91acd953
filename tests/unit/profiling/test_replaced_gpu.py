"""Measurements on a GPU, with functions of `torch.cuda` replaced: no test here needs one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from config.training.runtime import ProfilerConfig
from profiling import memory, nvtx
from profiling.trace import StepProfiler


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A GPU that has 100 bytes in use, and 170 at its peak; the calls that change its records."""
    recorded: list[Any] = []
    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "memory_allocated": lambda: 100,
        "max_memory_allocated": lambda: 170,
        "max_memory_reserved": lambda: 200,
        "reset_peak_memory_stats": lambda: recorded.append("reset"),
    }
    for name, function in replaced.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return recorded


def test_allocated_memory(calls: list[Any]) -> None:
    growth = memory.PeakGrowth("cuda")
    assert growth.bytes() == 70 and calls == ["reset"]
    assert memory.peak_memory("cuda") == memory.peak_memory() == {"peak_allocated": 170, "peak_reserved": 200}
    memory.reset_peak_memory()
    assert calls == ["reset", "reset"]


def test_a_profile_of_a_gpu_is_sorted_by_its_time(tmp_path: Path) -> None:
    """Torch records the operators of the host also where it finds no GPU."""
    messages: list[str] = []
    config = ProfilerConfig(active=1, wait=0, warmup=1)
    with StepProfiler(config, tmp_path, "cuda", log=messages.append) as profiler:
        for _ in range(2):
            with nvtx.annotate("step"):
                torch.ones(2).add(1)
            profiler.step()
    assert len(messages) == 1 and "aten::add" in (tmp_path / "table-2.txt").read_text(encoding="utf-8")
