"""Interleaved timing, comparison, reports and the command line of benchmarks."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarking import harness
from benchmarking.harness import (
    ResultFiles,
    compare,
    make_parser,
    make_report,
    make_table,
    run_benchmark,
    run_in_fresh_process,
)
from logger.pages import Page
from profiling.memory import reset_peak_resident

GROW_AND_FREE = """
from profiling.memory import PeakGrowth, peak_resident_bytes, resident_bytes

MEBIBYTE = 1 << 20
# Blocks above 32 MiB are always mapped and unmapped; smaller ones may reuse freed memory.
before = bytearray(96 * MEBIBYTE)
del before
peak = PeakGrowth()
assert peak.bytes() < 8 * MEBIBYTE
block = bytearray(64 * MEBIBYTE)
assert resident_bytes() <= peak_resident_bytes()
del block
assert 60 * MEBIBYTE < peak.bytes() < 72 * MEBIBYTE, peak.bytes()
"""
REPORT = make_report("Speed", ["text", make_table(["name", "n"], [["a", "1"], ["b", "2"]])], {"data": "none"})


def test_implementations_take_turns_and_warmup_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    calls: list[str] = []

    def implementation(name: str, seconds: list[float]) -> Callable[[], str]:
        remaining = iter(seconds)

        def call() -> str:
            nonlocal now
            calls.append(name)
            now += next(remaining)
            return name.upper()

        return call

    def check(values: Mapping[str, Any]) -> None:
        nonlocal now
        outputs.append(dict(values))
        now += 1000.0  # outside the clock

    monkeypatch.setitem(harness.CLOCKS, "wall", lambda: now)
    outputs: list[dict[str, Any]] = []
    implementations = {"a": implementation("a", [100.0, 1.0, 2.0]), "b": implementation("b", [200.0, 3.0, 5.0])}
    times = compare(implementations, rounds=2, warmup=1, check=check)
    assert calls == ["a", "b"] * 3
    assert times.seconds == {"a": [1.0, 2.0], "b": [3.0, 5.0]}
    assert times.median("a") == 1.5 and times.format_ms("b") == "4,000.00"
    assert times.speedup_cells("a", "b") == ["2.67", "2.75 [2.62, 2.88]"]
    assert outputs == [{"a": "A", "b": "B"}] * 2


def test_result_files_replace_existing_ones(tmp_path: Path) -> None:
    for _ in range(2):
        files = ResultFiles(tmp_path / "out", "speed")
        files.append([{"a": 1}])
        files.append([{"a": 2}, {"a": 3}])
        files.write_report(REPORT)
    assert (tmp_path / "out" / "speed.jsonl").read_text() == '{"a": 1}\n{"a": 2}\n{"a": 3}\n'
    assert (tmp_path / "out" / "speed.md").read_text() == (
        "# Speed\n\n## Results\n\ntext\n\n| name | n |\n| --- | ---: |\n| a | 1 |\n| b | 2 |\n\n"
        "## Conditions\n\n|  |  |\n| --- | --- |\n| data | none |\n"
    )
    ResultFiles(None, "speed").append([{"a": 1}])


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    parser = make_parser("A test.", rounds=20, threads=torch.get_num_threads())
    options = parser.parse_args(["--rounds", "4"])
    assert options.rounds == 4
    assert run_benchmark(lambda options: REPORT, options) == 0
    assert capsys.readouterr().out.splitlines()[4:7] == ["name  n", "a     1", "b     2"]
    for option in ("--rounds=1", "--threads=0", "--rounds=x"):
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args([option])
        assert f"argument {option.split('=')[0]}: " in capsys.readouterr().err

    def fail(options: argparse.Namespace) -> Page:
        raise ValueError("results differ")

    assert run_benchmark(fail, options) == 1
    assert "results differ" in capsys.readouterr().err


def test_a_killed_measurement_names_the_key() -> None:
    with pytest.raises(ValueError, match=r"the case .* lower shapes.batch_size"):
        run_in_fresh_process(os._exit, 9, description="the case", key="shapes.batch_size")


@pytest.mark.skipif(not reset_peak_resident(), reason="this system cannot reset the peak")
def test_peak_growth_includes_freed_memory() -> None:
    """In a process of its own: the system may take back memory of a large one meanwhile."""
    subprocess.run([sys.executable, "-c", GROW_AND_FREE], check=True, timeout=60)
