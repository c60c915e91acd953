"""The benchmarks' commands: what they print, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarking.serving.bench_serve import BenchServeResult
from benchmarking.serving.load import AnswerCheck, LoadResult, RequestRecord
from benchmarking.serving.summary import summarize
from cli.commands import COMMANDS
from config.bench.serve import BenchServeConfig
from tests.unit.cli.conftest import Fails

INFER = ["--config", str(Path(__file__).parents[3] / "config" / "resources" / "bench_infer.toml")]


@pytest.mark.parametrize(
    ("name", "arguments", "code", "message"),
    [
        ("bench-serve", ["--rate", "0"], 2, "load.rate=0: must be greater than 0"),
        ("bench-serve", ["--set", "requests.file=no/such.jsonl"], 2, "requests.file = no/such.jsonl cannot be read"),
        ("bench-infer", [*INFER, "--set", "grid.caches=prefix"], 2, 'cache = "prefix" is for bidirectional attention'),
        ("bench-infer", [*INFER, "--model", "no/such/model"], 1, "no model at no/such/model: there is no such"),
    ],
)
def test_bad_input_ends_with_a_message(name: str, arguments: list[str], code: int, message: str, fails: Fails) -> None:
    error = fails(COMMANDS[name], *arguments, code=code)
    assert error.startswith(f"diffusionlm-{name}: error: ") and message in error


def test_tables_are_printed_before_the_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = BenchServeConfig()
    result = LoadResult([RequestRecord(0.0, [0.5, 1.0], 1.0, "ab", "stop", 3, 4)], 0.0, 2.0, 1)
    summary = summarize(result, config.goodput, {}, AnswerCheck(0, [0], []))
    monkeypatch.setattr(
        "benchmarking.serving.bench_serve.bench_serve", lambda _: BenchServeResult("tiny", summary, ["one differs"])
    )
    with pytest.raises(SystemExit) as ended:
        COMMANDS["bench-serve"]([])
    output = capsys.readouterr()
    assert ended.value.code == 1 and output.err == "diffusionlm-bench-serve: error: one differs\n"
    lines = [line.split() for line in output.out.splitlines()]
    assert ["model", "tiny"] in lines and ["tokens/s", "2.0"] in lines
    assert ["time", "to", "the", "end", "(E2EL),", "ms", *["1,000.00"] * 4] in lines
