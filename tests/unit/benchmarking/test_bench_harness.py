"""Interleaved timing, comparison, reports and the command line of benchmarks."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarking import harness
from benchmarking.harness import (
    Benchmark,
    Report,
    ResultFiles,
    ResultTable,
    Settings,
    check_installed,
    collect_environment,
    compare,
    format_command_line,
    main,
    run_in_fresh_process,
    speedup,
)
from profiling.cores import usable_cores
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


class FakeClock:
    """A clock that only the calls of implementations advance."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def implementation(self, name: str, seconds: list[float]) -> Callable[[], str]:
        remaining = iter(seconds)

        def call() -> str:
            self.calls.append(name)
            self.now += next(remaining)
            return name.upper()

        return call


def test_implementations_take_turns_and_warmup_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setitem(harness.CLOCKS, "wall", clock)
    implementations = {
        "a": clock.implementation("a", [100.0, 1.0, 2.0]),
        "b": clock.implementation("b", [200.0, 3.0, 5.0]),
    }
    outputs: list[dict[str, Any]] = []

    def check(values: Mapping[str, Any]) -> None:
        outputs.append(dict(values))
        clock.now += 1000.0  # outside the clock

    times = compare(implementations, Settings(2, 1), check=check)
    assert clock.calls == ["a", "b"] * 3
    assert times.seconds == {"a": [1.0, 2.0], "b": [3.0, 5.0]}
    assert times.median("a") == 1.5 and times.format_ms("b") == "4,000.00"
    assert times.speedup_cells("a", "b") == ["2.67", "2.75 [2.62, 2.88]"]
    assert outputs == [{"a": "A", "b": "B"}] * 2


def test_speedup_of_medians_and_within_rounds() -> None:
    ratio = speedup([1.0, 1.0, 2.0, 1.0, 4.0], [2.0, 3.0, 6.0, 1.0, 16.0])
    assert ratio.ratio_of_medians == 3.0
    assert (ratio.low, ratio.median_ratio, ratio.high) == (2.0, 3.0, 3.0)
    assert ratio.format_ratio() == "3.00 [2.00, 3.00]"


def test_noise_of_whole_rounds_cancels_within_rounds() -> None:
    noise = [1.0, 10.0, 3.0, 30.0]
    ratio = speedup(noise, [1.5 * factor for factor in noise])
    assert (ratio.low, ratio.median_ratio, ratio.high) == (1.5, 1.5, 1.5)


def test_speedup_needs_the_same_rounds() -> None:
    with pytest.raises(ValueError, match="zip"):
        speedup([1.0, 2.0], [1.0, 2.0, 3.0])


def test_environment_is_complete() -> None:
    environment = collect_environment(threads=3, packages=["torch"])
    assert f"torch {torch.__version__}" in environment["software"]
    assert environment["threads"].startswith("3 of torch")
    assert environment["CPU"]
    assert usable_cores() >= 1


def test_command_line_is_what_one_would_type(monkeypatch: pytest.MonkeyPatch) -> None:
    main_module = sys.modules["__main__"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/tool", "--set", "a.b=x y"])
    monkeypatch.setattr(main_module, "__spec__", None)
    assert format_command_line() == "tool --set 'a.b=x y'"
    monkeypatch.setattr(main_module, "__spec__", sys.modules["benchmarking.harness"].__spec__)
    assert format_command_line() == "python -m benchmarking.harness --set 'a.b=x y'"


REPORT = Report(["text", ResultTable(["name", "n"], [["a", "1"], ["b", "2"]])], {"data": "none"})
MARKDOWN = "text\n\n| name | n |\n| --- | ---: |\n| a | 1 |\n| b | 2 |\n\n- data: none"


def test_report() -> None:
    assert REPORT.to_markdown() == MARKDOWN
    assert REPORT.to_markdown({"date": "today"}) == MARKDOWN + "\n- date: today"
    [table] = REPORT.tables
    assert table.column("n") == ["1", "2"]


def test_result_files_replace_existing_ones(tmp_path: Path) -> None:
    for _ in range(2):
        files = ResultFiles(tmp_path / "out", "speed")
        files.append([{"a": 1}])
        files.append([{"a": 2}, {"a": 3}])
        files.write_report(REPORT)
    assert (tmp_path / "out" / "speed.jsonl").read_text() == '{"a": 1}\n{"a": 2}\n{"a": 3}\n'
    assert (tmp_path / "out" / "speed.md").read_text() == MARKDOWN + "\n"
    ResultFiles(None, "speed").append([{"a": 1}])


def make_benchmark(run: Callable[[Settings], Report], **options: Any) -> Benchmark:
    return Benchmark("A test.", run, threads=torch.get_num_threads(), **options)


def test_main_prints_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    received: list[Settings] = []

    def run(settings: Settings) -> Report:
        received.append(settings)
        return REPORT

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--size", type=int, default=7)

    assert main(make_benchmark(run, add_arguments=add_arguments, warmup=2), ["--rounds", "4"]) == 0
    [settings] = received
    assert (settings.rounds, settings.warmup, settings.options.size) == (4, 2, 7)
    assert capsys.readouterr().out.startswith(MARKDOWN)


def test_main_rejects_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = make_benchmark(
        lambda settings: REPORT, check_arguments=lambda options: "--rounds 3 is odd" if options.rounds == 3 else None
    )
    for argv, option in (["--rounds", "1"], "--rounds"), (["--threads", "0"], "--threads"), (["--rounds", "3"], "odd"):
        with pytest.raises(SystemExit) as caught:
            main(benchmark, argv)
        assert caught.value.code == 2 and option in capsys.readouterr().err


def test_main_names_failures(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(settings: Settings) -> Report:
        raise ValueError("results differ")

    assert main(make_benchmark(fail, rounds=None), []) == 1
    assert "results differ" in capsys.readouterr().err


class DeadPool(ProcessPoolExecutor):
    """A pool whose process was killed."""

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        raise BrokenProcessPool


def test_a_killed_measurement_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "ProcessPoolExecutor", DeadPool)
    with pytest.raises(ValueError, match=r"the case .* lower shapes.batch_size"):
        run_in_fresh_process(int, description="the case", key="shapes.batch_size")


@pytest.mark.skipif(not reset_peak_resident(), reason="this system cannot reset the peak")
def test_peak_growth_includes_freed_memory() -> None:
    """In a process of its own: the system may take back memory of a large one meanwhile."""
    subprocess.run([sys.executable, "-c", GROW_AND_FREE], check=True, timeout=60)


def test_a_missing_peer_names_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "is_installed", lambda package: package != "tiktoken")
    check_installed(["tokenizers"])
    with pytest.raises(ValueError, match=r"tiktoken.*group bench.*bench.peers="):
        check_installed(["tokenizers", "tiktoken"])
