"""Reads regular expressions with the parser of Python's `re`, as far as they describe sets of texts.

Supported are characters and escapes, ``.`` (all but a line feed), sets, ``\\d \\w \\s \\D \\W \\S`` (ASCII, as with
``re.ASCII``), groups, ``|``, and ``? * + {n} {n,} {n,m} {,m}``, also lazy ones, which match the same texts. ``^`` and
``$`` may stand at the two ends.

No library makes the automaton: of those with wheels outlines-core 0.2.14 has no bound of its states or of the time (it
ends the process on ``((a{1000}){1000}){1000}``) and ignores keys of schemas, and llguidance shows no automaton.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from re import _constants, _parser  # type: ignore[attr-defined]
from types import MappingProxyType
from typing import Any

from diffusionlm.inference.constraints.expressions import (
    Alternation,
    CharacterSet,
    CodePoints,
    Concatenation,
    Expression,
    Repetition,
    complement,
    merge_ranges,
)

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


@dataclass(frozen=True)
class ParsedPattern:
    """A regular expression without its anchors."""

    expression: Expression
    begins_anchored: bool
    """It began with ``^``."""
    ends_anchored: bool


def parse_regex(pattern: str) -> ParsedPattern:
    """Parse a regular expression.

    Raises:
        ValueError: its syntax is wrong or not supported.
    """
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise ValueError(
            f"the regular expression has {len(pattern)} characters: use at most {MAX_PATTERN_LENGTH}, or a choice"
        )
    try:
        tree = _parser.parse(pattern, re.ASCII)
    except re.error as error:
        position = 1 if error.pos is None else error.pos + 1
        raise ValueError(
            f"the regular expression has an error at character {position}: {error.msg}: correct it, or write a "
            "backslash before a character that stands for itself"
        ) from None
    except OverflowError:
        raise _repetition_error() from None
    except RecursionError:
        raise _nesting_error() from None
    if tree.state.flags != re.ASCII:
        raise _unsupported_error("flag")
    items = list(tree)
    begins_anchored = bool(items) and items[0] == (_constants.AT, _constants.AT_BEGINNING)
    ends_anchored = bool(items) and items[-1] == (_constants.AT, _constants.AT_END)
    expression = _convert(items[begins_anchored : len(items) - ends_anchored], 0)
    return ParsedPattern(expression, begins_anchored, ends_anchored)


def _convert(items: Sequence[tuple[Any, Any]], depth: int) -> Expression:
    """The expression of a sequence of the parser's items."""
    if depth > MAX_NESTING:
        raise _nesting_error()
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
                raise _repetition_error()
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


def _repetition_error() -> ValueError:
    return ValueError(
        f"the regular expression has too many repetitions: use at most {MAX_REPETITIONS}, or no upper limit"
    )


def _nesting_error() -> ValueError:
    return ValueError(f"the regular expression has groups nested more than {MAX_NESTING} deep: simplify it")
