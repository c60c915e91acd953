"""The page of a report: each as one golden file, its notes on problems, and that no content of a run can break it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logger.pages.html import render_html
from logger.pages.markdown import render_markdown
from logger.report import build_page, read_run, read_runs, write_report
from logger.report.charts import main_charts, other_metrics


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


def html_of(*folders: Path) -> str:
    return render_html(build_page(read_runs(list(folders))))


def test_reports_are_their_golden_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    quick, other = make_run(Path("quick")), make_run(Path("other"), steps=4, learning_rate=0.02, merges="h e")
    page = build_page(read_runs([quick]))
    golden("run.html", render_html(page))
    golden("run.markdown.txt", render_markdown(page))
    golden("runs.markdown.txt", render_markdown(build_page(read_runs([quick, other]))))


def test_metrics_that_no_chart_knows_have_a_section_and_large_families_a_table(tmp_path: Path) -> None:
    metrics: dict[str, Any] = {"temperature/cpu": 40.0, "void": None}
    folder = make_run(tmp_path / "quick", **metrics)
    norms = {f"weight_norms/layers.{index}": float(index) for index in range(300)}
    with (folder / "metrics.jsonl").open("a") as file:
        for step in (1, 2):
            values = {name: value * step for name, value in norms.items()}
            file.write(json.dumps({"step": step, "metrics": {**values, "weight_norms/mean": 1.0 * step}}) + "\n")
        file.write('{"step": 6, "metrics": {"temperature/cpu": 44.0}}\n')
    charts, rest = other_metrics([read_run(folder)])
    assert [chart.title for chart in charts] == ["temperature/cpu"]
    assert set(rest) == {"void", *norms}
    assert "Norms of weights" in [chart.title for chart in main_charts([read_run(folder)])]
    assert "weight_norms/layers.299" in html_of(folder)


def test_values_that_are_none_leave_gaps_and_are_counted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "quick", steps=12)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    broken = [
        re.sub(r'"grad_l2_norm": [\d.]+', '"grad_l2_norm": NaN', line) if '"step": 5,' in line else line
        for line in lines
    ]
    (folder / "metrics.jsonl").write_text("\n".join(broken) + "\n")
    page = html_of(folder)
    assert "1 value is not finite." in page
    raw = re.search(r'class="raw" d="([^"]+)"', page[page.index("Gradient norm") :])
    assert raw is not None and raw[1].count("M") == 2


def test_a_report_that_fails_keeps_the_old_one(tmp_path: Path) -> None:
    folder, output = make_run(tmp_path / "quick", steps=3), tmp_path / "out" / "page.html"
    output.parent.mkdir()
    assert [run.name for run in write_report([folder], output)] == ["quick"]
    assert sorted(output.parent.iterdir()) == [output, output.with_suffix(".md")]
    before = output.read_bytes()
    with pytest.raises(ValueError, match="no such directory"):
        write_report([folder, tmp_path / "missing"], output)
    assert output.read_bytes() == before
