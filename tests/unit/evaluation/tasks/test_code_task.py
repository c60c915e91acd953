"""Answers to HumanEval items that are known to be right or wrong, executed as answers of a model are."""

from __future__ import annotations

from typing import Any

import pytest

from diffusionlm.evaluation.tasks.evaluation import evaluate_task
from diffusionlm.evaluation.tasks.verdicts import build_grader, grade
from diffusionlm.models.transformer import Transformer
from tests.unit.evaluation.tasks.conftest import MakeTask

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


def grade_answers(make_task: MakeTask, answers: list[str], **options: Any) -> list[bool]:
    task = make_task("humaneval", [ITEM], run_code=True, generation={"max_new_tokens": 2}, **options)
    grader = build_grader(task.config)
    verdicts = [grade(task.config, grader, task.items[0], answer) for answer in answers]
    assert all(verdict.error is None for verdict in verdicts)
    return [verdict.is_correct["passed"] for verdict in verdicts]


@pytest.mark.slow
def test_solutions_pass_and_others_fail(make_task: MakeTask) -> None:
    solution = ITEM["canonical_solution"]
    answers = [solution, solution.replace(">=", ">"), "    return [", "    raise SystemExit(0)", "    while True: pass"]
    assert grade_answers(make_task, answers, timeout_seconds=2.0) == [True, False, False, False, False]


@pytest.mark.slow
def test_fenced_programs(make_task: MakeTask) -> None:
    program = f"{ITEM['prompt']}{ITEM['canonical_solution']}"
    answers = [f"Here it is:\n```python\n{program}```\nIt filters.", program, "I cannot."]
    assert grade_answers(make_task, answers, answer="code_block") == [True, True, False]


@pytest.mark.slow
def test_answers_of_a_model_are_executed(make_task: MakeTask, random_model: Transformer) -> None:
    task = make_task("humaneval", [ITEM], run_code=True, generation={"max_new_tokens": 3})
    [result] = evaluate_task(random_model, task)
    assert result.is_correct == {"passed": False}
    assert result.detail is not None and result.detail.startswith("failed: ")
    assert result.error is None
