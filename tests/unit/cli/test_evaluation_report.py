"""The report of evaluations: golden files, numbers, pairs, curves, and the command that writes it."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.eval.report import (
    ReportedTask,
    build_page,
    compare_pairs,
    draw_curves,
    name_curves,
    read_evaluations,
    select_examples,
    summarize,
)
from cli.report import main
from diffusionlm.evaluation.grading.comparison import accuracy_under_parallelism
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
from logger.pages import Chart, Number, Table
from logger.pages.markdown import render_markdown
from logger.pages.terminal import render_text
from tests.unit.cli.conftest import Fails

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
    ids = {"gsm8k": tuple(map(str, range(max(map(len, answers.values())))))}
    write_results(folder, EvaluationResults(results=tuple(results), command=command, notes=("a note",), item_ids=ids))
    return folder


def read_task(*folders: Path) -> ReportedTask:
    [task] = read_evaluations(folders).tasks
    return task


def markdown_of(*folders: Path) -> str:
    return render_markdown(build_page(read_evaluations(folders)))


def test_the_report_is_its_golden_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    """Numbers, pairs, curve, hostile texts and protocol, each built once."""
    monkeypatch.chdir(tmp_path)
    flags = {"base": [True, False, False], HOSTILE: [True, True, False]}
    folder = write_run(Path("run"), flags, output=f"the answer {HOSTILE}")
    results = read_results(folder)
    samples = {"strict": {1: MetricValue(0.5), 4: MetricValue(0.75)}}
    changed = replace(results.results[0], pass_at_k=samples)
    write_results(folder, replace(results, results=(changed, *results.results[1:])))
    report = read_evaluations([folder])
    page = build_page(report)
    golden("evaluation.markdown.txt", render_markdown(page))
    golden("evaluation.txt", render_text(summarize(report), io.StringIO()))


def test_pairs_have_the_numbers_of_the_paired_test(tmp_path: Path) -> None:
    flags = {"base": [True, False, False, True], "fast": [True, True, True, False]}
    [table] = compare_pairs(read_task(write_run(tmp_path / "run", flags)))
    [[pair, rule, difference, *rest]] = table.rows
    assert (pair, rule, rest) == ("fast - base", "strict", [Number(1.0, ".2g"), 2, 1, "4"])
    assert isinstance(difference, Number) and difference.value == 0.25
    assert difference.error == pytest.approx(math.sqrt(3 - 1 / 4) / 4)


def test_runs_of_other_items_are_compared_on_the_items_in_common(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", {"base": [True, True, False]})
    second = write_run(tmp_path / "b", {"base": [False, True, True]})
    lines = (second / "items" / "0.jsonl").read_text().splitlines()[:2]
    other = build_item("2", True, gold="another answer")
    (second / "items" / "0.jsonl").write_text("\n".join([*lines, format_item_line(other)]) + "\n")
    report = read_evaluations([first, second, first])
    [table] = compare_pairs(report.tasks[0])
    [[pair, _, difference, *_, items]] = table.rows
    assert isinstance(difference, Number)
    assert (pair, difference.value, items) == ("b/base - a/base", -0.5, "2 (2 left out)")
    assert any("gsm8k: the variants have different items (3, 3)" in note for note in report.notes)


def test_missing_answers_are_reported(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"base": [True, False], "fast": [True, True]})
    (folder / "items" / "1.jsonl").unlink()
    report = read_evaluations([folder])
    assert any("fast, gsm8k: 0 of 2 answers" in note for note in report.notes)
    assert "100.0%" in markdown_of(folder) and compare_pairs(report.tasks[0]) == []


def test_examples_of_repeats_show_the_answer_that_differs(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"base": [True], "fast": [True]})
    repeats = [build_item("0", repeat == 0, repeat=repeat, output=f"answer {repeat}") for repeat in range(2)]
    (folder / "items" / "0.jsonl").write_text("".join(format_item_line(item) + "\n" for item in repeats))
    results = read_results(folder)
    write_results(folder, replace(results, results=tuple(replace(each, num_repeats=2) for each in results.results)))
    [group] = select_examples(read_task(folder))
    assert [output.text for output in group.examples[0].outputs] == ["so it is 0", "answer 1"]


def test_curves_group_by_texts_and_split_by_other_numbers() -> None:
    settings = {
        f"{strategy} {threshold} {block}": {
            "strategy": strategy, "threshold": threshold, "block": block, "shots": 5
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
    chart, table = draw_curves(read_task(write_run(tmp_path / "run", flags)))
    assert isinstance(chart, Chart) and isinstance(table, Table)
    points = [(1.0, 87.5), (2.0, 87.5), (3.0, 50.0)]
    [curve] = chart.lines
    assert list(zip(curve.x_N.tolist(), curve.y_N.tolist(), strict=True)) == points
    assert table.rows[0][-1] == accuracy_under_parallelism(points, 87.5) == pytest.approx(175.0)
    assert "y_max = 87.5%" in table.note
    _, table = draw_curves(read_task(write_run(tmp_path / "none", {"base": [False], "fast": [False]})))
    assert isinstance(table, Table) and table.rows[0][-1] is None and table.note == "No answer is right."
    assert draw_curves(read_task(write_run(tmp_path / "one", {"base": [False]}))) == []


def test_single_items_ties_likelihoods_and_values_that_are_not_finite(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"base": [True], "fast": [True]})
    results = read_results(folder)
    for result, value in zip(results.results, (math.nan, math.inf), strict=True):
        result.metrics["strict"] = MetricValue(value, value)
        result.metrics["perplexity"] = MetricValue(12.5, 0.25)
    write_results(folder, results)
    json.loads((folder / "results.json").read_text(), parse_constant=pytest.fail)
    [table] = compare_pairs(read_task(folder))
    assert [(row[1], row[2]) for row in table.rows] == [("strict", Number(0.0, "+.1%"))]
    text = markdown_of(folder)
    assert "| not finite | 12.5 ± 0.25 |" in text and "| +0.0% |" in text and "nan" not in text.lower()


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


def test_folders_that_are_no_evaluations_are_refused(tmp_path: Path, fails: Fails) -> None:
    folder = write_run(tmp_path / "run", {"base": [True]})
    (tmp_path / "other").mkdir()
    for arguments, problem in (
        ([str(folder), str(tmp_path / "other")], "other/results.json: cannot be read"),
        ([str(folder), "--output", "x.txt"], "ends in .html"),
    ):
        assert problem in fails(main, *arguments)
    (folder / "items" / "0.jsonl").write_text('{"damaged\n')
    assert "0.jsonl: line 1" in fails(main, folder)
    (folder / "results.json").write_text("{}")
    assert "results.json" in fails(main, folder) and not (folder / "report.html").exists()
