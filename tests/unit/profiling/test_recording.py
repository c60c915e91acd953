"""NVTX ranges and memory: what they do with CUDA, by a stand-in, and that they do nothing without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from profiling import memory, nvtx
from profiling.trace import part_table


class Calls(list[str]):
    """In place of torch.cuda.nvtx; its calls return depths, too."""

    def range_push(self, name: str) -> int:
        self.append(name)
        return 0

    def range_pop(self) -> int:
        self.append("end")
        return 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    recorded_calls = Calls()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "nvtx", recorded_calls)
    return recorded_calls


def record(model: nn.Sequential) -> None:
    nvtx.add_module_ranges({"layer": model}, "fine")
    nvtx.add_module_ranges({"deep": model[0]}, "verbose")
    with nvtx.annotate("step"):
        assert model(torch.ones(1)).tolist() == [1.0]


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (None, []),
        ("coarse", ["step", "end"]),
        ("fine", ["step", "layer", "end", "end"]),
        ("verbose", ["step", "layer", "deep", "end", "end", "end"]),
    ],
)
def test_ranges_of_a_level(
    level: str | None, expected: list[str], calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(nvtx.NVTX_VARIABLE, raising=False)
    if level is not None:
        monkeypatch.setenv(nvtx.NVTX_VARIABLE, level)
    record(nn.Sequential(nn.Identity()))
    assert calls == expected


def test_no_ranges_without_cuda(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nvtx.NVTX_VARIABLE, "verbose")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    record(nn.Sequential(nn.Identity()))
    assert calls == []


def test_an_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nvtx.NVTX_VARIABLE, "loud")
    with pytest.raises(ValueError, match=r"DIFFUSIONLM_NVTX = 'loud'.*coarse, fine, verbose"):
        nvtx.enabled()


def test_memory_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert memory.peak_memory()["peak_resident"] > 1 << 20
    assert memory.peak_memory().keys() == {"peak_resident"}


def test_memory_on_a_replaced_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 bytes are in use, and 170 were at the peak."""
    resets: list[str] = []
    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "memory_allocated": lambda: 100,
        "max_memory_allocated": lambda: 170,
        "max_memory_reserved": lambda: 200,
        "reset_peak_memory_stats": lambda: resets.append("reset"),
    }
    for name, function in replaced.items():
        monkeypatch.setattr(torch.cuda, name, function)
    assert memory.PeakGrowth("cuda").bytes() == 70 and resets == ["reset"]
    assert memory.peak_memory("cuda") == memory.peak_memory() == {"peak_allocated": 170, "peak_reserved": 200}


def test_the_parts_of_a_step() -> None:
    """Two steps of 10 ms, with two micro-batches each; times are sums, in microseconds."""
    rows = {"step": (2, 20_000), "data": (2, 1_000), "forward": (4, 8_000), "backward": (4, 9_000), "aten::mm": (9, 1)}
    averages = [SimpleNamespace(key=key, count=count, cpu_time_total=time) for key, (count, time) in rows.items()]
    assert part_table(averages).splitlines() == [
        "Where a step goes, by the host's clock (mean of 2):",
        "data              0.50 ms    5.0%",
        "forward           4.00 ms   40.0%",
        "backward          4.50 ms   45.0%",
        "optimizer         0.00 ms    0.0%",
        "the rest          1.00 ms   10.0%",
        "step             10.00 ms  100.0%",
        "",
    ]
    assert part_table(averages[1:]) == ""
