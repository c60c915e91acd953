"""The files of a run of tasks: written and read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diffusionlm.evaluation.tasks.results import (
    EvaluationResults,
    ItemResult,
    MetricValue,
    OutcomeShares,
    VariantResult,
    format_item_line,
    parse_item_line,
    read_items,
    read_results,
    write_results,
)

GENERATED = ItemResult(
    task="gsm8k", variant="a", id="7", repeat=1, prompt_sha256="00", gold="18", output="= 18\u2028 \n#### 18",
    extracted={"strict": "18", "flexible": None}, is_correct={"strict": 1.0, "flexible": 0.0},
    finish_reason="stop", num_tokens=9, num_forwards=4, seconds=0.5,
)  # fmt: skip
CHOICE = ItemResult(
    task="arc", variant="a", id="7", repeat=0, prompt_sha256="00", gold="1", is_correct={"acc": 1.0},
    option_log_likelihoods=(-1.5, -1.25), option_standard_errors=(0.0, 0.125), chosen={"acc": 1},
)  # fmt: skip


@pytest.mark.parametrize("item", [GENERATED, CHOICE])
def test_item_lines_are_read_back(item: ItemResult, tmp_path: Path) -> None:
    line = format_item_line(item)
    assert "\n" not in line
    assert parse_item_line(line, "here") == item
    path = tmp_path / "a.jsonl"
    path.write_text(f"{line}\n{line}\n", encoding="utf-8")
    assert list(read_items(path)) == [item, item]
    assert "option_log_likelihoods" not in json.loads(format_item_line(GENERATED))


def test_bad_lines_are_located(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{format_item_line(CHOICE)}\n{{"task": "arc"}}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.jsonl: line 2: .*is_correct"):
        list(read_items(path))


def test_results_are_read_back(tmp_path: Path) -> None:
    variant = VariantResult(
        task="gsm8k", kind="gsm8k", variant="a", model="runs/a", num_items=2, num_repeats=4,
        metrics={"strict": MetricValue(0.5, 0.25)}, pass_at_k={"strict": {1: MetricValue(0.5), 4: MetricValue(1.0)}},
        shares=OutcomeShares(0.5, 0.5, 0.0, 0.25), num_tokens=12, num_forwards=8, protocol={"limit": 2},
    )  # fmt: skip
    results = EvaluationResults(results=(variant,), notes=("note",))
    write_results(tmp_path, results)
    assert read_results(tmp_path) == results
    assert variant.tokens_per_forward == 1.5
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(ValueError, match=r"results\.json.*results"):
        read_results(tmp_path)


def test_files_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """Verdicts were booleans, and metrics had no list of those that are no shares."""
    assert parse_item_line(format_item_line(CHOICE).replace("1.0", "true"), "here") == CHOICE
    result = VariantResult(
        task="text", kind="perplexity", variant="a", model="m", num_items=1, num_repeats=1,
        metrics={"perplexity": MetricValue(2.0)},
    )  # fmt: skip
    write_results(tmp_path, EvaluationResults(results=(result,)))
    values = json.loads((tmp_path / "results.json").read_text())
    assert "perplexity" in values["results"][0].pop("number_metrics")
    (tmp_path / "results.json").write_text(json.dumps(values))
    assert read_results(tmp_path).results == (result,)


def test_empty_and_invalid_answers() -> None:
    assert not GENERATED.is_empty
    assert not GENERATED.is_invalid
    assert not CHOICE.is_empty
    assert not CHOICE.is_invalid
    blank = ItemResult(**{**vars(GENERATED), "output": " \n", "extracted": {"strict": None}})
    assert blank.is_empty
    assert blank.is_invalid
    assert ItemResult(**{**vars(GENERATED), "error": "ZeroDivisionError"}).is_invalid
