"""Answers to HumanEval items that are known to be right or wrong, executed as answers of a model are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from config.evaluation.presets import load_presets
from diffusionlm.evaluation.tasks.evaluation import grade
from diffusionlm.evaluation.tasks.items import read_task_items
from diffusionlm.evaluation.tasks.preparation import fill_template
from diffusionlm.inference.text import AnswerText
from tests.unit.evaluation.tasks.conftest import TASK, MakeTask
from tokenizer import Tokenizer

TEST = """def check(candidate):
    assert candidate([1, 2, 3], 2) == [2, 3]
    assert candidate([], 1) == []
    assert candidate((4,), 5) == []
"""
ITEM = {
    "task_id": "Test/0",
    "prompt": 'from typing import List\n\n\ndef at_least(numbers: List[int], low: int):\n    """Filter."""\n',
    "entry_point": "at_least",
    "canonical_solution": "    return [number for number in numbers if number >= low]\n",
    "test": TEST,
}


def grade_answers(make_task: MakeTask, answers: list[str], item: dict[str, str] = ITEM, **options: Any) -> list[bool]:
    task = make_task("humaneval", [item], run_code=True, generation={"max_new_tokens": 2}, **options)
    verdicts = [grade(task, task.items[0], answer) for answer in answers]
    assert all(verdict.error is None for verdict in verdicts)
    return [bool(verdict.is_correct["passed"]) for verdict in verdicts]


@pytest.mark.slow
def test_a_prompt_without_a_docstring_is_completed_or_defined_again(make_task: MakeTask) -> None:
    """Such a prompt is no program by itself, and its tests need its imports."""
    prompt = "import math\n\n\ndef area(radius):\n"
    test = "def check(candidate):\n    assert candidate(2) == 4 * math.pi\n"
    item = {**ITEM, "prompt": prompt, "entry_point": "area", "test": test}
    body = "    return math.pi * radius ** 2\n"
    programs = (f"def area(radius):\n{body}", body, "    return 0\n", "")
    blocks = [f"```\n{program}```" for program in programs]
    assert grade_answers(make_task, blocks, item, answer="code_block") == [True, True, False, False]
    assert grade_answers(make_task, [body, "    return 0\n"], item) == [True, False]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"prompt": "Write a function\n"}, "prompt_field"),
        ({"test": "def check(candidate):\n"}, "test"),
        ({"entry_point": "at least"}, "entry_point"),
    ],
)
def test_items_without_valid_code_are_named(make_task: MakeTask, changes: dict[str, str], word: str) -> None:
    with pytest.raises(ValueError, match=rf"items\.jsonl: item 'Test/0'.*{word}"):
        make_task("humaneval", [{**ITEM, **changes}], run_code=True, generation={"max_new_tokens": 2})


def cut_answer(tokenizer: Tokenizer, text: str, stop: tuple[str, ...]) -> str:
    """The text of an answer as it is decoded, up to its first stop."""
    answer = AnswerText(tokenizer, stop)
    for token in tokenizer.encode(text):
        answer.push(token, 0.0)
    answer.finish()
    return answer.text


PROGRAM = f"""class Limit:
    low = 0

# the same function
def is_enough(number, low):
    return number >= low

{ITEM["prompt"]}    return [number for number in numbers if is_enough(number, low)]

if Limit.low == 0:
    print(at_least([1], 1))
"""


HUMANEVAL_PRESETS = [name for name, preset in load_presets().items() if preset.kind == "humaneval"]


@pytest.mark.parametrize("name", [None, *HUMANEVAL_PRESETS])
def test_stops_leave_right_answers(tmp_path: Path, byte_tokenizer: Tokenizer, name: str | None) -> None:
    """An answer in the form that a protocol asks for, and what models write after it. None: code_block alone."""
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps(ITEM))
    options = {"answer": "code_block"} if name is None else {"preset": name}
    task = TASK.validate_python({"kind": "humaneval", "data": path, "run_code": True, **options})
    [item] = read_task_items(task)
    prefix = fill_template(task.prompt.answer_prefix, item.fields, "prompt.answer_prefix")
    if task.answer == "completion":
        text = f"{ITEM['canonical_solution']}\ndef unfinished("
    elif prefix:
        text = f"{ITEM['canonical_solution']}```\nIt filters."
    else:
        text = f"Here it is:\n```python\n{PROGRAM}```\nIt filters."
    verdict = task.grade(item, prefix + cut_answer(byte_tokenizer, text, task.stop))
    assert verdict.is_correct == {"passed": 1.0}, verdict
