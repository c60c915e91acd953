"""What a sweep reads of its runs, and its page."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from optuna.distributions import CategoricalDistribution

from cli.sweep.definition import Setting, Sweep
from cli.sweep.report import build_page, read_results, write_report
from cli.sweep.results import SweepRun, read_files
from logger.pages import Number
from logger.pages.terminal import render_text


def write_lines(path: Path, *records: Any, tail: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records) + tail)


def metrics(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "metrics": values}


def sample(step: int, *tokens: str) -> dict[str, Any]:
    values = {"given": "a [MASK:1]", "tokens": tokens, "step_map": [None, *range(1, len(tokens))]}
    return {"step": step, "event": "sample", "text": "", "values": values | {"logprobs": [None] * len(tokens)}}


def finish(directory: Path, bound: float, **evaluation: Any) -> None:
    values = {
        "nats_per_token": bound,
        "standard_error": 0.01,
        "bits_per_byte": bound / 2,
        "bits_per_byte_standard_error": 0.005,
    }
    directory.mkdir(parents=True, exist_ok=True)
    summary = {"evaluation": values | evaluation, "tokens_seen": 600, "seconds": 3.0, "step": 30}
    (directory / "summary.json").write_text(json.dumps(summary))


def test_finished_active_and_missing_runs(tmp_path: Path) -> None:
    validation = metrics(20, val_nats_per_token=4.0, val_standard_error=0.5)
    lines = [metrics(10, loss=None, tokens_per_second=9.0), validation, [1]]
    write_lines(tmp_path / "metrics.jsonl", *lines, tail='{"step": 40, "metr')
    logged, numbers = read_files(tmp_path)
    assert logged is not None and (logged.summary, logged.last_step) == ({}, 20)
    assert numbers == {"tokens_per_second": Number(9.0), "bound": Number(4.0, error=0.5)}
    finish(tmp_path, float("nan"))
    logged, numbers = read_files(tmp_path)
    assert logged is not None and logged.summary
    assert numbers == {"tokens_per_second": Number(200.0)}, "the bound is not finite"
    assert read_files(tmp_path / "missing") == (None, {})


def sweep_of(path: Path, key: str = "optimizer.learning_rate") -> tuple[Sweep, list[SweepRun]]:
    """Five runs: two done, one failed, one interrupted on its way, one pruned."""
    values = ("0e-3", "1e-3", "2e-3", "3e-3", "4e-3")
    sweep = Sweep(None, [Setting(key, values, CategoricalDistribution(values))], path)
    statuses: list[Any] = ["done", "failed", "done", "interrupted", "pruned"]
    runs = [
        SweepRun(f"run-{number}", {key: f"{number}e-3"}, status, seconds=60.0 + number)
        for number, status in enumerate(statuses)
    ]
    runs[1] = replace(runs[1], error=["ValueError: <b>no|memory</b>"])
    return sweep, runs


def test_the_report(tmp_path: Path, golden: Any) -> None:
    sweep, runs = sweep_of(tmp_path / "sweep")
    for name, text, bound in (("run-0", "first", 3.02), ("run-2", "</script><b>second", 3.01)):
        lines = [metrics(10, loss=5.0), sample(10, "a ", "old"), metrics(30, loss=3.0), sample(30, "a ", text)]
        write_lines(sweep.run_path(name) / "metrics.jsonl", *lines)
        finish(sweep.run_path(name), bound)
    for name, bound in (("run-3", 2.0), ("run-4", 5.0)):
        line = metrics(7, val_nats_per_token=bound, val_standard_error=0.1)
        write_lines(sweep.run_path(name) / "metrics.jsonl", line)
    sweep.log_path("run-1").parent.mkdir()
    sweep.log_path("run-1").write_text("x")
    (sweep.run_path("run-2") / "report.html").write_text("x")
    text = render_text(write_report(sweep, runs), StringIO())
    golden("terminal.txt", text.replace(str(sweep.directory), "DIR"))
    golden("sweep.markdown.txt", (sweep.directory / "sweep.md").read_text())
    page = (sweep.directory / "sweep.html").read_text()
    assert "&lt;/script&gt;&lt;b&gt;second" in page and "<b>second" not in page and "logs/run-1.log" in page
    best, *_, failed = map(json.loads, (sweep.directory / "sweep.jsonl").read_text().splitlines())
    assert (best["name"], best["is_best"], best["bound"]) == ("run-2", True, 3.01)
    assert (best["bound_standard_error"], best["values"]) == (0.01, {"optimizer.learning_rate": "2e-3"})
    assert (failed["status"], failed["bound"], failed["error"]) == ("failed", None, ["ValueError: <b>no|memory</b>"])


def test_runs_with_other_tokens_are_compared_by_bytes(tmp_path: Path) -> None:
    sweep, runs = sweep_of(tmp_path, key="tokenizer.vocab_size")
    for name, bound, bits in (("run-0", 3.0, 1.2), ("run-2", 4.0, 1.1)):
        write_lines(sweep.run_path(name) / "metrics.jsonl", metrics(30, loss=3.0))
        finish(sweep.run_path(name), bound, bits_per_byte=bits)
    results = read_results(sweep, runs)
    assert results[0].name == "run-2"
    assert "bits per byte" in build_page(sweep, results).notes[0]


def test_runs_on_other_texts_or_at_the_same_time_have_notes(tmp_path: Path) -> None:
    sweep, runs = sweep_of(tmp_path, "data.row_length")
    first, second = build_page(replace(sweep, jobs=2), runs).notes
    assert "[data]" in first and "2 runs" in second
