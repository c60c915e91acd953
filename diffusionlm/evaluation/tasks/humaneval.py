"""Python functions: the model completes them, and their tests are executed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from config.base import NonEmptyStr, TupleOf
from diffusionlm.evaluation.grading.code_execution import CandidateProgram, run_candidate
from diffusionlm.evaluation.tasks.item_task import (
    GenerationTask,
    ItemTask,
    PromptConfig,
    TaskItem,
    find_text,
)
from diffusionlm.evaluation.tasks.results import Verdict

COMPLETION_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
"""Beginnings of code that follows a function, as in lm-evaluation-harness 0.4."""
BODY_INDENTATION = 64
"""Blanks before the body that a prompt without one gets: more than before its last line."""
AnswerForm = Literal["completion", "code_block"]
_CODE_BLOCK = re.compile(r"```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


class HumanEvalTask(GenerationTask, ItemTask):
    """Python functions that the model completes: `passed`, the function, or with `answer = "code_block"` the first code
    block after the prompt, passes its tests; pass@k with `repeats`. Fields: `prompt`, `test`, `entry_point`,
    `task_id`."""

    kind: Literal["humaneval"] = "humaneval"
    prompt: PromptConfig = PromptConfig()
    run_code: bool = False
    """Execute what the model has written, in processes of their own with limited time, memory, files and system calls,
    without network. A determined program is not contained: use a container."""
    prompt_field: NonEmptyStr = "prompt"
    test_field: NonEmptyStr = "test"
    entry_point_field: NonEmptyStr = "entry_point"
    answer: AnswerForm = "completion"
    """completion: the prompt and the answer together are the program. code_block: the prompt and the first fenced block
    of the answer (or all of it, without one) are, whether the block is the rest of the function or defines it again: it
    may use the prompt's imports and helper functions."""
    timeout_seconds: Annotated[float, Field(gt=0.0, le=600.0)] = 5.0
    """Time of each program."""
    stop: TupleOf[NonEmptyStr] = Field(
        default_factory=lambda values: () if values.get("answer") == "code_block" else COMPLETION_STOPS
    )
    """The answer ends before the first of these texts, wherever they lie in tokens. If it is not set: with answer =
    "completion" those before which a function ends; with "code_block" none, for they also lie within a program."""
    default_new_tokens: ClassVar[int] = 512
    question_template: ClassVar[str] = "{prompt}"
    delimiter: ClassVar[str] = ""

    @property
    def rules(self) -> tuple[str, ...]:
        return ("passed",)

    def parse_item(self, record: Mapping[str, Any]) -> TaskItem:
        fields = {
            name: find_text(record, f"{name}_field", getattr(self, f"{name}_field"))
            for name in ("prompt", "test", "entry_point")
        }
        solution = record.get("canonical_solution")
        gold = solution if isinstance(solution, str) else ""
        return TaskItem(gold, {**fields, "question": fields["prompt"], "answer": gold})

    @property
    def runs_code(self) -> bool:
        return self.run_code

    def check_item(self, item: TaskItem) -> None:
        check_run_code(self.run_code, "run_code = true (--run-code)")
        build_candidate(item.fields, "", self.answer)

    def grade(self, item: TaskItem, text: str) -> Verdict:
        result = run_candidate(build_candidate(item.fields, text, self.answer), seconds=self.timeout_seconds)
        detail = f"{result.status}: {result.detail}".removesuffix(": ")
        return Verdict({"passed": float(result.status == "passed")}, detail=detail)


def check_run_code(run_code: bool, remedy: str = "run_code = true") -> None:
    """Check that the execution of programs of a model is allowed.

    Raises:
        ValueError: it is not.
    """
    if not run_code:
        raise ValueError(
            "run_code = false, and grading executes programs that the model has written, with the rights of your "
            "user: limits of time, memory and system calls contain accidents, not a determined program. Set "
            f"{remedy} to allow it, best in a container without network"
        )


def build_candidate(fields: Mapping[str, Any], text: str, answer: AnswerForm) -> CandidateProgram:
    """The program of an answer with the tests of its item.

    The prompt is trusted: its helper functions are those that the tests use. It may end before the body of its last
    function, such as ``def f():`` without a docstring. The answer follows it; or, with a line break and without
    indentation, it is code that defines the function again.

    Raises:
        ValueError: the prompt, with a body for its last function, or the tests are no valid code, or the entry point is
            no name.
    """
    prompt, test, entry_point = (fields[name] for name in ("prompt", "test", "entry_point"))
    setup = _complete_prompt(prompt)
    if not entry_point.isidentifier():
        raise ValueError(f"entry_point = {entry_point!r} is no name of a function: correct the item")
    tests = f"{test}\ncheck({entry_point})\n"
    error = _find_syntax_error(tests)
    if error is not None:
        raise ValueError(f"its test is no valid code ({error}): correct the item")
    completion = text if answer == "completion" else f"\n{find_code_block(text)}"
    code = completion.lstrip("\r\n")
    is_program = completion != code and not code.startswith((" ", "\t"))
    return CandidateProgram((setup if is_program else prompt) + completion, tests, entry_point, setup=setup)


def find_code_block(text: str) -> str:
    """The first fenced block of a text, also an unfinished one; without one the whole text."""
    match = _CODE_BLOCK.search(text)
    return match[1] if match else text


def _complete_prompt(prompt: str) -> str:
    """The prompt as a program: with a body, if it ends with the first line of a function."""
    body = " " * BODY_INDENTATION + "pass\n"
    for program in (prompt, f"{prompt}{body}", f"{prompt}\n{body}"):
        if _find_syntax_error(program) is None:
            return program
    error = _find_syntax_error(prompt)
    raise ValueError(f"its prompt is no valid code ({error}): correct the item, or name another field as prompt_field")


def _find_syntax_error(code: str) -> str | None:
    """Why trusted code is no program; None: it is one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            compile(code, "item", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return str(error)
    return None
