"""Regular expressions over characters, as trees. `regex_parser.py` and `json_schema.py` build them, `byte_automaton.py`
compiles them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
class LiteralText:
    """An expression that matches one text alone."""

    text: str


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


Expression = CharacterSet | LiteralText | Concatenation | Alternation | Repetition | OptionalItems


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
