"""The rewards of answers: each is one class with its options, and a row in `RewardConfig`. Without torch and numpy."""

from __future__ import annotations

import ast
import functools
import json
import math
import operator
import os
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from config.base import ConfigPath, NonEmptyStr, Probability, Section, TupleOf
from diffusionlm.evaluation.grading.code_execution import CandidateProgram, run_candidate
from diffusionlm.evaluation.tasks.gsm8k import (
    EXTRACTION_RULES,
    ExtractionRule,
    extract_boxed,
    numbers_equal,
    read_gold,
)
from diffusionlm.evaluation.tasks.humaneval import AnswerForm, build_candidate, check_run_code, find_code_block
from diffusionlm.evaluation.tasks.item_task import find_field, find_text
from diffusionlm.rl.reward_process import RewardError, RewardProcess
from files.regular_expression import check_pattern, matches_pattern

if TYPE_CHECKING:
    from diffusionlm.inference.constraints.byte_automaton import ByteAutomaton

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MATCH_SECONDS = 1.0
MAX_EXPRESSION_CHARACTERS = 256


@dataclass(frozen=True)
class GradedAnswer:
    """An answer with the item that it answers."""

    text: str
    prompt: str = ""
    """The question of the item."""
    gold: str = ""
    """The right answer; empty: the item has none."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of the item's record."""
    steps: Sequence[str] = ()
    """The text of the answer after each decoding step."""


class RewardSection(Section):
    """What all rewards have."""

    name: NonEmptyStr | None = None
    """Name of its metric. None: the kind."""
    weight: float = 1.0
    """Factor in the sum of the rewards."""
    is_share: ClassVar[bool] = True
    """Scores are in [0, 1]."""

    def check(self, answer: GradedAnswer) -> None:
        """Check, before there are answers, that an item can be graded.

        Raises:
            ValueError: a field is missing or wrong.
        """

    @abstractmethod
    def score(self, answer: GradedAnswer) -> float | Sequence[float]:
        """Score an answer, before the weight: by a number, or as a process reward by one for each step.

        Raises:
            ValueError: there is no score.
        """


class ExactMatchReward(RewardSection):
    """1 if the answer equals the right one apart from whitespace around it."""

    kind: Literal["exact_match"] = "exact_match"

    def check(self, answer: GradedAnswer) -> None:
        if not answer.gold:
            raise ValueError("has no right answer: name its field as answer_field")

    def score(self, answer: GradedAnswer) -> float:
        return float(answer.text.strip() == answer.gold.strip())


class NumberReward(RewardSection):
    """1 if the number in the answer equals the right one as a decimal, as in the task gsm8k."""

    kind: Literal["number"] = "number"
    extraction: Annotated[TupleOf[ExtractionRule], Field(min_length=1)] = ("boxed", "strict", "flexible")
    """Rules that look for the number; the first that finds something decides. boxed: in the last \\boxed{}. strict:
    after ####. flexible: the last number."""

    def check(self, answer: GradedAnswer) -> None:
        read_gold(answer.gold)

    def score(self, answer: GradedAnswer) -> float:
        values = (EXTRACTION_RULES[rule](answer.text) for rule in self.extraction)
        value = next((value for value in values if value is not None), None)
        return float(value is not None and numbers_equal(value, read_gold(answer.gold)))


class OptionsReward(RewardSection):
    """1 if the answer names the right option: the letter in its last box, else its last capital letter that stands
    alone. The right answer is a letter or an index."""

    kind: Literal["options"] = "options"
    num_options: Annotated[int, Field(ge=2, le=len(LETTERS))] = 4
    """Number of options: 4 have the letters A to D."""

    def check(self, answer: GradedAnswer) -> None:
        self._read_gold(answer)

    def score(self, answer: GradedAnswer) -> float:
        boxed = extract_boxed(answer.text)
        last = LETTERS[self.num_options - 1]
        letters = re.findall(rf"\b[A-{last}]\b", answer.text if boxed is None else boxed.upper())
        return float(bool(letters) and letters[-1] == self._read_gold(answer))

    def _read_gold(self, answer: GradedAnswer) -> str:
        letters, gold = LETTERS[: self.num_options], answer.gold.strip().upper()
        letter = letters[int(gold) : int(gold) + 1] if re.fullmatch("[0-9]{1,2}", gold) else gold
        if len(letter) != 1 or letter not in letters:
            raise ValueError(
                f"the right answer {answer.gold!r} is no option: expected a letter from A to {letters[-1]} or an index "
                "from 0; correct the item, or raise num_options"
            )
        return letter


class RegexReward(RewardSection):
    """1 if a regular expression matches the answer."""

    kind: Literal["regex"] = "regex"
    pattern: Annotated[NonEmptyStr, AfterValidator(check_pattern)]
    """The regular expression, of the package `regex`."""
    match: Literal["search", "full"] = "search"
    """search: it matches a part of the answer. full: all of it."""

    def score(self, answer: GradedAnswer) -> float:
        return float(matches_pattern(self.pattern, answer.text, MATCH_SECONDS, whole=self.match == "full"))


class JsonSchemaReward(RewardSection):
    """1 if the answer, or its first fenced block, is JSON of a schema, as far as constrained decoding supports it: no
    other properties than the schema's."""

    kind: Literal["json_schema"] = "json_schema"
    json_schema: dict[str, Any] | None = None
    """The schema of all items."""
    schema_field: NonEmptyStr | None = None
    """Field of the item's schema, a table or its JSON text."""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.json_schema is None) == (self.schema_field is None):
            raise ValueError("a schema comes from json_schema or from schema_field: set one of them")
        return self

    def check(self, answer: GradedAnswer) -> None:
        compile_schema(self._find_schema(answer))

    def score(self, answer: GradedAnswer) -> float:
        automaton, order = compile_schema(self._find_schema(answer))

        def sort_properties(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            return dict(sorted(pairs, key=lambda pair: order.get(pair[0], len(order))))

        try:
            value = json.loads(find_code_block(answer.text), object_pairs_hook=sort_properties)
            return float(automaton.accepts(json.dumps(value, ensure_ascii=False).encode()))
        except (ValueError, RecursionError):
            return 0.0

    def _find_schema(self, answer: GradedAnswer) -> str:
        schema = self.json_schema
        if self.schema_field is not None:
            schema = find_field(answer.fields, "schema_field", self.schema_field)
        return schema if isinstance(schema, str) else json.dumps(schema)


@functools.lru_cache(64)
def compile_schema(text: str) -> tuple[ByteAutomaton, dict[str, int]]:
    """Compile a schema to the automaton of its texts, and the order in which these have properties.

    Raises:
        ValueError: the schema is wrong, not supported or too large.
    """
    from diffusionlm.inference.constraints.byte_automaton import compile_expression
    from diffusionlm.inference.constraints.json_schema import SchemaCompiler

    order: dict[str, int] = {}

    def number_properties(table: dict[str, Any]) -> dict[str, Any]:
        properties = table.get("properties")
        for name in properties if isinstance(properties, dict) else ():
            order.setdefault(name, len(order))
        return table

    schema = json.loads(text, object_hook=number_properties)
    return compile_expression(SchemaCompiler().compile_root(schema)), order


class SudokuReward(RewardSection):
    """1 if the digits of the answer, all of the grid or those of the blanks in order, make a valid Sudoku (4x4 or 9x9)
    that keeps the givens."""

    kind: Literal["sudoku"] = "sudoku"
    puzzle_field: NonEmptyStr = "puzzle"
    """Field of the puzzle: digits row by row, with `.`, `0` or `_` for blanks."""
    partial: bool = False
    """Score the share of blanks that agree with the solution instead."""
    solution_field: NonEmptyStr = "solution"
    """Field of the whole grid, for partial."""

    def check(self, answer: GradedAnswer) -> None:
        self._read_grids(answer)

    def score(self, answer: GradedAnswer) -> float:
        puzzle, solution = self._read_grids(answer)
        blanks = [cell for cell, given in enumerate(puzzle) if given == "."]
        grid: list[str] = re.findall("[0-9]", answer.text)
        if len(grid) == len(blanks):
            digits = iter(grid)
            grid = [next(digits) if given == "." else given for given in puzzle]
        if len(grid) != len(puzzle):
            return 0.0
        if self.partial:
            return sum(grid[cell] == solution[cell] for cell in blanks) / len(blanks)
        keeps_givens = all(given in (digit, ".") for given, digit in zip(puzzle, grid, strict=True))
        return float(keeps_givens and is_sudoku(grid))

    def _read_grids(self, answer: GradedAnswer) -> tuple[str, str]:
        """The puzzle, with dots for blanks, and its solution if that is needed."""
        puzzle = re.sub("[0_]", ".", re.sub(r"\s", "", find_text(answer.fields, "puzzle_field", self.puzzle_field)))
        size = math.isqrt(len(puzzle))
        if len(puzzle) not in (16, 81) or "." not in puzzle or not {*puzzle} <= {*".123456789"[: size + 1]}:
            raise ValueError(
                f"the puzzle {puzzle[:81]!r} is no grid of 4 x 4 or 9 x 9 cells with digits up to 4 or 9 and with "
                "blanks: correct the item, or name another field as puzzle_field"
            )
        if not self.partial:
            return puzzle, ""
        solution = re.sub(r"\s", "", find_text(answer.fields, "solution_field", self.solution_field))
        if len(solution) != len(puzzle):
            raise ValueError(f"the solution {solution!r} has another size than the puzzle {puzzle!r}: correct the item")
        return puzzle, solution


def is_sudoku(grid: Sequence[str]) -> bool:
    """Whether each row, column and box of a full grid has each digit once."""
    size = math.isqrt(len(grid))
    box = math.isqrt(size)
    units: dict[tuple[str, int], set[str]] = {}
    for cell, digit in enumerate(grid):
        row, column = divmod(cell, size)
        for unit in (("row", row), ("column", column), ("box", row // box * box + column // box)):
            units.setdefault(unit, set()).add(digit)
    return all(digits == {*"123456789"[:size]} for digits in units.values())


OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


class CountdownReward(RewardSection):
    """1 if an expression of + - * / and parentheses equals the target exactly and uses each number once. It is read
    from the last `<answer>` if there is one, there from the last `\\boxed{}`, else the last line, up to a `=`."""

    kind: Literal["countdown"] = "countdown"
    numbers_field: NonEmptyStr | None = None
    """Field of the numbers. None: numbers or nums."""
    target_field: NonEmptyStr = "target"
    use_all: bool = True
    """Each number is used exactly once; else at most once."""
    format_reward: Probability = 0.0
    """Score of an expression that is wrong."""

    def check(self, answer: GradedAnswer) -> None:
        self._read_item(answer)

    def score(self, answer: GradedAnswer) -> float:
        numbers, target = self._read_item(answer)
        expression = find_expression(answer.text)
        used: Counter[int] = Counter()
        try:
            if not re.fullmatch(rf"[-+*/() 0-9]{{1,{MAX_EXPRESSION_CHARACTERS}}}", expression):
                return 0.0
            value = _evaluate(ast.parse(expression, mode="eval").body, used)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return 0.0
        except ZeroDivisionError:
            return self.format_reward
        uses_numbers = used == numbers if self.use_all else used <= numbers
        return 1.0 if uses_numbers and value == target else self.format_reward

    def _read_item(self, answer: GradedAnswer) -> tuple[Counter[int], int]:
        fields = answer.fields
        numbers = find_field(fields, "numbers_field", self.numbers_field, ("numbers", "nums"))
        target = find_field(fields, "target_field", self.target_field)
        if not isinstance(numbers, list | tuple) or not all(type(number) is int for number in (*numbers, target)):
            raise ValueError(f"numbers {numbers!r} and target {target!r} must be whole numbers: correct the item")
        return Counter(numbers), target


def find_expression(text: str) -> str:
    """Return the part of an answer that `CountdownReward` evaluates."""
    _, tag, inner = text.rpartition("<answer>")
    text = inner.partition("</answer>")[0] if tag else text
    boxed = extract_boxed(text)
    lines = (text if boxed is None else boxed).strip().splitlines()
    return lines[-1].partition("=")[0].strip() if lines else ""


def _evaluate(node: ast.expr, used: Counter[int]) -> Fraction:
    """The value of an expression, whose numbers are counted.

    Raises:
        ValueError: it is no arithmetic.
        ZeroDivisionError: it divides by 0.
    """
    match node:
        case ast.BinOp(left, sign, right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](_evaluate(left, used), _evaluate(right, used))
        case ast.Constant(int(number)):
            used[number] += 1
            return Fraction(number)
    raise ValueError("no arithmetic")


class CodeReward(RewardSection):
    """1 if the program of the answer passes the tests of the item, as in the task humaneval."""

    kind: Literal["code"] = "code"
    run_code: bool = False
    """Execute what the model has written, in processes of their own with limited time, memory, files and system calls,
    without network. A determined program is not contained: use a container."""
    test_field: NonEmptyStr = "test"
    """Code that defines `check(candidate)`."""
    entry_point_field: NonEmptyStr = "entry_point"
    prompt_field: NonEmptyStr | None = None
    """Code before the answer, such as the beginning of the function. None: there is none."""
    answer: AnswerForm = "code_block"
    """completion: the answer continues prompt_field. code_block: its first fenced block is the program, or all of it
    without one."""
    timeout_seconds: Annotated[float, Field(gt=0.0, le=600.0)] = 5.0
    """Time of each program."""

    def check(self, answer: GradedAnswer) -> None:
        check_run_code(self.run_code)
        self._build(answer)

    def score(self, answer: GradedAnswer) -> float:
        return float(run_candidate(self._build(answer), seconds=self.timeout_seconds).status == "passed")

    def _build(self, answer: GradedAnswer) -> CandidateProgram:
        names = {"prompt": self.prompt_field, "test": self.test_field, "entry_point": self.entry_point_field}
        fields = {
            key: "" if name is None else find_text(answer.fields, f"{key}_field", name) for key, name in names.items()
        }
        return build_candidate(fields, answer.text, self.answer)


class PythonReward(RewardSection):
    """What a function of a Python file returns for a dict with prompt, answer, gold, fields and steps: a number, or a
    list with a number for each step. It runs in a process of its own, and what it prints is dropped."""

    kind: Literal["python"] = "python"
    path: ConfigPath
    """The Python file."""
    function: NonEmptyStr = "reward"
    """Name of the function."""
    timeout_seconds: Annotated[float, Field(gt=0.0, le=3600.0)] = 10.0
    """Time of each call, after which the process is replaced."""
    reads_steps: bool = False
    """In training, steps has the text after each forward of decoding. false: only the last one."""
    is_share: ClassVar[bool] = False

    def check(self, answer: GradedAnswer) -> None:
        try:
            self._process.start()
        except RewardError as error:
            raise ValueError(f"path = {str(self.path)!r} {error}") from None

    def score(self, answer: GradedAnswer) -> float | tuple[float, ...]:
        try:
            score = self._process.call(
                {
                    "prompt": answer.prompt,
                    "answer": answer.text,
                    "gold": answer.gold,
                    "fields": {**answer.fields},
                    "steps": [*answer.steps],
                }
            )
        except RewardError as error:
            raise RewardError(f"{self.path}: {self.function} {error}") from None
        if isinstance(score, tuple) and len(score) != len(answer.steps):
            raise RewardError(
                f"{self.path}: {self.function} returned {len(score)} numbers for {len(answer.steps)} steps: return one "
                "for each step, or a single number"
            )
        return score

    @property
    def _process(self) -> RewardProcess:
        return open_process(self.path, self.function, self.timeout_seconds, os.getpid())


@functools.cache
def open_process(path: Path, function: str, seconds: float, pid: int) -> RewardProcess:
    """The process of a function, started at its first use; one for each process that calls it, and its forks."""
    return RewardProcess(path, function, seconds)


RewardConfig = Annotated[
    ExactMatchReward
    | NumberReward
    | OptionsReward
    | RegexReward
    | JsonSchemaReward
    | SudokuReward
    | CountdownReward
    | CodeReward
    | PythonReward,
    Field(discriminator="kind"),
]
