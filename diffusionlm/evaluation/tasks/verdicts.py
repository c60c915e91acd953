"""Grade the answers of generation tasks. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from config.evaluation.tasks import ExactMatchTask, GenerationTask, Gsm8kTask, HumanEvalTask
from diffusionlm.evaluation.grading.code_execution import (
    CandidateProgram,
    ExecutionLimits,
    humaneval_candidate,
    run_candidate,
)
from diffusionlm.evaluation.grading.extraction import EXTRACTION_RULES
from diffusionlm.evaluation.tasks.items import TaskItem

_CODE_BLOCK = re.compile(r"```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right."""

    is_correct: dict[str, bool]
    """Name of each rule -> whether the answer is right by it."""
    extracted: dict[str, str | None] = field(default_factory=dict)
    detail: str | None = None
    error: str | None = None
    """See `ItemResult`."""


Grader = Callable[[TaskItem, str], Verdict]
"""Grades an answer to an item; the answer has its prefix, if the prompt ends with one."""


def list_rules(task: GenerationTask) -> tuple[str, ...]:
    """Names of the rules by which a task's answers are graded, the main one first."""
    match task:
        case Gsm8kTask():
            return task.extraction
        case HumanEvalTask():
            return ("passed",)
        case ExactMatchTask():
            return ("exact_match",)


def build_grader(task: GenerationTask) -> Grader:
    """Build the grader of a task. Its exceptions become verdicts (`grade`)."""
    match task:
        case Gsm8kTask():
            return lambda item, text: _grade_number(task, item, text)
        case HumanEvalTask():
            assert task.run_code, "checked before the run begins"
            return lambda item, text: _grade_code(task, item, text)
        case ExactMatchTask():
            return _grade_text


def grade(task: GenerationTask, grader: Grader, item: TaskItem, text: str) -> Verdict:
    """Grade an answer. If grading fails, the answer is wrong by every rule, and the verdict has the error."""
    try:
        return grader(item, text)
    except Exception as error:
        is_correct = dict.fromkeys(list_rules(task), False)
        return Verdict(is_correct, error=f"{type(error).__name__}: {error}")


def find_code_block(text: str) -> str:
    """The first fenced block of a text, also an unfinished one; without one the whole text."""
    match = _CODE_BLOCK.search(text)
    return match[1] if match else text


def _grade_number(task: Gsm8kTask, item: TaskItem, text: str) -> Verdict:
    extracted: dict[str, str | None] = {name: EXTRACTION_RULES[name].extract(text) for name in task.extraction}
    is_correct: dict[str, bool] = {
        name: value is not None and EXTRACTION_RULES[name].is_correct(value, item.gold)
        for name, value in extracted.items()
    }
    return Verdict(is_correct, extracted)


def build_candidate(task: HumanEvalTask, item: TaskItem, text: str) -> CandidateProgram:
    """The program of an answer with the tests of its item.

    Raises:
        ValueError: the item's prompt or tests are no valid code.
    """
    completion = text if task.answer == "completion" else f"\n{find_code_block(text)}"
    fields = item.fields
    return humaneval_candidate(fields["prompt"], completion, fields["test"], fields["entry_point"])


def _grade_code(task: HumanEvalTask, item: TaskItem, text: str) -> Verdict:
    candidate = build_candidate(task, item, text)
    result = run_candidate(candidate, ExecutionLimits(seconds=task.timeout_seconds))
    return Verdict({"passed": result.is_passed}, detail=f"{result.status}: {result.detail}".removesuffix(": "))


def _grade_text(item: TaskItem, text: str) -> Verdict:
    return Verdict({"exact_match": text.strip() == item.gold})
