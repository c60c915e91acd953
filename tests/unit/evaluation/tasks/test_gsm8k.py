"""Extraction of answers, against the answers of lm-evaluation-harness 0.4.13."""

from __future__ import annotations

from pathlib import Path

import pytest

from diffusionlm.evaluation.tasks.gsm8k import Gsm8kTask, extract_boxed, numbers_equal
from diffusionlm.evaluation.tasks.item_task import TaskItem

HARNESS_TABLE: list[tuple[str, str | None, str | None, bool, bool]] = [
    ("#### 18.0", "18.0", "18.0", True, True),
    ("#### 18.", "18.", "18.", True, True),
    ("#### $18", None, "$18", False, True),
    ("####18", None, "18", False, True),
    ("#### -18", "-18", "-18", False, False),
    ("The answer is 18.", None, "18.", False, True),
    ("She makes $18.00 every day.", None, "$18.00", False, True),
    ("9 + 9 = 18\n#### 18\n\nQuestion: 3?\n#### 3", "18", "3", True, False),
    ("#### 3\n#### 18", "3", "18", False, True),
    ("So 18. Step 5", None, "5", False, False),
    ("Wait... no number", None, "...", False, False),
    ("", None, None, False, False),
    ("#### 1,8", "1,8", "1,8", True, True),
    ("#### 18\xa0", "18", "18", True, True),
    ("#### ١٨", None, None, False, False),
    ("18e0", None, "0", False, False),
    ("x=-18", None, "-18", False, False),
    ("0018", None, "0018", False, True),
    ("#### 1/8", "1", "8", False, False),
]
"""Text, what the filters strict-match and flexible-extract of the harness's task gsm8k return (None: "[invalid]"), and
whether these equal 18. The harness itself compares strings: it refuses 18.0, $18.00 and 0018."""


@pytest.mark.parametrize(("text", "strict", "flexible", "is_strict", "is_flexible"), HARNESS_TABLE)
def test_gsm8k_rules_extract_what_the_harness_extracts(
    text: str, strict: str | None, flexible: str | None, is_strict: bool, is_flexible: bool
) -> None:
    verdict = Gsm8kTask(data=Path("items.jsonl")).grade(TaskItem("18"), text)
    assert verdict.extracted == {"strict": strict, "flexible": flexible}
    assert verdict.is_correct == {"strict": is_strict, "flexible": is_flexible}


@pytest.mark.parametrize(
    ("a", "b", "is_equal"),
    [
        ("18", "18.0", True),
        ("1,234.50", "1234.5", True),
        ("9" * 5000, "9" * 4999 + "8", False),
        ("0.1", "0.10000000000000000000000000001", False),
        ("nan", "NaN", True),
        ("\\frac{1}{2}", "\\frac{1}{3}", False),
    ],
)
def test_numbers_are_compared_as_decimals(a: str, b: str, is_equal: bool) -> None:
    assert numbers_equal(a, b) == is_equal and numbers_equal(b, a) == is_equal


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{1} and \\boxed{ 2 }", "2"),
        ("\\boxed{\\left\\{ x \\right.}", "\\left\\{ x \\right."),
        ("\\boxed{7} then \\boxed{8", "7"),
        ("\\boxed{a \\boxed{b}}", "b"),
        ("\\fbox {3}", "3"),
        ("", None),
    ],
)
def test_the_last_balanced_box(text: str, content: str | None) -> None:
    assert extract_boxed(text) == content


def test_unclosed_boxes_take_linear_time() -> None:
    assert extract_boxed("\\boxed{x}" + "\\boxed{" * 100_000) == "x"
