"""Math word problems: the number of a generated solution, compared as a decimal.

The rules ``strict`` and ``flexible`` extract what the filters strict-match and flexible-extract of
lm-evaluation-harness extract in its task ``gsm8k`` (version 3). 18 equals 18.0; the harness compares strings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import Field

from config.base import NonEmptyStr, TupleOf
from diffusionlm.evaluation.tasks.item_task import (
    GenerationTask,
    ItemTask,
    PromptConfig,
    TaskItem,
    find_field,
    find_text,
)
from diffusionlm.evaluation.tasks.results import Verdict

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_GOLD = re.compile(r"#### ?([^\n]*)\s*\Z")
_PLAIN_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)")
_BOX_PARTS = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)

ExtractionRule = Literal["strict", "flexible", "boxed"]


class Gsm8kTask(GenerationTask, ItemTask):
    """Math word problems: the number in a generated solution, compared as a decimal: `strict` after `####`, `flexible`
    the last one, `boxed`. Fields: `question`, `answer` (ends with `#### NUMBER`, or is a number)."""

    kind: Literal["gsm8k"] = "gsm8k"
    prompt: PromptConfig = PromptConfig()
    question_field: NonEmptyStr = "question"
    answer_field: NonEmptyStr = "answer"
    """Its text after #### is the right number; without ####, the whole text has to be one."""
    extraction: Annotated[TupleOf[ExtractionRule], Field(min_length=1)] = ("strict", "flexible")
    """Rules that find the number in an answer; accuracy is reported by each. strict: after ####. flexible: the last
    number. boxed: in the last \\boxed{}."""
    stop: TupleOf[NonEmptyStr] = ("Question:",)
    """The answer ends before the first of these texts, wherever they lie in tokens."""

    @property
    def rules(self) -> tuple[str, ...]:
        return self.extraction

    def parse_item(self, record: Mapping[str, Any]) -> TaskItem:
        question = find_text(record, "question_field", self.question_field)
        value = find_field(record, "answer_field", self.answer_field)
        answer = str(value) if isinstance(value, int | float) else value
        if not isinstance(answer, str):
            raise ValueError(f"the field of answer_field is {value!r}, expected a text or a number")
        return TaskItem(read_gold(answer), {"question": question, "answer": answer})

    def grade(self, item: TaskItem, text: str) -> Verdict:
        extracted: dict[str, str | None] = {rule: EXTRACTION_RULES[rule](text) for rule in self.extraction}
        return Verdict(
            {rule: float(value is not None and numbers_equal(value, item.gold)) for rule, value in extracted.items()},
            extracted,
        )


def read_gold(answer: str) -> str:
    """Return the number after ####, else in the last box, else the whole text.

    Raises:
        ValueError: there is none.
    """
    match = _GOLD.search(answer if "####" in answer else f"#### {extract_boxed(answer) or answer}")
    gold = normalize_number(match[1]) if match else ""
    if not _PLAIN_NUMBER.fullmatch(gold):
        raise ValueError(f'the answer ends with {answer[-40:]!r}: expected a number, or "#### NUMBER" at its end')
    return gold


def extract_strict(text: str) -> str | None:
    """Return the number after the first ``#### ``, as it is written; None if there is none."""
    match = _STRICT.search(text)
    return match[1] if match else None


def extract_flexible(text: str) -> str | None:
    """Return the last number of the text, as it is written; None if there is none.

    Like the harness, it takes the number of a trailing "Step 5", and two or more dots or commas for a number.
    """
    numbers = _FLEXIBLE.findall(text)
    return numbers[-1] if numbers else None


def extract_boxed(text: str) -> str | None:
    """Return the content of the last ``\\boxed{}`` or ``\\fbox{}`` whose braces are balanced; None if there is none.

    Escaped braces do not count. Takes time linear in the length of the text.
    """
    open_braces: list[int | None] = []
    """Start of the content of each open brace of a box; None: another brace."""
    last: tuple[int, int] | None = None
    for part in _BOX_PARTS.finditer(text):
        if part[0] == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None and (last is None or start > last[0]):
                last = start, part.start()
        elif part[0].endswith("{") and part[0] != r"\{":
            open_braces.append(part.end() if part[0].startswith("\\") else None)
    return text[slice(*last)].strip() if last else None


EXTRACTION_RULES: dict[str, Callable[[str], str | None]] = {
    "strict": extract_strict,
    "flexible": extract_flexible,
    "boxed": extract_boxed,
}
"""Name in `extraction` -> the answer of a text, or None, which counts as invalid and as wrong."""


def normalize_number(text: str) -> str:
    """Drop commas, dollar signs, surrounding whitespace and a final dot, as the harness does."""
    return re.sub(r"[,$]", "", text).strip().removesuffix(".")


def numbers_equal(a: str, b: str) -> bool:
    """Return whether two numbers are equal as decimals: 18, 18.0, $18 and "18." are.

    Texts that are not numbers are equal if they are the same apart from case, commas and dollar signs.
    """
    first, second = normalize_number(a), normalize_number(b)
    if _PLAIN_NUMBER.fullmatch(first) and _PLAIN_NUMBER.fullmatch(second):
        return Decimal(first) == Decimal(second)
    return first.lower() == second.lower()
