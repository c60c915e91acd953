"""Timing in turns, comparison, tables and memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import pytest
import torch

from benchmarking.bench_attention import attention_step, bench_attention
from benchmarking.harness import (
    collect_environment,
    format_command_line,
    markdown_list,
    markdown_table,
    read_cpu_model,
    speedup,
    time_in_turns,
    usable_cores,
)
from config.runtime import AttentionBackend
from profiling.memory import PeakGrowth, peak_resident_bytes, reset_peak_resident, resident_bytes

MEBIBYTE = 1 << 20


class FakeClock:
    """Time that only contestants spend."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def contestant(self, name: str, seconds: list[float]) -> Callable[[], None]:
        left = iter(seconds)

        def call() -> None:
            self.calls.append(name)
            self.now += next(left)

        return call


def test_contestants_take_turns_and_warm_up_does_not_count() -> None:
    clock = FakeClock()
    implementations = {"a": clock.contestant("a", [100.0, 1.0, 2.0]), "b": clock.contestant("b", [200.0, 3.0, 5.0])}
    seen: list[tuple[int, dict[str, float]]] = []

    def after_round(number: int, seconds: Mapping[str, float]) -> None:
        seen.append((number, dict(seconds)))
        clock.now += 1000.0  # What is done between steps is not measured.

    seconds = time_in_turns(implementations, rounds=2, warmup=1, after_round=after_round, clock=clock)

    assert clock.calls == ["a", "b"] * 3
    assert seconds == {"a": [1.0, 2.0], "b": [3.0, 5.0]}
    assert seen == [(1, {"a": 1.0, "b": 3.0}), (2, {"a": 2.0, "b": 5.0})]


def test_the_real_clock_measures() -> None:
    seconds = time_in_turns({"a": lambda: sum(range(10_000))}, rounds=3, warmup=0)
    assert len(seconds["a"]) == 3 and min(seconds["a"]) > 0


def test_speedup_of_medians_and_within_rounds() -> None:
    ratio = speedup([1.0, 1.0, 2.0, 1.0, 4.0], [2.0, 3.0, 6.0, 1.0, 16.0])
    assert ratio.ratio_of_medians == 3.0
    assert (ratio.low, ratio.median_ratio, ratio.high) == (2.0, 3.0, 3.0)
    assert ratio.format_ratio() == "3.00 [2.00, 3.00]"


def test_rounds_that_are_slow_as_a_whole_cancel_within_rounds() -> None:
    weather = [1.0, 10.0, 3.0, 30.0]
    ratio = speedup(weather, [1.5 * factor for factor in weather])
    assert (ratio.low, ratio.median_ratio, ratio.high) == (1.5, 1.5, 1.5)


def test_speedup_needs_the_same_rounds() -> None:
    with pytest.raises(ValueError, match="zip"):
        speedup([1.0, 2.0], [1.0, 2.0, 3.0])


def test_environment_says_what_is_needed_to_measure_again() -> None:
    where = collect_environment(threads=3, packages=["torch"], accelerator="a GPU")
    assert f"torch {torch.__version__}" in where["software"]
    assert where["threads"].startswith("3 of torch") and where["accelerator"] == "a GPU"
    assert where["CPU"] == read_cpu_model() != ""
    assert "accelerator" not in collect_environment(threads=1, packages=[])
    assert usable_cores() >= 1


def test_command_line_is_what_one_would_type(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/tool", "--set", "a.b=x y"])
    monkeypatch.setattr(main, "__spec__", None)
    assert format_command_line() == "tool --set 'a.b=x y'"
    monkeypatch.setattr(main, "__spec__", sys.modules["benchmarking.bench_attention"].__spec__)
    assert format_command_line() == "python -m benchmarking.bench_attention --set 'a.b=x y'"


def test_tables_and_lists() -> None:
    assert markdown_table(["name", "n"], [["a", "1"], ["b", "2"]]).splitlines() == [
        "| name | n |",
        "| --- | ---: |",
        "| a | 1 |",
        "| b | 2 |",
    ]
    assert markdown_list({"date": "today", "CPU": "fast"}) == "- date: today\n- CPU: fast"


@pytest.mark.skipif(not reset_peak_resident(), reason="this system cannot reset the peak")
def test_peak_growth_sees_what_came_and_went() -> None:
    # Blocks above 32 MiB always come from the system and go back to it; smaller ones may be what was freed before.
    before = bytearray(96 * MEBIBYTE)
    del before
    peak = PeakGrowth()
    assert peak.bytes() < 8 * MEBIBYTE
    block = bytearray(64 * MEBIBYTE)
    assert resident_bytes() <= peak_resident_bytes()
    del block
    assert 60 * MEBIBYTE < peak.bytes() < 72 * MEBIBYTE


def test_attention_lowerings_are_timed_in_every_precision() -> None:
    lines = bench_attention((8, 16), rounds=2, warmup=1, tokens=32).splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:]] == [
        ["| float32", "8"],
        ["| float32", "16"],
        ["| bfloat16", "8"],
        ["| bfloat16", "16"],
    ]


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_an_attention_step_uses_the_backend_asked_for(
    backend: AttentionBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[AttentionBackend] = []

    def fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None, backend: AttentionBackend) -> torch.Tensor:
        used.append(backend)
        return q + k + v

    monkeypatch.setattr("benchmarking.bench_attention.attend", fake)
    attention_step(backend, 8, torch.float32, 16)()
    assert used == [backend]
