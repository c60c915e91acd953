"""What a sweep reads of its runs, and its page."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from optuna.distributions import FloatDistribution

from cli.sweep.definition import Setting, Sweep
from cli.sweep.report import build_page, read_results, write_report
from cli.sweep.results import read_inference_result, read_training_result
from cli.sweep.study import SweepRun, importances
from logger.pages import Chart, Number, Page
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
    result = read_training_result(tmp_path)
    assert (result.is_final, result.step) == (False, 20)
    assert result.numbers == {"tokens_per_second": Number(9.0), "bound": Number(4.0, error=0.5)}
    finish(tmp_path, 3.5)
    result = read_training_result(tmp_path)
    assert (result.is_final, result.step) == (True, 20)
    assert result.numbers == {
        "bound": Number(3.5, error=0.01),
        "bits_per_byte": Number(1.75, error=0.005),
        "tokens_per_second": Number(200.0),
    }
    finish(tmp_path, float("nan"))
    assert "bound" not in read_training_result(tmp_path).numbers
    nothing = read_training_result(tmp_path / "missing")
    assert (nothing.numbers, nothing.step, nothing.is_final) == ({}, None, False)


def answer(prompt: str, output: str, tokens: int, forwards: int, batch: int, logprob: float | None) -> dict[str, Any]:
    numbers = {"num_tokens": tokens, "num_forwards": forwards, "batch_size": batch, "seconds": 2.0}
    return {"text": {"prompt": prompt, "output": output}, "metrics": numbers | {"mean_logprob": logprob}}


def test_answers_of_two_batches(tmp_path: Path) -> None:
    """A batch of two that took 2 seconds, and one of one that took as long."""
    lines = [answer("a", "b", 6, 3, 2, -1.0), answer("c", "d", 2, 1, 2, -2.0), answer("e", "", 0, 4, 1, None)]
    write_lines(tmp_path / "answers.jsonl", *lines)
    result = read_inference_result(tmp_path)
    assert result.texts == (("a", "b"), ("c", "d"), ("e", ""))
    assert {name: number.value for name, number in result.numbers.items()} == {
        "forwards": 8.0,
        "tokens_per_second": 2.0,
        "tokens_per_forward": 1.0,
        "mean_logprob": (6 * -1.0 + 2 * -2.0) / 8,
    }


def sweep_of(path: Path, command: str = "train", key: str = "optimizer.learning_rate") -> tuple[Sweep, list[SweepRun]]:
    """Five runs: two done, one failed, one interrupted on its way, one pruned."""
    sweep = Sweep(command, None, [Setting(key, ("0e-3", "1e-3", "2e-3", "3e-3", "4e-3"))], path)
    statuses: list[Any] = ["done", "failed", "done", "interrupted", "pruned"]
    runs = [
        SweepRun(f"run-{number}", {key: f"{number}e-3"}, status, seconds=60.0 + number, number=number)
        for number, status in enumerate(statuses)
    ]
    runs[1] = replace(runs[1], error=["ValueError: <b>no|memory</b>"])
    return sweep, runs


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Sweep, list[SweepRun]]:
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
    return sweep, runs


def page_of(sweep: Sweep, runs: list[SweepRun]) -> Page:
    return build_page(sweep, read_results(sweep, runs))


def charts_of(page: Page) -> dict[str, Chart]:
    return {part.title: part for parts in page.sections.values() for part in parts if isinstance(part, Chart)}


def test_the_report_of_training_runs(trained: tuple[Sweep, list[SweepRun]], golden: Any) -> None:
    sweep, runs = trained
    text = render_text(write_report(sweep, runs), StringIO())
    golden("terminal.txt", text.replace(str(sweep.directory), "DIR"))
    golden("sweep.markdown.txt", (sweep.directory / "sweep.md").read_text())
    page = (sweep.directory / "sweep.html").read_text()
    assert "&lt;/script&gt;&lt;b&gt;second" in page and "<b>second" not in page and "logs/run-1.log" in page
    best, *_, failed = map(json.loads, (sweep.directory / "sweep.jsonl").read_text().splitlines())
    assert (best["name"], best["is_best"], best["bound"]) == ("run-2", True, 3.01)
    assert (best["bound_standard_error"], best["values"]) == (0.01, {"optimizer.learning_rate": "2e-3"})
    assert (failed["status"], failed["bound"], failed["error"]) == ("failed", None, ["ValueError: <b>no|memory</b>"])


def test_charts_by_key_have_a_logarithmic_axis_or_labels(trained: tuple[Sweep, list[SweepRun]]) -> None:
    sweep, runs = trained
    log_range = Setting("optimizer.learning_rate", ("1e-3", "1e-1"), FloatDistribution(1e-3, 1e-1, log=True))
    runs[0] = replace(runs[0], values={"optimizer.learning_rate": "1e-3"})
    assert charts_of(page_of(replace(sweep, settings=[log_range]), runs))["By learning_rate"].x_is_log
    kinds = ("adamw", "muon", "lion", "adamw", "muon")
    runs = [replace(run, values={"optimizer.kind": kind}) for run, kind in zip(runs, kinds, strict=True)]
    by_kind = charts_of(page_of(sweep, runs))["By kind"]
    assert by_kind.x_labels == ("adamw", "lion", "muon")
    assert [[*line.x_N] for line in by_kind.lines] == [[0, 1], [2]]


def test_runs_of_other_machines_have_the_objective_of_the_study(tmp_path: Path) -> None:
    sweep, runs = sweep_of(tmp_path)
    runs[2] = replace(runs[2], value=3.25)
    best = read_results(sweep, runs)[0]
    assert (best.name, best.is_best, best.result.numbers) == ("run-2", True, {"bound": Number(3.25)})


def test_runs_with_other_tokens_are_compared_by_bytes(tmp_path: Path) -> None:
    sweep, runs = sweep_of(tmp_path, key="tokenizer.vocab_size")
    for name, bound, bits in (("run-0", 3.0, 1.2), ("run-2", 4.0, 1.1)):
        write_lines(sweep.run_path(name) / "metrics.jsonl", metrics(30, loss=3.0))
        finish(sweep.run_path(name), bound, bits_per_byte=bits)
    assert read_results(sweep, runs)[0].name == "run-2"
    assert "bits per byte" in page_of(sweep, runs).notes[0]


def test_keys_that_a_run_does_not_set_come_from_its_config(tmp_path: Path) -> None:
    sweep, runs = sweep_of(tmp_path)
    runs[1] = replace(runs[1], values={"optimizer.learning_rate": "1e-3", "training.batch_size": "8"})
    sweep.toml_path("run-0").parent.mkdir()
    sweep.toml_path("run-0").write_text("[training]\nbatch_size = 4\n")
    values = {run.name: run.values["training.batch_size"] for run in read_results(sweep, runs)}
    assert (values["run-0"], values["run-1"], values["run-2"]) == ("4", "8", "none")


def test_the_outputs_of_inference_runs_are_compared(tmp_path: Path, golden: Any) -> None:
    sweep, runs = sweep_of(tmp_path / "sweep", "infer", "generation.steps")
    lines = [answer("a [MASK:2] d", "a b c d", 2, 1, 1, -1.0), answer("given", "made", 2, 1, 1, -1.0)]
    write_lines(sweep.run_path("run-0") / "answers.jsonl", *lines)
    write_lines(sweep.run_path("run-2") / "answers.jsonl", answer("given", "  ", 2, 1, 1, -1.0))
    write_report(sweep, runs)
    golden("infer.markdown.txt", (sweep.directory / "sweep.md").read_text())


@pytest.mark.parametrize(
    ("command", "key", "jobs", "fragments"),
    [
        ("infer", "model.path", 1, ["Different models"]),
        ("infer", "generation.steps", 1, []),
        ("train", "data.row_length", 2, ["[data]", "2 runs"]),
    ],
)
def test_notes(command: str, key: str, jobs: int, fragments: list[str], tmp_path: Path) -> None:
    sweep, runs = sweep_of(tmp_path, command, key)
    notes = page_of(sweep, [replace(runs[0], jobs=jobs), *runs[1:]]).notes
    assert len(notes) == len(fragments)
    assert all(fragment in note for fragment, note in zip(fragments, notes, strict=True))


def test_importances_find_the_key_that_decides() -> None:
    runs = [
        SweepRun("", {"rate": rate, "kind": kind}, "done", value=abs(float(rate) - 3.0) + 0.01 * (kind == "a"))
        for rate in ("1", "2", "3", "4", "5", "6")
        for kind in ("a", "b")
    ]
    shares = importances([*runs, SweepRun("", {"rate": "9", "kind": "a"}, "failed")])
    assert shares["rate"] > 0.8 and abs(sum(shares.values()) - 1.0) < 1e-9
    assert importances(runs[:3]) == {}
