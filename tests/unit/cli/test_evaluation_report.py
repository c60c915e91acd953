"""The report of evaluations: numbers, pairs, curves, hostile contents, and the command that writes it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.eval.report.comparing import compare_pairs, select_examples
from cli.eval.report.contents import build_contents, cut_text
from cli.eval.report.curve import build_curves, draw_curves, name_curves
from cli.eval.report.markdown import render_markdown
from cli.eval.report.page import render_page
from cli.eval.report.reading import ReportedTask, TaskReport, read_evaluations
from cli.report import main
from diffusionlm.evaluation.grading.speed_quality import accuracy_under_parallelism
from diffusionlm.evaluation.tasks.results import (
    EvaluationResults,
    ItemResult,
    MetricValue,
    OutcomeShares,
    VariantResult,
    format_item_line,
    read_results,
    write_results,
)
from logger.pages.charts import draw_charts

HOSTILE = "</pre><script>alert(1)</script>\u202e|`````\x1b[31m\0 *b* ﷽ שלום"


def build_item(name: str, is_right: bool, **values: Any) -> ItemResult:
    fields: dict[str, Any] = {
        "task": "gsm8k", "variant": "base", "repeat": 0, "prompt_sha256": "", "gold": f"gold {name}",
        "extracted": {"strict": "7" if is_right else None}, "output": f"so it is {name}", "finish_reason": "stop",
        "num_tokens": 30, "num_forwards": 10,
    }  # fmt: skip
    return ItemResult(id=name, is_correct={"strict": is_right}, **{**fields, **values})


def build_variant(name: str, accuracy: float, speed: float, num_items: int, **protocol: Any) -> VariantResult:
    return VariantResult(
        task="gsm8k", kind="gsm8k", variant=name, model="runs/model", num_items=num_items, num_repeats=1,
        metrics={"strict": MetricValue(accuracy, 0.02)}, shares=OutcomeShares(0.9, 0.1, 0.0, 0.0004),
        num_tokens=round(1000 * speed), num_forwards=1000, seconds=75.0, protocol=protocol,
        fingerprints={"model": "abc"},
    )  # fmt: skip


def write_run(folder: Path, answers: dict[str, list[bool]], **changes: Any) -> Path:
    """An evaluation: the answers of each variant are right or wrong."""
    (folder / "items").mkdir(parents=True)
    results = []
    for number, (name, flags) in enumerate(answers.items()):
        items = [build_item(str(index), flag, variant=name, **changes) for index, flag in enumerate(flags)]
        lines = "".join(format_item_line(item) + "\n" for item in items)
        (folder / "items" / f"{number}.jsonl").write_text(lines, encoding="utf-8")
        accuracy = sum(flags) / len(flags)
        results.append(
            build_variant(name, accuracy, number + 1.0, len(flags), generation={"threshold": 1.0 - number / 10})
        )
    command = f"diffusionlm-eval --model {HOSTILE}"
    write_results(folder, EvaluationResults(results=tuple(results), command=command, notes=("a note",)))
    return folder


def render(report: TaskReport) -> tuple[str, str]:
    """The page and the Markdown."""
    tasks = [build_contents(task) for task in report.tasks]
    return render_page(report, tasks), render_markdown(report, tasks)


def read_task(*folders: Path) -> ReportedTask:
    [task] = read_evaluations(folders).tasks
    return task


def test_the_page_shows_metrics_shares_costs_protocol_and_command(tmp_path: Path) -> None:
    report = read_evaluations([write_run(tmp_path / "run", {"base": [True, False], "fast": [True, True]})])
    page, text = render(report)
    for part in ("50.0 % ± 2.0", "100.0 % ± 2.0", "90.0 %", "10.0 %", "&lt; 0.1 %", "1.00", "2.00", "1:15", "a note"):
        assert part in page
        assert part.replace("&lt;", r"\<") in text
    for part in ("generation.threshold", "0.9", "abc", "diffusionlm-eval --model", "tokens per forward", "gsm8k"):
        assert part in page and part in text.replace("\\", "")


def test_rows_of_samples_leave_out_what_the_accuracy_says(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"base": [True, False]})
    results = read_results(folder)
    samples = {"strict": {1: MetricValue(0.5), 4: MetricValue(0.75)}}
    changed = tuple(replace(result, pass_at_k=samples) for result in results.results)
    write_results(folder, replace(results, results=changed))
    contents = build_contents(read_task(folder))
    assert contents.results.heads == ("strict", "pass@4", "items")
    assert contents.answers.heads[0] == "tokens per forward" and contents.answers.heads[-1] == "time"


def test_accuracies_have_no_axis_below_zero(tmp_path: Path) -> None:
    """Neither by a margin around zeros, nor by an error bar of a small accuracy."""
    for name, flags in (("none", [False] * 2), ("few", [True, *[False] * 99])):
        curves = build_contents(read_task(write_run(tmp_path / name, {"base": flags, "fast": flags}))).curves
        assert curves is not None
        html = draw_charts([draw_curves(curves)], [])
        labels = re.findall(r">(-?[\d.]+)</text>", html)
        assert labels and "0" in labels and not any(label.startswith("-") for label in labels)


def test_pairs_have_the_numbers_of_the_paired_test(tmp_path: Path) -> None:
    flags = {"base": [True, False, False, True], "fast": [True, True, True, False]}
    [pair] = compare_pairs(read_task(write_run(tmp_path / "run", flags)))
    result = pair.difference
    assert (pair.first, pair.second, pair.num_left_out) == ("base", "fast", 0)
    assert (result.difference, result.num_a_better, result.num_b_better, result.p_value) == (0.25, 2, 1, 1.0)
    assert result.standard_error == pytest.approx(math.sqrt(3 - 1 / 4) / 4)


def test_runs_of_other_items_are_compared_on_the_items_in_common(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", {"base": [True, True, False]})
    second = write_run(tmp_path / "b", {"base": [False, True]})
    lines = (second / "items" / "0.jsonl").read_text().splitlines()
    other = build_item("2", True, gold="another answer")
    (second / "items" / "0.jsonl").write_text("\n".join([*lines, format_item_line(other)]) + "\n")
    report = read_evaluations([first, second, first])
    [pair] = compare_pairs(report.tasks[0])
    assert (pair.first, pair.second) == ("a/base", "b/base")
    assert (pair.difference.num_items, pair.num_left_out, pair.difference.difference) == (2, 2, -0.5)
    [note] = [note for note in report.notes if "different items" in note]
    assert "(3, 3; 2 in common)" in note and "gsm8k" in note
    assert "2 (2 left out)" in render(report)[0]


def test_missing_answers_are_reported(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"base": [True, False], "fast": [True, True]})
    (folder / "items" / "1.jsonl").unlink()
    report = read_evaluations([folder])
    assert any("fast, gsm8k: 0 of 2 answers" in note for note in report.notes)
    assert "100.0 %" in render(report)[0] and compare_pairs(report.tasks[0]) == []


def test_examples_are_flips_and_items_that_all_answer_wrong(tmp_path: Path) -> None:
    flags = {"base": [True, False, False, True], "fast": [True, True, False, False]}
    groups = select_examples(read_task(write_run(tmp_path / "run", flags)))
    shown = {group.title: [item.id for item in group.items] for group in groups}
    assert shown == {
        "fast right, base wrong": ["1"],
        "base right, fast wrong": ["3"],
        "Wrong with every variant": ["2"],
    }
    labels = [(label, answer.is_correct["strict"]) for label, answer in groups[0].items[0].answers]
    assert labels == [("fast", True), ("base", False)]


def test_examples_of_repeats_show_the_answer_that_differs(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"base": [True], "fast": [True]})
    repeats = [build_item("0", repeat == 0, repeat=repeat, output=f"answer {repeat}") for repeat in range(2)]
    (folder / "items" / "0.jsonl").write_text("".join(format_item_line(item) + "\n" for item in repeats))
    [group] = select_examples(read_task(folder))
    assert [answer.output for _, answer in group.items[0].answers] == ["so it is 0", "answer 1"]


def test_curves_group_by_texts_and_split_by_other_numbers() -> None:
    settings = {
        f"{strategy} {threshold} {block}": {
            "strategy": strategy, "threshold": threshold, "block": block, "steps": 2 * threshold, "shots": 5
        }
        for strategy in ("threshold", "entropy")
        for threshold in (1, 2, 3)
        for block in (8, 32)
    }  # fmt: skip
    names = name_curves(settings)
    assert len(set(names.values())) == 4
    assert names["entropy 1 8"] == names["entropy 3 8"] == "entropy, block 8"
    assert set(name_curves({"a": {"x": 1}, "b": {"x": 2}}).values()) == {"all variants"}
    assert set(name_curves({"a": {}, "b": {}}).values()) == {"all variants"}


def test_the_curve_has_the_points_and_their_aup(tmp_path: Path) -> None:
    flags = {"base": [True] * 7 + [False], "fast": [True] * 7 + [False], "wild": [True, False] * 4}
    curves = build_curves(read_task(write_run(tmp_path / "run", flags)))
    assert curves is not None and curves.best_accuracy == 87.5
    [curve] = curves.curves
    points = [(1.0, 87.5), (2.0, 87.5), (3.0, 50.0)]
    assert [(point.tokens_per_forward, point.accuracy) for point in curve.points] == points
    assert curve.aup == accuracy_under_parallelism(points, 87.5) == pytest.approx(175.0)
    assert "AUP, y_max = 87.5" in render(read_evaluations([tmp_path / "run"]))[0]


def test_without_a_right_answer_there_is_no_aup(tmp_path: Path) -> None:
    curves = build_curves(read_task(write_run(tmp_path / "run", {"base": [False], "fast": [False]})))
    assert curves is not None and [curve.aup for curve in curves.curves] == [None]
    page, text = render(read_evaluations([tmp_path / "run"]))
    assert "AUP" not in page + text and "No answer is right." in page
    assert build_curves(read_task(write_run(tmp_path / "one", {"base": [False]}))) is None


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {HOSTILE: [True, False], "fast": [False, True]}, output=HOSTILE, gold=HOSTILE)
    report = read_evaluations([folder])
    page, text = render(report)
    assert "<script>alert" not in page and page.count("</script>") == 2
    assert "\x1b" not in page + text and "\0" not in page + text
    assert "``````text" in text, "the fence is longer than the backticks in the text"
    rows = [line for line in text.splitlines() if line.startswith("| ") and "alert" in line]
    assert rows and all("<script" not in line.replace(r"\<", "") for line in rows)


def test_the_page_stays_small(tmp_path: Path) -> None:
    sizes: list[int] = []
    for name, number in (("few", 80), ("many", 400)):
        flags = {
            "base": [index % 2 == 0 for index in range(number)],
            "fast": [index % 3 == 0 for index in range(number)],
        }
        report = read_evaluations([write_run(tmp_path / name, flags, output="long " * 2_000)])
        sizes += map(len, render(report))
    assert sizes[2] < 1.05 * sizes[0] and sizes[3] < 1.05 * sizes[1] and max(sizes) < 400_000
    assert cut_text("x" * 2000, 10) == "xxxxxxxxxx ... (1,990 more characters)"


def test_single_items_ties_and_values_that_are_not_finite(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"base": [True], "fast": [True]})
    results = read_results(folder)
    for result, value in zip(results.results, (math.nan, math.inf), strict=True):
        result.metrics["strict"] = MetricValue(value, value)
    write_results(folder, results)
    json.loads((folder / "results.json").read_text(), parse_constant=pytest.fail)
    report = read_evaluations([folder])
    [pair] = compare_pairs(report.tasks[0])
    assert (pair.difference.difference, pair.difference.p_value, pair.difference.standard_error) == (0.0, 1.0, math.inf)
    for text in render(report):
        assert "not finite" in text and "nan %" not in text.lower() and "+0.0" in text


def test_likelihoods_are_no_percentages(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"base": [True], "fast": [False]})
    contents = json.loads((folder / "results.json").read_text())
    for result in contents["results"]:
        result["metrics"]["perplexity"] = {"value": 12.5, "standard_error": 0.25}
    (folder / "results.json").write_text(json.dumps(contents))
    page, text = render(read_evaluations([folder]))
    assert "12.5 ± 0.25" in page and "12.5 ± 0.25" in text and "1250" not in page
    [pair] = compare_pairs(read_task(folder))
    assert pair.rule == "strict"


def test_options_and_errors_of_an_answer_are_shown(tmp_path: Path) -> None:
    values = {
        "chosen": {"strict": 2},
        "option_log_likelihoods": (-1.25, -3.5),
        "error": "grader broke",
        "extracted": {},
    }
    page, _ = render(read_evaluations([write_run(tmp_path / "run", {"base": [False]}, **values)]))
    for part in ("wrong: option 2", "-1.25, -3.50", "grader broke", "stopped, 30 tokens, 10 forwards"):
        assert part in page


def test_the_command_writes_both_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("a"), {"base": [True]})
    write_run(Path("b"), {"base": [False]})
    main(["a"])
    assert "<title>a</title>" in Path("a/report.html").read_text() and Path("a/report.md").read_text().startswith(
        "# a\n"
    )
    main(["a", "b", "--output", "both.html"])
    assert "b/base - a/base" in Path("both.html").read_text() and "b/base - a/base" in Path("both.md").read_text()
    assert "both.html and both.md show 2 evaluations: a, b" in capsys.readouterr().out


def test_folders_that_are_no_evaluations_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", {"base": [True]})
    (tmp_path / "other").mkdir()
    for arguments, problem in (
        ([str(folder), str(tmp_path / "other")], "other is no finished evaluation"),
        ([str(folder), "--output", "x.txt"], "ends in .html"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert problem in capsys.readouterr().err
    (folder / "items" / "0.jsonl").write_text('{"torn')
    with pytest.raises(SystemExit, match="2"):
        main([str(folder)])
    assert "0.jsonl: line 1" in capsys.readouterr().err
    (folder / "results.json").write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        main([str(folder)])
    assert "results.json" in capsys.readouterr().err and not (folder / "report.html").exists()
