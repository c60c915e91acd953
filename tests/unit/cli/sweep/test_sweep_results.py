"""What a sweep reads of its runs, and how it shows it: table, JSON lines and page."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from cli.sweep.commands import SWEEP_COMMANDS
from cli.sweep.grid import PointLoader, Setting, ValueRange
from cli.sweep.page import render_page
from cli.sweep.plan import SweepPlan, SweepRun
from cli.sweep.results import Measurement, read_inference_result, read_training_result
from cli.sweep.study import importances
from cli.sweep.table import SweepTable, build_table, render_json_lines, render_markdown, text_parts
from cli.tables import render


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
    assert result.curve is not None and result.curve.last == (10, 5.5)


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


@dataclass
class Sweep:
    """A sweep without a study: its files and its runs."""

    plan: SweepPlan
    runs: list[SweepRun]

    def table(self) -> SweepTable:
        return build_table(self.plan, self.runs)


def sweep_of(path: Path, command: str = "train", key: str = "optimizer.learning_rate") -> Sweep:
    """Five runs: two done, one failed, one interrupted on its way, one pruned."""
    settings = [Setting(key, ("0e-3", "1e-3", "2e-3", "3e-3", "4e-3"))]
    plan = SweepPlan(PointLoader(SWEEP_COMMANDS[command], None, settings), path, "grid", None)
    statuses: list[Any] = ["done", "failed", "done", "interrupted", "pruned"]
    runs = [
        SweepRun(f"run-{number}", {key: f"{number}e-3"}, status, seconds=60.0 + number, number=number)
        for number, status in enumerate(statuses)
    ]
    runs[1] = replace(runs[1], error=["ValueError: <b>no|memory</b>"])
    return Sweep(plan, runs)


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    sweep = sweep_of(tmp_path)
    plan = sweep.plan
    for name, text in (("run-0", "first"), ("run-2", "a </script><b>second")):
        lines = [metrics(10, loss=5.0), metrics(30, loss=3.0), sample(30, "a [MASK:1]", text)]
        write_lines(plan.run_path(name) / "metrics.jsonl", *lines)
    finish(plan.run_path("run-0"), 3.02)
    finish(plan.run_path("run-2"), 3.01)
    for name, bound in (("run-3", 2.0), ("run-4", 5.0)):
        line = metrics(7, val_nats_per_token=bound, val_standard_error=0.1)
        write_lines(plan.run_path(name) / "metrics.jsonl", line)
    plan.log_path("run-1").parent.mkdir()
    plan.log_path("run-1").write_text("x")
    (plan.run_path("run-2") / "report.html").write_text("x")
    return sweep


def test_the_table_is_sorted_by_the_bound(sweep: Sweep) -> None:
    table = sweep.table()
    assert [row.run.name for row in table.rows] == ["run-2", "run-0", "run-3", "run-4", "run-1"]
    assert [row.is_best for row in table.rows] == [True, False, False, False, False]
    lines = render(text_parts(table), StringIO()).splitlines()
    words = [" ".join(line.split()) for line in lines]
    assert words[0] == "learning_rate bound, nats per token bits per byte tokens/s time status"
    assert words[1] == "2e-3 3.0100 +- 0.0100 1.5050 +- 0.0050 200 1:02 done, best"
    assert words[3] == "3e-3 2.0000 +- 0.1000 1:03 interrupted at step 7"
    assert words[4] == "4e-3 5.0000 +- 0.1000 1:04 pruned at step 7"
    assert words[5] == "1e-3 1:01 failed"
    assert len({line.index(" 1:0") + 5 for line in lines[1:6]}) == 1
    assert len(table.notes) == 2 and "1 other" in table.notes[0] and "run.seed" in table.notes[0]


def test_runs_of_other_machines_have_the_objective_of_the_study(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path)
    sweep.runs[2] = replace(sweep.runs[2], value=3.25)
    best = sweep.table().rows[0]
    assert (best.run.name, best.is_best, best.result.numbers) == ("run-2", True, {"bound": Measurement(3.25)})


def test_records_for_programs_and_people(sweep: Sweep) -> None:
    table = sweep.table()
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
    for name, bound, bits in (("run-0", 3.0, 1.2), ("run-2", 4.0, 1.1)):
        write_lines(sweep.plan.run_path(name) / "metrics.jsonl", metrics(30, loss=3.0))
        finish(sweep.plan.run_path(name), bound, bits_per_byte=bits)
    table = sweep.table()
    assert table.rows[0].run.name == "run-2"
    assert "bits per byte" in table.notes[0]


def test_notes_on_different_data_and_concurrent_runs(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, key="data.row_length")
    sweep.runs[0] = replace(sweep.runs[0], jobs=2)
    data_note, speed_note = sweep.table().notes
    assert "[data]" in data_note and "2 runs" in speed_note


def test_keys_that_a_run_does_not_set_come_from_its_config(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path)
    sweep.runs[1] = replace(sweep.runs[1], values={"optimizer.learning_rate": "1e-3", "training.batch_size": "8"})
    path = sweep.plan.config_path("run-0")
    path.parent.mkdir()
    path.write_text("[training]\nbatch_size = 4\n")
    rows = {row.run.name: row.values["training.batch_size"] for row in sweep.table().rows}
    assert (rows["run-0"], rows["run-1"], rows["run-2"]) == ("4", "8", "none")


class Page(HTMLParser):
    """A parsed page: links, ids, sources and texts by element."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self._tag = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._tag, []).append(data)


def page_of(sweep: Sweep, importances: dict[str, float] | None = None) -> tuple[Page, str]:
    html = render_page(sweep.table(), "Sweep <x>", sweep.plan, importances or {})
    return Page(html), html


def test_the_page_of_training_runs(sweep: Sweep) -> None:
    page, html = page_of(sweep, {"optimizer.learning_rate": 1.0})
    assert page.texts["h1"][0] == "Sweep <x>"
    assert sorted({link for link in page.links if not link.startswith("#")}) == [
        "data:,",  # no external resources
        "logs/run-1.log",
        "runs/run-2/report.html",
    ]
    assert any("ValueError: <b>no|memory</b>" in text for text in page.texts["pre"])
    assert page.texts["mark"] == ["</script><b>second"]  # the fill of "a [MASK:1]"
    assert html.count('aria-sort="ascending"><button') == 1
    charts = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html)[1])  # type: ignore[index]
    history, by_rate, losses = charts
    assert [(line["name"], line["x"], line["y"]) for line in history["lines"]] == [
        ("done", [1, 2], [3.02, 3.01]),
        ("pruned, at the last validation", [3], [5.0]),
        ("best so far", [1, 2, 3], [3.02, 3.01, 3.01]),
    ]
    assert [(line["x"], line["y"]) for line in by_rate["lines"]] == [([0, 0.002], [3.02, 3.01]), ([0.004], [5.0])]
    assert [line["name"] for line in losses["lines"]] == ["learning_rate 2e-3", "learning_rate 0e-3"]
    assert "Importance" in html and "100%" in html


def test_a_logarithmic_range_has_a_logarithmic_axis(sweep: Sweep) -> None:
    """Also where the values differ by less than a decade; a curve of one point is a dot."""
    sweep.runs[0] = replace(sweep.runs[0], values={"optimizer.learning_rate": "1e-3"})
    numbers = ValueRange(1e-3, 1e-1, None, True, False)
    settings = [Setting("optimizer.learning_rate", ("1e-3", "1e-1"), numbers)]
    sweep.plan = replace(sweep.plan, load_point=PointLoader(SWEEP_COMMANDS["train"], None, settings))
    _, html = page_of(sweep)
    charts = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html)[1])  # type: ignore[index]
    assert charts[1]["xLog"] is True


def test_values_that_are_no_numbers_are_categories(sweep: Sweep) -> None:
    for index, kind in enumerate(("adamw", "muon", "lion", "adamw", "muon")):
        sweep.runs[index] = replace(sweep.runs[index], values={"optimizer.kind": kind})
    _, html = page_of(sweep)
    charts = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html)[1])  # type: ignore[index]
    assert charts[1]["xLabels"] == ["adamw", "lion", "muon"]
    assert [line["x"] for line in charts[1]["lines"]] == [[0, 1], [2]]


def test_the_page_of_inference_runs_marks_what_was_filled(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, "infer", "generation.steps")
    lines = [answer("a [MASK:2] d", "a b c d", 2, 1, 1, -1.0), answer("given", "made", 2, 1, 1, -1.0)]
    write_lines(sweep.plan.run_path("run-0") / "answers.jsonl", *lines)
    write_lines(sweep.plan.run_path("run-2") / "answers.jsonl", answer("given", "  ", 2, 1, 1, -1.0))
    assert [row.run.name for row in sweep.table().rows] == [f"run-{number}" for number in range(5)]
    page, html = page_of(sweep)
    assert re.findall(r"<mark>(.*?)</mark>", html) == ["b c"]
    assert '<span class="hole">2</span>' in html
    assert [text for text in page.texts["pre"] if text in ("given", "made", "(only whitespace)")] == [
        "given", "made", "(only whitespace)",
    ]  # fmt: skip


@pytest.mark.parametrize(("key", "num_notes"), [("model.path", 1), ("generation.steps", 0)])
def test_note_on_different_models(key: str, num_notes: int, tmp_path: Path) -> None:
    assert len(sweep_of(tmp_path, "infer", key).table().notes) == num_notes


def test_importances_find_the_key_that_decides() -> None:
    runs = [
        SweepRun("", {"rate": rate, "kind": kind}, "done", value=abs(float(rate) - 3.0) + 0.01 * (kind == "a"))
        for rate in ("1", "2", "3", "4", "5", "6")
        for kind in ("a", "b")
    ]
    shares = importances([*runs, SweepRun("", {"rate": "9", "kind": "a"}, "failed")])
    assert shares["rate"] > 0.8 and abs(sum(shares.values()) - 1.0) < 1e-9
    assert importances(runs[:3]) == {}
