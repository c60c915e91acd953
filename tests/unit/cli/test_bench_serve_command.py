"""``diffusionlm-bench-serve``: what it prints, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarking.serving.bench_serve import BenchServeResult
from benchmarking.serving.client import RequestRecord
from benchmarking.serving.load import AnswerCheck, LoadResult
from benchmarking.serving.server_metrics import ServerCounts
from benchmarking.serving.summary import summarize
from cli.bench.serve import main
from config.bench.serve import BenchServeConfig


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "0"], "load.rate=0: must be greater than 0"),
        (["--url", "localhost:8000"], '"http://127.0.0.1:8000/v1"'),
        (["--set", "requests.answer_length=[9, 3]"], "the shortest length comes first"),
        (["--set", "requests.body.stream=true"], 'the field "stream" is set by the load generator: remove it'),
        (["--set", "requests.vocabulary=9", "--set", "server.endpoint=chat"], "remove one of them"),
        (["--set", "requests.file=no/such.jsonl"], "requests.file = no/such.jsonl cannot be read"),
        (["--set", "output.path=."], "output.path = . is a directory: name a file in it"),
        (["--set", "server.api_key_file=no/key"], "server.api_key_file = no/key cannot be read"),
    ],
)
def test_bad_input_ends_with_a_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    output = capsys.readouterr()
    assert (ended.value.code, output.out) == (2, "")
    assert output.err.startswith("diffusionlm-bench-serve: error: ") and message in output.err


def test_tables_are_printed_before_the_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = BenchServeConfig()
    result = LoadResult([RequestRecord(0.0, [0.5, 1.0], 1.0, "ab", "stop", 3, 4)], 0.0, 2.0, 1)
    summary = summarize(result, config.goodput, ServerCounts(), AnswerCheck(0, [0], []))
    monkeypatch.setattr(
        "benchmarking.serving.bench_serve.bench_serve", lambda _: BenchServeResult("tiny", summary, ["one differs"])
    )
    with pytest.raises(SystemExit) as ended:
        main([])
    output = capsys.readouterr()
    assert ended.value.code == 1 and output.err == "diffusionlm-bench-serve: error: one differs\n"
    lines = [line.split() for line in output.out.splitlines()]
    assert ["model", "tiny"] in lines and ["tokens/s", "2.0"] in lines
    assert ["time", "to", "the", "end", "(E2EL),", "ms", *["1,000.00"] * 4] in lines
