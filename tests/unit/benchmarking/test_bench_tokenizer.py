"""The tokenizer benchmark: its config, its implementations, its command."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarking.bench_tokenizer import (
    ONE_THREAD,
    OURS,
    bench_tokenizer,
    check_equal_outputs,
    load,
    train_ours,
)
from config.bench.training import BenchOutputSection, BenchTokenizerConfig, BenchTokenizerSection, TokenizerPeer
from logger.pages.markdown import render_markdown
from tests.unit.benchmarking.cases import read_facts, read_tables

ROOT = Path(__file__).parents[3]
RESOURCE = ROOT / "config" / "resources" / "bench_tokenizer.toml"
TEXTS = ["the cat sat on the mat\r\n", "naïve 日本 '12345'", "", "the the the <|mask|>"]
TASKS = ["training", "encoding, cold", "encoding, warm", "decoding"]


def tiny(peers: tuple[TokenizerPeer, ...], directory: Path | None = None) -> BenchTokenizerConfig:
    return BenchTokenizerConfig(
        bench=BenchTokenizerSection(vocab_sizes=(300, 400), peers=peers, max_bytes=20_000, rounds=2),
        output=BenchOutputSection(directory=directory),
    )


@pytest.mark.parametrize("name", [OURS, "tokenizers", "tiktoken"])
def test_libraries_do_the_same(name: str) -> None:
    pytest.importorskip(name)
    tokenizer = train_ours(TEXTS, 270, "llama3")
    assert not tokenizer.special_tokens
    codec = load(name, tokenizer)
    for text in TEXTS:
        assert list(codec.encode(text)) == tokenizer.encode(text)
        assert codec.decode(tokenizer.encode(text)) == text


def test_different_outputs_are_an_error() -> None:
    check_equal_outputs("task", {OURS: [[1], [2, 3]], "other": [[1], [2, 3]]})
    with pytest.raises(ValueError, match=r"task: other .* item 1;"):
        check_equal_outputs("task", {OURS: [[1], [2, 3]], "other": [[1], [2, 4]]})
    with pytest.raises(ValueError, match="item 1;"):
        check_equal_outputs("task", {OURS: [1], "other": [1, 2]})
    trained = [train_ours(TEXTS, size, "llama3") for size in (270, 271)]
    with pytest.raises(ValueError, match="item 14;"):
        check_equal_outputs("task", {OURS: trained[0], "other": trained[1]})


@pytest.mark.slow
@pytest.mark.parametrize("peers", [(), ("tokenizers", "tiktoken")])
def test_end_to_end(
    peers: tuple[TokenizerPeer, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for peer in peers:
        pytest.importorskip(peer)
    for name in ONE_THREAD:
        monkeypatch.setenv(name, "7")
    report = bench_tokenizer(tiny(peers, tmp_path / "out"))
    assert {name: os.environ[name] for name in ONE_THREAD} == ONE_THREAD
    assert (tmp_path / "out" / "tokenizer_speed.md").read_text() == render_markdown(report)
    assert [table["task"] for table in read_tables(report)] == [TASKS] * 2
    assert ("tiktoken" in read_facts(report)) == bool(peers)
    output = capsys.readouterr()
    assert output.out == "" and "vocabulary 400, decoding" in output.err
    lines = (tmp_path / "out" / "tokenizer_speed.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    measured = {(record["vocab_size"], record["task"], record["implementation"]) for record in records}
    everything = {(size, task, name) for size in (300, 400) for task in TASKS for name in (OURS, *peers)}
    assert measured == everything - {(size, "training", "tiktoken") for size in (300, 400)}
    assert all(len(record["cpu_seconds"]) == 2 and record["text_bytes"] >= 4096 for record in records)
