"""Regular expressions over characters, as trees: read with the parser of Python's `re`, or built by `json_schema.py`,
and compiled by `byte_automaton.py`.

Supported are characters and escapes, ``.`` (all but a line feed), sets, ``\\d \\w \\s \\D \\W \\S`` (ASCII, as with
``re.ASCII``), groups, ``|``, and ``? * + {n} {n,} {n,m} {,m}``, also lazy ones, which match the same texts. ``^`` and
``$`` may stand at the two ends.

No library makes the automaton: of those with wheels outlines-core 0.2.14 has no bound of its states or of the time (it
ends the process on ``((a{1000}){1000}){1000}``) and ignores keys of schemas, and llguidance shows no automaton.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from re import _constants, _parser  # type: ignore[attr-defined]
from types import MappingProxyType
from typing import Any

MAX_CODE_POINT = 0x10FFFF

CodePoints = tuple[tuple[int, int], ...]
"""Ranges of code points, both ends included, ascending and apart from each other."""

ByteRanges = tuple[tuple[int, int], ...]
"""Ranges of successive bytes, both ends included."""


@dataclass(frozen=True)
class CharacterSet:
    """One character of a set."""

    code_points: CodePoints


@dataclass(frozen=True)
class Concatenation:
    """One part after the other; without parts the empty text."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True)
class Alternation:
    """One of several expressions."""

    options: tuple[Expression, ...]


@dataclass(frozen=True)
class Repetition:
    """A part ``minimum`` to ``maximum`` times, with a separator in between."""

    part: Expression
    minimum: int
    maximum: int | None
    """Largest number of repetitions. None: any number."""
    separator: Expression = Concatenation(())


@dataclass(frozen=True)
class OptionalItems:
    """Items in their order, some of which may be left out, with a separator between those that are there."""

    items: tuple[tuple[Expression, bool], ...]
    """Each with True if it is required."""
    separator: Expression


Expression = CharacterSet | Concatenation | Alternation | Repetition | OptionalItems


def literal(text: str) -> Concatenation:
    """The expression of one text alone.

    Raises:
        ValueError: it has a surrogate.
    """
    for number, character in enumerate(text, 1):
        if 0xD800 <= ord(character) <= 0xDFFF:
            raise ValueError(
                f"character {number} of the text {text[:40]!r} is half of a surrogate pair: write the whole one"
            )
    return Concatenation(tuple(map(_single_character, text)))


@lru_cache(1 << 12)
def _single_character(character: str) -> CharacterSet:
    """A set of one character; mostly the same object, which lets texts share their beginning in an automaton."""
    return CharacterSet(((ord(character), ord(character)),))


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> CodePoints:
    """Sort ranges and join those that touch."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(code_points: CodePoints) -> CodePoints:
    """All code points outside of a set."""
    gaps, start = [], 0
    for low, high in code_points:
        if start < low:
            gaps.append((start, low - 1))
        start = high + 1
    if start <= MAX_CODE_POINT:
        gaps.append((start, MAX_CODE_POINT))
    return tuple(gaps)


def intersect(left: CodePoints, right: CodePoints) -> CodePoints:
    """Code points in both sets."""
    return complement(merge_ranges((*complement(left), *complement(right))))


def utf8_sequences(code_points: CodePoints) -> Iterator[ByteRanges]:
    """The UTF-8 encodings of a set of characters: sequences of byte ranges, whose products are disjoint.

    Surrogates have no encoding and are left out. Splits as in Rust's crate utf8-ranges (Gallant).
    """
    for low, high in intersect(code_points, ((0, 0xD7FF), (0xE000, MAX_CODE_POINT))):
        yield from _split_range(low, high)


def _split_range(low: int, high: int) -> Iterator[ByteRanges]:
    """Split a range until each part is a product of byte ranges."""
    cut = next((last for last in (0x7F, 0x7FF, 0xFFFF) if low <= last < high), None)
    if cut is None and high > 0x7F:
        for bits in (6, 12, 18):
            tail = (1 << bits) - 1
            if low & ~tail == high & ~tail:
                break
            if low & tail:
                cut = low | tail
                break
            if high & tail != tail:
                cut = (high & ~tail) - 1
                break
    if cut is not None:
        yield from _split_range(low, cut)
        yield from _split_range(cut + 1, high)
    else:
        yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))


MAX_PATTERN_LENGTH = 1 << 16
MAX_NESTING = 100
MAX_REPETITIONS = 1 << 16

DIGITS: CodePoints = ((0x30, 0x39),)
WORD_CHARACTERS: CodePoints = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
WHITE_SPACE: CodePoints = ((0x09, 0x0D), (0x20, 0x20))

_CATEGORIES: Mapping[Any, CodePoints] = MappingProxyType(
    {
        _constants.CATEGORY_DIGIT: DIGITS,
        _constants.CATEGORY_WORD: WORD_CHARACTERS,
        _constants.CATEGORY_SPACE: WHITE_SPACE,
        _constants.CATEGORY_NOT_DIGIT: complement(DIGITS),
        _constants.CATEGORY_NOT_WORD: complement(WORD_CHARACTERS),
        _constants.CATEGORY_NOT_SPACE: complement(WHITE_SPACE),
    }
)


def parse_regex(pattern: str, *, is_search: bool = False) -> Expression:
    """Parse a regular expression.

    Args:
        is_search: any text that contains a match, unless the pattern begins with ``^`` and ends with ``$``.

    Raises:
        ValueError: its syntax is wrong or not supported.
    """
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise ValueError(
            f"the regular expression has {len(pattern)} characters: use at most {MAX_PATTERN_LENGTH}, or a choice"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # what re may read in another way one day
            tree = _parser.parse(pattern, re.ASCII)
        if tree.state.flags != re.ASCII:
            raise _unsupported_error("flag")
        items = list(tree)
        begins_anchored = bool(items) and items[0] == (_constants.AT, _constants.AT_BEGINNING)
        ends_anchored = bool(items) and items[-1] == (_constants.AT, _constants.AT_END)
        match = _convert(items[begins_anchored : len(items) - ends_anchored], 0)
    except re.error as error:
        position = 1 if error.pos is None else error.pos + 1
        raise ValueError(
            f"the regular expression has an error at character {position}: {error.msg}: correct it, or write a "
            "backslash before a character that stands for itself"
        ) from None
    except OverflowError:
        raise ValueError(
            f"the regular expression has too many repetitions: use at most {MAX_REPETITIONS}, or no upper limit"
        ) from None
    except RecursionError:
        raise nesting_error() from None
    anything = Repetition(CharacterSet(complement(())), 0, None)
    before, after = [anything] * (is_search and not begins_anchored), [anything] * (is_search and not ends_anchored)
    return Concatenation((*before, match, *after))


def _convert(items: Sequence[tuple[Any, Any]], depth: int) -> Expression:
    """The expression of a sequence of the parser's items."""
    if depth > MAX_NESTING:
        raise RecursionError
    parts = [_convert_item(operation, argument, depth) for operation, argument in items]
    return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))


def _convert_item(operation: Any, argument: Any, depth: int) -> Expression:
    match operation:
        case _constants.LITERAL:
            return CharacterSet(((argument, argument),))
        case _constants.NOT_LITERAL:
            return CharacterSet(complement(((argument, argument),)))
        case _constants.ANY:
            return CharacterSet(complement(((0x0A, 0x0A),)))
        case _constants.IN:
            return CharacterSet(_read_set(argument))
        case _constants.BRANCH:
            return Alternation(tuple(_convert(option, depth) for option in argument[1]))
        case _constants.SUBPATTERN:
            _, added_flags, removed_flags, items = argument
            if added_flags or removed_flags:
                raise _unsupported_error("flag")
            return _convert(items, depth + 1)
        case _constants.MAX_REPEAT | _constants.MIN_REPEAT:
            minimum, maximum, items = argument
            has_limit = maximum is not _constants.MAXREPEAT
            if max(minimum, maximum if has_limit else 0) > MAX_REPETITIONS:
                raise OverflowError
            return Repetition(_convert(items, depth), minimum, int(maximum) if has_limit else None)
        case _constants.AT if argument in (_constants.AT_BEGINNING, _constants.AT_END):
            name = "^" if argument == _constants.AT_BEGINNING else "$"
            raise ValueError(
                f"the regular expression has {name} in its middle, and it is supported at the ends only: remove it, "
                f"write \\{name} for the character, or ^(?:a|b)$ for ^a|b$"
            )
    raise _unsupported_error(str(argument if operation is _constants.AT else operation))


def _read_set(members: Sequence[tuple[Any, Any]]) -> CodePoints:
    ranges: list[tuple[int, int]] = []
    is_negated = False
    for operation, argument in members:
        match operation:
            case _constants.NEGATE:
                is_negated = True
            case _constants.LITERAL:
                ranges.append((argument, argument))
            case _constants.RANGE:
                ranges.append(argument)
            case _:
                ranges += _CATEGORIES[argument]
    return complement(merge_ranges(ranges)) if is_negated else merge_ranges(ranges)


def _unsupported_error(construct: str) -> ValueError:
    return ValueError(
        f"the regular expression has a construct that is not supported ({construct.lower()}): use characters, sets, "
        "groups, | and quantifiers only"
    )


def nesting_error() -> ValueError:
    """The error of an expression whose groups, choices and repetitions are too deep."""
    return ValueError(f"the regular expression is nested too deeply (at most {MAX_NESTING} groups): simplify it")
