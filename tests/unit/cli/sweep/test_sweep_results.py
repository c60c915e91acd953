"""What a sweep reads of its runs, and how it shows it: table, JSON lines and page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from cli.sweep.commands import SWEEP_COMMANDS
from cli.sweep.page import render_page
from cli.sweep.record import SweepDirectory, SweepRun
from cli.sweep.results import Measurement, last_metrics, read_inference_result, read_training_result
from cli.sweep.table import SweepTable, build_table, render_json_lines, render_markdown, render_text


def write_lines(path: Path, *records: Any, tail: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records) + tail)


def metrics(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "metrics": values}


def sample(step: int, prompt: str, completion: str) -> dict[str, Any]:
    return {"step": step, "event": "sample", "text": "for people", "values": {"given": prompt, "filled": completion}}


def finish(directory: Path, bound: float, error: float = 0.01, **evaluation: Any) -> None:
    values = {
        "nats_per_token": bound,
        "standard_error": error,
        "bits_per_byte": bound / 2,
        "bits_per_byte_standard_error": error / 2,
    }
    directory.mkdir(parents=True, exist_ok=True)
    summary = {"evaluation": values | evaluation, "tokens_seen": 600, "seconds": 3.0, "step": 30}
    (directory / "summary.json").write_text(json.dumps(summary))


def test_a_finished_run(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "metrics.jsonl",
        metrics(10, loss=5.0, loss_smooth=5.5, tokens_per_second=9.0),
        sample(10, "a [MASK:1]", "a -> b"),
        metrics(20, val_nats_per_token=4.0, val_standard_error=0.5, val_bits_per_byte=1.0),
        metrics(30, loss=4.0, tokens_per_second=11.0),
        sample(30, "it's\n[MASK:1]", 'it\'s\n"x"'),
        tail='{"step": 40, "metr',
    )
    finish(tmp_path, 3.5)
    result = read_training_result(tmp_path)
    assert result.is_final
    assert result.step == 30
    assert result.numbers == {
        "bound": Measurement(3.5, 0.01),
        "bits_per_byte": Measurement(1.75, 0.005),
        "tokens_per_second": Measurement(200.0),
    }
    assert result.texts == (("it's\n[MASK:1]", 'it\'s\n"x"'),)
    assert result.curve == ((10, 5.5), (30, 4.0))


def test_active_and_empty_runs_are_listed(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "metrics.jsonl",
        metrics(10, loss=None, tokens_per_second=9.0),
        metrics(20, val_nats_per_token=4.0, val_standard_error=0.5),
        [1],
        {"step": "x"},
    )
    result = read_training_result(tmp_path)
    assert (result.is_final, result.step) == (False, 20)
    assert result.numbers == {"tokens_per_second": Measurement(9.0), "bound": Measurement(4.0, 0.5)}
    nothing = read_training_result(tmp_path / "missing")
    assert (nothing.numbers, nothing.step, nothing.is_final) == ({}, None, False)


def test_a_bound_that_is_not_finite_is_none(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", metrics(20, val_nats_per_token=4.0))
    finish(tmp_path, float("nan"))
    assert "bound" not in read_training_result(tmp_path).numbers


def test_the_last_numbers_of_a_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_metrics(path) is None
    write_lines(path, metrics(1, loss=3.0), metrics(2, loss=2.0), metrics(2, val_nats_per_token=1.0), tail="{")
    assert last_metrics(path) == (2, {"loss": 2.0})


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


def sweep_of(path: Path, command: str = "train", key: str = "optimizer.learning_rate") -> SweepDirectory:
    """Four runs: two done, one failed, one interrupted on its way."""
    sweep = SweepDirectory(path, SWEEP_COMMANDS[command])
    statuses: list[Any] = ["done", "failed", "done", "interrupted"]
    for number, status in enumerate(statuses):
        run = SweepRun(f"run-{number}", {key: f"{number}e-3"}, status, seconds=60.0 + number)
        sweep.runs[run.name] = run
    sweep.runs["run-1"].error = ["ValueError: <b>no|memory</b>"]
    return sweep


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDirectory:
    sweep_directory = sweep_of(tmp_path)
    finish(sweep_directory.run_path("run-0"), 3.02)
    finish(sweep_directory.run_path("run-2"), 3.01)
    for name, text in (("run-0", "first"), ("run-2", "</script><b>second")):
        lines = [metrics(10, loss=5.0), metrics(30, loss=3.0), sample(30, "a [MASK:1]", text)]
        write_lines(sweep_directory.run_path(name) / "metrics.jsonl", *lines)
    write_lines(
        sweep_directory.run_path("run-3") / "metrics.jsonl", metrics(7, val_nats_per_token=2.0, val_standard_error=0.1)
    )
    sweep_directory.log_path("run-1").parent.mkdir()
    sweep_directory.log_path("run-1").write_text("x")
    (sweep_directory.run_path("run-2") / "report.html").write_text("x")
    return sweep_directory


def test_the_table_is_sorted_by_the_bound(sweep: SweepDirectory) -> None:
    table = build_table(sweep)
    assert [row.name for row in table.rows] == ["run-2", "run-0", "run-3", "run-1"]
    assert [row.is_best for row in table.rows] == [True, False, False, False]
    lines = render_text(table).splitlines()
    words = [" ".join(line.split()) for line in lines]
    assert words[0] == "learning_rate bound, nats per token bits per byte tokens/s time status"
    assert words[2] == "2e-3 3.0100 +- 0.0100 1.5050 +- 0.0050 200 1:02 done, best"
    assert words[4] == "3e-3 2.0000 +- 0.1000 1:03 interrupted at step 7"
    assert words[5] == "1e-3 1:01 failed"
    assert len({line.index(" 1:0") + 5 for line in lines[2:6]}) == 1
    assert len(table.notes) == 2 and "1 other" in table.notes[0] and "run.seed" in table.notes[0]


def test_records_for_programs_and_people(sweep: SweepDirectory) -> None:
    table = build_table(sweep)
    best, *_, failed = map(json.loads, render_json_lines(table).splitlines())
    assert (best["name"], best["is_best"], best["bound"]) == ("run-2", True, 3.01)
    assert (best["bound_standard_error"], best["values"]) == (0.01, {"optimizer.learning_rate": "2e-3"})
    assert (failed["status"], failed["bound"], failed["error"]) == ("failed", None, ["ValueError: <b>no|memory</b>"])
    markdown = render_markdown(table, "a|b").splitlines()
    assert markdown[0] == r"# a\|b"
    assert markdown[4].startswith("| **2e-3** | **3.0100 +- 0.0100** |")
    assert "    ValueError: <b>no|memory</b>" in markdown


def test_runs_with_other_tokens_are_compared_by_bytes(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, key="tokenizer.vocab_size")
    finish(sweep.run_path("run-0"), 3.0, bits_per_byte=1.2)
    finish(sweep.run_path("run-2"), 4.0, bits_per_byte=1.1)
    table = build_table(sweep)
    assert table.rows[0].name == "run-2"
    assert "bits per byte" in table.notes[0]


def test_notes_on_different_data_and_concurrent_runs(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, key="data.row_length")
    sweep.runs["run-0"].jobs = 2
    data_note, speed_note = build_table(sweep).notes
    assert "[data]" in data_note and "2 runs" in speed_note


class Page(HTMLParser):
    """A parsed page: links, ids, sources and texts; all elements must be closed."""

    VOID = ("meta", "link", "br", "img", "polyline")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.sources: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "a":
            self.links.append(attributes["href"] or "")
        self.sources += [value or "" for name, value in attrs if name == "src" or (tag == "link" and name == "href")]
        self.ids |= {attributes["id"] or ""} if "id" in attributes else set()
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))


def page_of(table: SweepTable, path: Path) -> tuple[Page, str]:
    html = render_page(table, "Sweep <x>", path)
    return Page(html), html


def test_the_page_of_training_runs(sweep: SweepDirectory) -> None:
    page, html = page_of(build_table(sweep), sweep.path)
    assert "<!--slot:" not in html
    assert ("h1", "Sweep <x>") in page.texts
    assert page.sources == ["data:,"]  # no external resources
    assert {link[1:] for link in page.links if link.startswith("#")} <= page.ids
    assert sorted({link for link in page.links if not link.startswith("#")}) == [
        "logs/run-1.log",
        "runs/run-2/report.html",
    ]
    texts = [text for tag, text in page.texts if tag == "pre"]
    assert texts[:3] == ["a [MASK:1]", "</script><b>second", "first"]
    assert "ValueError: <b>no|memory</b>" in texts
    assert html.count('aria-sort="ascending"') == 2  # the heading of the bound, and a string in the script
    assert html.count("<polyline") == 3  # one curve in the first card, two in the second


def test_the_page_of_inference_runs(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, "infer", "generation.steps")
    write_lines(sweep.run_path("run-0") / "answers.jsonl", answer("given", "made", 2, 1, 1, -1.0))
    write_lines(sweep.run_path("run-2") / "answers.jsonl", answer("given", "  ", 2, 1, 1, -1.0))
    table = build_table(sweep)
    assert [row.name for row in table.rows] == ["run-0", "run-1", "run-2", "run-3"]
    page, _ = page_of(table, tmp_path)
    assert [text for tag, text in page.texts if tag == "pre"][:2] == ["given", "made"]
    assert ("p", "only whitespace") in page.texts


@pytest.mark.parametrize(("key", "num_notes"), [("model.path", 1), ("generation.steps", 0)])
def test_note_on_different_models(key: str, num_notes: int, tmp_path: Path) -> None:
    assert len(build_table(sweep_of(tmp_path, "infer", key)).notes) == num_notes
