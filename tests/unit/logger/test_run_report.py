"""The page of a report: each as one golden file, its notes on problems, and that no content of a run can break it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logger.pages import Chart
from logger.pages.markdown import render_markdown
from logger.report import build_page, read_run, read_runs, write_report
from logger.report.charts import main_charts, other_charts
from logger.report.reading import LoggedRun


def summary(nats: float, steps: int) -> dict[str, Any]:
    evaluation = {
        **{"nats_per_token": nats, "standard_error": 0.02, "unigram_entropy": 6.1},
        **{"bits_per_byte": nats / 3, "bits_per_byte_standard_error": 0.005},
        "by_masked_fraction": [[0.0, 0.5, 3.5], [0.5, 1.0, 4.5]],
        "fills": [{"fraction": 0.15, "top1_accuracy": 0.44, "top5_accuracy": 0.7, "majority_baseline": 0.02}],
        "block_length": None,
    }
    ngrams = {"2-gram, left to right": 4.33}
    return {"evaluation": evaluation, "ngrams": ngrams, "parameters": 1_115_520, "step": steps, "seconds": 62.0}


def sample(step: int, given: str, tokens: list[str], step_map: list[int | None]) -> dict[str, Any]:
    logprobs = [None if forward is None else math.log(0.5) for forward in step_map]
    values = {"given": given, "tokens": tokens, "step_map": step_map, "logprobs": logprobs}
    return {"step": step, "event": "sample", "text": "for people", "values": values}


def make_run(folder: Path, *, steps: int = 6, learning_rate: float = 0.01, merges: str = "t h", **more: Any) -> Path:
    """A complete run: a validation and a sample every other step, two skipped steps. ``more``: metrics of each step."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [{"step": 0, "event": "environment", "text": "environment: python 3.12; torch 2.15"}]
    for step in range(1, steps + 1):
        metrics = {
            "loss": 7.0 - math.log(step) + step % 2 / 5,
            "loss_smooth": 7.0 - math.log(step),
            "grad_l2_norm": 1.0 + 9.0 / step,
            "lr": learning_rate,
            "lr/hidden": learning_rate,
            "lr/embed": learning_rate / 2,
            "tokens_seen": 2048 * step,
            "tokens_per_second": 10_000.0,
            "skipped_steps": 2,
            "memory/peak_allocated": 2**30,
            **more,
        }
        lines.append({"step": step, "metrics": metrics})
        if step % 2 == 0:
            validation = {"val_nats_per_token": 5.0 - step / 5, "val_standard_error": 0.05, "val_bits_per_byte": 2.0}
            lines.append({"step": step, "metrics": {**validation, "val_top1_accuracy/0.15": 0.4}})
            lines.append(sample(step, "for i in[MASK:2](10):", ["for i in", "<b", ">", "(10):"], [None, 2, 1, None]))
    lines += [{"step": step, "event": "skipped", "text": f"step {step}: skipped, loss nan"} for step in (3, 4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (folder / "config.toml").write_text(
        f'[run]\nseed = 0\ndirectory = "{folder}"\n[training]\nmax_steps = {steps}\n'
        f"[optimizer]\nlearning_rate = {learning_rate}\n",
        encoding="utf-8",
    )
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text(merges, encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(summary(3.983, steps)), encoding="utf-8")
    return folder


def test_reports_are_their_golden_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    quick, other = make_run(Path("quick")), make_run(Path("other"), steps=4, learning_rate=0.02, merges="h e")
    page = build_page(read_runs([quick]))
    golden("run.markdown.txt", render_markdown(page))
    both = build_page(read_runs([quick, other]))
    titles = [chart.title for chart in both.sections["Curves"] if isinstance(chart, Chart)]
    assert {"Learning rate, hidden", "Learning rate, embed", "Gradient norm"} < {*titles}
    sections = {name: both.sections[name] for name in ("Results", "Config")}
    golden("runs.markdown.txt", render_markdown(replace(both, sections=sections)))


def test_metrics_that_no_chart_knows_have_one_without_norms_of_each_parameter(tmp_path: Path) -> None:
    metrics: dict[str, Any] = {
        "temperature/cpu": 40.0,
        "void": None,
        "weight_norms/layers.0": 1.0,
        "weight_norms/mean": 1.0,
    }
    runs = [read_run(make_run(tmp_path / "quick", **metrics))]
    assert [chart.title for chart in other_charts(runs)] == ["temperature/cpu"]
    assert "Norms of weights" in [chart.title for chart in main_charts(runs)]


def test_values_that_are_none_are_counted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "quick", steps=12)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "metrics": {"grad_l2_norm": NaN}}\n')
    [chart] = [chart for chart in main_charts([read_run(folder)]) if chart.title == "Gradient norm"]
    assert "not finite: 1" in chart.note and np.isnan(chart.lines[0].y_N).sum() == 1


def test_a_report_that_fails_keeps_the_old_one(tmp_path: Path) -> None:
    folder, output = make_run(tmp_path / "quick", steps=3), tmp_path / "out" / "page.html"
    output.parent.mkdir()
    assert [run.name for run in write_report([folder], output)] == ["quick"]
    assert sorted(output.parent.iterdir()) == [output, output.with_suffix(".md")]
    before = output.read_bytes()
    with pytest.raises(ValueError, match="missing has no metrics"):
        write_report([folder, tmp_path / "missing"], output)
    assert output.read_bytes() == before


@pytest.mark.parametrize(
    ("key", "is_flagged"),
    [("model.max_position_embeddings", True), ("validation.rows", True), ("data.workers", False)],
)
def test_runs_of_other_validation_texts_are_flagged(key: str, is_flagged: bool) -> None:
    runs = [LoggedRun(str(value), Path(str(value)), config={key: value}) for value in (2, 4)]
    assert any("their validation texts may differ" in note for note in build_page(runs).notes) == is_flagged
