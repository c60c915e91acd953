"""The files of a run of tasks: written and read back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from diffusionlm.evaluation.tasks.results import ItemResult, format_item_line, read_items, read_results

GENERATED = ItemResult(
    task="gsm8k", variant="a", id="7", repeat=1, prompt_sha256="00", gold="18", output="= 18\u2028 \n#### 18",
    extracted={"strict": "18", "flexible": None}, is_correct={"strict": 1.0, "flexible": 0.0},
    finish_reason="stop", num_tokens=9, num_forwards=4, seconds=0.5,
)  # fmt: skip
CHOICE = ItemResult(
    task="arc", variant="a", id="7", repeat=0, prompt_sha256="00", gold="1", is_correct={"acc": 1.0},
    option_log_likelihoods=(-1.5, -1.25), option_standard_errors=(0.0, 0.125), chosen={"acc": 1},
)  # fmt: skip


def test_item_lines_are_read_back(tmp_path: Path) -> None:
    lines = [format_item_line(GENERATED), format_item_line(CHOICE)]
    assert "option_log_likelihoods" not in json.loads(lines[0])
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert list(read_items(path)) == [GENERATED, CHOICE]
    path.write_text(f'{lines[0]}\n{{"task": "arc"}}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.jsonl: line 2: .*is_correct"):
        list(read_items(path))


def test_other_contents_are_no_results(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(ValueError, match=r"results\.json.*results"):
        read_results(tmp_path)


def test_empty_and_invalid_answers() -> None:
    blank = replace(GENERATED, output=" \n", extracted={"strict": None})
    wrong = replace(GENERATED, error="ZeroDivisionError")
    assert [item.is_empty for item in (GENERATED, CHOICE, blank, wrong)] == [False, False, True, False]
    assert [item.is_invalid for item in (GENERATED, CHOICE, blank, wrong)] == [False, False, True, True]
