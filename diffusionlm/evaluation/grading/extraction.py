"""Extract the final answer from a text and compare it with the gold answer.

The rules ``strict`` and ``flexible`` extract what the filters strict-match and flexible-extract of
lm-evaluation-harness extract in its task ``gsm8k`` (version 3). Numbers are compared as decimals, so 18 equals 18.0;
the harness compares strings.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_GOLD = re.compile(r"#### ?([^\n]*)\s*\Z")
_PLAIN_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)")
_BOX_PARTS = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


@dataclass(frozen=True)
class ExtractionRule:
    """How an answer is taken out of a text and compared with the gold answer."""

    extract: Callable[[str], str | None]
    """The answer, or None if the text has none: it counts as invalid and as wrong."""
    is_correct: Callable[[str, str], bool]
    """Whether the extracted answer equals the gold answer."""


def extract_gsm8k_strict(text: str) -> str | None:
    """Return the number after the first ``#### ``, as it is written; None if there is none."""
    match = _STRICT.search(text)
    return match[1] if match else None


def extract_gsm8k_flexible(text: str) -> str | None:
    """Return the last number of the text, as it is written; None if there is none.

    Like the harness, it takes the number of a trailing "Step 5", and two or more dots or commas for a number.
    """
    numbers = _FLEXIBLE.findall(text)
    return numbers[-1] if numbers else None


def gold_gsm8k(answer: str) -> str:
    """Return the gold number of an answer of GSM8K: the text after ``####``, without commas.

    Raises:
        ValueError: the answer does not end with ``#### NUMBER``.
    """
    match = _GOLD.search(answer)
    gold = normalize_number(match[1]) if match else ""
    if not _PLAIN_NUMBER.fullmatch(gold):
        raise ValueError(f'the answer ends with {answer[-40:]!r}, expected "#### NUMBER" at its end')
    return gold


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


EXTRACTION_RULES: dict[str, ExtractionRule] = {
    "strict": ExtractionRule(extract_gsm8k_strict, numbers_equal),
    "flexible": ExtractionRule(extract_gsm8k_flexible, numbers_equal),
    "boxed": ExtractionRule(extract_boxed, numbers_equal),
}
"""Name in a task's `extraction` -> how the answer is found and compared."""
