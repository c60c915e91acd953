"""Parses regular expressions. The syntax is the part of Python's `re` that describes sets of texts:

characters and escapes (``\\n``, ``\\x41``, ``\\u00e9``, ``\\.``), ``.`` (all but a line feed), sets ``[a-z_]`` and
``[^"]``, ``\\d \\w \\s \\D \\W \\S`` (ASCII, as with ``re.ASCII``), groups ``(...)``, ``(?:...)`` and
``(?P<name>...)``, ``|``, and ``? * + {n} {n,} {n,m} {,m}``, also lazy ones, which match the same texts. ``^`` and ``$``
may stand at the two ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from diffusionlm.inference.constraints.expressions import (
    MAX_CODE_POINT,
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

_CLASSES: Mapping[str, CodePoints] = MappingProxyType(
    {
        "d": DIGITS,
        "w": WORD_CHARACTERS,
        "s": WHITE_SPACE,
        "D": complement(DIGITS),
        "W": complement(WORD_CHARACTERS),
        "S": complement(WHITE_SPACE),
    }
)
_CONTROLS: Mapping[str, int] = MappingProxyType({"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "0": 0})
_HEX_DIGITS: Mapping[str, int] = MappingProxyType({"x": 2, "u": 4, "U": 8})
_QUANTIFIERS: Mapping[str, tuple[int, int | None]] = MappingProxyType({"?": (0, 1), "*": (0, None), "+": (1, None)})


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
        ValueError: its syntax is wrong or not supported; names the position.
    """
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise ValueError(
            f"the regular expression has {len(pattern)} characters: use at most {MAX_PATTERN_LENGTH}, or a choice"
        )
    return _RegexParser(pattern).parse()


class _RegexParser:
    def __init__(self, pattern: str) -> None:
        self._pattern, self._index, self._depth = pattern, 0, 0

    def parse(self) -> ParsedPattern:
        begins_anchored = self._take("^")
        expression = self._parse_alternation()
        ends_anchored = self._take("$")
        if self._index < len(self._pattern):
            if self._peek() == ")":
                raise self._error("a closing parenthesis has no opening one", "write \\) for the character")
            raise self._error("$ is supported at the end only", "write \\$ for the character")
        if (begins_anchored or ends_anchored) and isinstance(expression, Alternation):
            raise self._error("an anchor beside | belongs to one of the options only", "write ^(?:a|b)$")
        return ParsedPattern(expression, begins_anchored, ends_anchored)

    def _parse_alternation(self) -> Expression:
        options = [self._parse_sequence()]
        while self._take("|"):
            options.append(self._parse_sequence())
        return options[0] if len(options) == 1 else Alternation(tuple(options))

    def _parse_sequence(self) -> Expression:
        parts: list[Expression] = []
        while self._index < len(self._pattern) and self._peek() not in "|)$":
            parts.append(self._parse_quantified())
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def _parse_quantified(self) -> Expression:
        part = self._parse_atom()
        bounds = self._take_quantifier()
        if bounds is None:
            return part
        self._take("?")  # lazy: the same texts
        if self._peek() == "+":
            raise self._error("possessive quantifiers are not supported", "remove the second +")
        if self._take_quantifier() is not None:
            raise self._error("a quantifier follows another", "put the first one into a group")
        return Repetition(part, *bounds)

    def _take_quantifier(self) -> tuple[int, int | None] | None:
        """Bounds of the quantifier at this place, if there is one."""
        if self._peek() in _QUANTIFIERS:
            return _QUANTIFIERS[self._next()]
        end = self._pattern.find("}", self._index)
        if self._peek() != "{" or end < 0:
            return None
        low, comma, high = self._pattern[self._index + 1 : end].partition(",")
        if not (low or high) or not all(text.isdecimal() and text.isascii() for text in (low, high) if text):
            return None  # an ordinary brace, as in re
        minimum = self._to_count(low or "0")
        maximum = (self._to_count(high) if high else None) if comma else minimum
        if maximum is not None and maximum < minimum:
            raise self._error(f"{{{low},{high}}} has a maximum below its minimum", "exchange the two")
        self._index = end + 1
        return minimum, maximum

    def _to_count(self, text: str) -> int:
        if len(text) > 9 or int(text) > MAX_REPETITIONS:
            raise self._error(f"{text[:12]} repetitions are too many", f"use at most {MAX_REPETITIONS}, or no limit")
        return int(text)

    def _parse_atom(self) -> Expression:
        character = self._next()
        if character == "(":
            return self._parse_group()
        if character == "[":
            return CharacterSet(self._parse_set())
        if character == ".":
            return CharacterSet(complement(((0x0A, 0x0A),)))
        if character == "\\":
            return CharacterSet(self._parse_escape())
        if character == "^":
            raise self._error("^ is supported at the beginning only", "write \\^ for the character", back=1)
        if character in _QUANTIFIERS:
            raise self._error(f"{character} has nothing to repeat", f"write \\{character} for the character", back=1)
        return CharacterSet(((ord(character), ord(character)),))

    def _parse_group(self) -> Expression:
        start = self._index
        if self._take("?"):
            is_named = self._take("P<")
            if is_named:
                end = self._pattern.find(">", self._index)
                is_named = end > 0 and self._pattern[self._index : end].isidentifier()
                self._index = end + 1 if is_named else self._index
            if not is_named and not self._take(":"):
                self._index = start
                raise self._error(
                    f"({self._pattern[start : start + 3]} is not supported",
                    "of the groups that begin with (? only (?:...) and (?P<name>...) are",
                )
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise self._error(f"groups are nested more than {MAX_NESTING} deep", "simplify the expression")
        expression = self._parse_alternation()
        self._depth -= 1
        if self._peek() == "$":
            raise self._error("$ is supported at the end only", "write \\$ for the character")
        if not self._take(")"):
            self._index = start - 1
            raise self._error("a parenthesis is not closed", "close it, or write \\( for the character")
        return expression

    def _parse_set(self) -> CodePoints:
        start = self._index
        is_negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        is_first = True
        while is_first or self._peek() != "]":
            if self._index >= len(self._pattern):
                self._index = start - 1
                raise self._error("a set is not closed", "add ], or write \\[ for the character")
            is_first = False
            low = self._parse_set_member()
            is_range = self._peek() == "-" and self._pattern[self._index + 1 : self._index + 2] not in ("]", "")
            if not is_range:
                ranges += low
                continue
            self._next()
            high = self._parse_set_member()
            if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or high[0][0] != high[0][1]:
                raise self._error("a range has a class as an end", "write \\- for the character")
            if high[0][0] < low[0][0]:
                raise self._error("a range has its ends exchanged", "write the lower one first")
            ranges.append((low[0][0], high[0][0]))
        self._next()
        members = merge_ranges(ranges)
        return complement(members) if is_negated else members

    def _parse_set_member(self) -> CodePoints:
        character = self._next()
        if character == "\\":
            return ((0x08, 0x08),) if self._take("b") else self._parse_escape()
        return ((ord(character), ord(character)),)

    def _parse_escape(self) -> CodePoints:
        if self._index >= len(self._pattern):
            raise self._error("a backslash is the last character", "write \\\\ for the character", back=1)
        character = self._next()
        if character in _CLASSES:
            return _CLASSES[character]
        if character == "0" and self._peek() in "01234567" and self._peek():
            raise self._error("octal escapes are not supported", "write \\x and two hexadecimal digits", back=2)
        code_point = _CONTROLS.get(character, ord(character))
        if character in _HEX_DIGITS:
            digits = self._pattern[self._index : self._index + _HEX_DIGITS[character]]
            if len(digits) < _HEX_DIGITS[character] or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
                raise self._error(
                    f"\\{character} needs {_HEX_DIGITS[character]} hexadecimal digits", "add them", back=2
                )
            self._index += len(digits)
            code_point = int(digits, 16)
        elif character.isalnum() and character.isascii() and character not in _CONTROLS:
            raise self._error(f"\\{character} is not supported", "describe the characters in another way", back=2)
        if code_point > MAX_CODE_POINT:
            raise self._error(f"\\U{code_point:08x} is not a character", f"use at most \\U{MAX_CODE_POINT:08x}")
        return ((code_point, code_point),)

    def _peek(self) -> str:
        """The next character; empty at the end."""
        return self._pattern[self._index : self._index + 1]

    def _next(self) -> str:
        if self._index >= len(self._pattern):
            raise self._error("the expression ends too early", "complete it")
        self._index += 1
        return self._pattern[self._index - 1]

    def _take(self, text: str) -> bool:
        """Skip a text if it comes next."""
        is_next = self._pattern.startswith(text, self._index)
        self._index += len(text) if is_next else 0
        return is_next

    def _error(self, problem: str, remedy: str, back: int = 0) -> ValueError:
        return ValueError(
            f"the regular expression has an error at character {self._index - back + 1}: {problem}: {remedy}"
        )
