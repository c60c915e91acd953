"""Automata of regular expressions and choices, compared with Python's `re`."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from diffusionlm.inference.constraints.byte_automaton import ByteAutomaton, compile_expression
from diffusionlm.inference.constraints.expressions import (
    Alternation,
    OptionalItems,
    Repetition,
    literal,
    parse_regex,
    utf8_sequences,
)
from tests.schema_texts import accepts

PATTERNS = [
    "",
    "a",
    "ab|c",
    "(a|b)*c",
    "a?b+c*",
    "a{2}b{1,2}",
    "(ab){0,2}c{,2}",
    "(?:a|bc){2,}",
    "[a-b]*[^a]",
    "[^abc]?.",
    "(?P<name>a|)(b|c)??",
    "a{,1}?b*?",
    "^(?:a|b)c$",
    r"\x61[\-\]b]?\.?",
    r"\d\D?|\w\W|\s\S",
    "((a|b)(a|c)){1,2}",
    "a{b}|c{1",
    "[a-]|[]b]|[^]c]",
    r"[\d\s]{1,2}b?",
    r"é?[à-ü]|[^\x00-\x7f]",
    r"\08|[\0-a]?",
    r"\u00e9|\U0001f600|\n",
    r"\012|\141{2}",
]
ALPHABET = "abc1 -]{}.é😀\n"


def compile_regex(pattern: str) -> ByteAutomaton:
    return compile_expression(parse_regex(pattern))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_same_texts_as_re(pattern: str) -> None:
    automaton, expected = compile_regex(pattern), re.compile(pattern, re.ASCII)
    for length in range(4):
        for letters in itertools.product(ALPHABET, repeat=length):
            text = "".join(letters)
            assert accepts(automaton, text.encode()) == (expected.fullmatch(text) is not None), text


def test_utf8_ranges() -> None:
    """Every character of a set, and no other bytes."""
    edges = [0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFFF, 0x10000, 0x10FFFF, 0xD7FF, 0xE000]
    edges += np.random.default_rng(0).integers(0, 0x110000, 20).tolist()
    for low, high in itertools.combinations(sorted(edges), 2):
        sequences = list(utf8_sequences(((low, high),)))
        num_texts = sum(int(np.prod([last - first + 1 for first, last in sequence])) for sequence in sequences)
        num_surrogates = max(0, min(high, 0xDFFF) - max(low, 0xD800) + 1)
        assert num_texts == high - low + 1 - num_surrogates
        for code_point in (low, high, (low + high) // 2):
            if not 0xD800 <= code_point <= 0xDFFF:
                text = chr(code_point).encode()
                matches = [s for s in sequences if len(s) == len(text)
                           and all(a <= byte <= b for byte, (a, b) in zip(text, s, strict=True))]  # fmt: skip
                assert len(matches) == 1


def test_choices() -> None:
    choices = ["yes", "no", "", "nö", "yes!"]
    automaton = compile_expression(Alternation(tuple(map(literal, choices))))
    for text in [*choices, "ye", "n", "yes!!", "noyes", "n\xc3"]:
        assert accepts(automaton, text.encode()) == (text in choices)
    behind = automaton.with_prefix(b" \xffy")
    for text in [*choices, "ye", "n"]:
        assert accepts(behind, b" \xffy" + text.encode()) == (text in choices)
        assert not accepts(behind, text.encode())
    assert accepts(automaton.with_prefix(b""), b"yes")


def test_repetition_with_separator_and_optional_items() -> None:
    listing = compile_expression(Repetition(literal("x"), 0, None, literal(",")))
    bounded = compile_expression(Repetition(literal("x"), 2, 3, literal(",")))
    for count in range(6):
        text = ",".join("x" * count).encode()
        assert accepts(listing, text)
        assert accepts(bounded, text) == (2 <= count <= 3)
    assert not accepts(listing, b"x,") and not accepts(listing, b",x") and not accepts(listing, b"xx")
    items = OptionalItems(((literal("a"), False), (literal("b"), True), (literal("c"), False)), literal(","))
    automaton = compile_expression(items)
    texts = {"".join(letters) for n in range(7) for letters in itertools.product("abc,", repeat=n)}
    assert {text for text in texts if accepts(automaton, text.encode())} == {"a,b,c", "a,b", "b,c", "b"}


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a)", "character 2: unbalanced parenthesis: correct it"),
        ("a{99999999999}", "too many repetitions: use at most 65536"),
        ("a{70000}", "too many repetitions"),
        ("(?=a)", r"not supported \(assert\)"),
        ("(?i)a", r"not supported \(flag\)"),
        ("(?i:a)", r"not supported \(flag\)"),
        (r"\bword", r"not supported \(at_boundary\)"),
        ("a$b", r"\$ in its middle"),
        ("^a|b", r"\^ in its middle.*write \\\^ for the character, or \^\(\?:a\|b\)"),
        ("(" * 101 + ")" * 101, "nested too deeply"),
        ("(" * 20000 + ")" * 20000, "nested too deeply"),
        ("a" * 70000, "70000 characters"),
        ("[^\\x00-\\U0010ffff]", "is empty"),
    ],
)  # fmt: skip
def test_errors(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compile_regex(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|b)*a(a|b){20}",
        "[" + "".join(f"\\x{code:02x}" for code in range(0x21, 0x7F, 2)) + "]{65000}",
        *(
            pytest.param(pattern, marks=pytest.mark.slow)
            for pattern in (
                "((a{1000}){1000}){1000}",
                "((a?){1000}){100}",
                "(.*x){3000}y",
                "((((a?)+)+)+){60000}",
                "(?:a?){30000}",
                f"(?:{'|' * 50}){{60000}}",
                "[" + "".join(map(chr, range(0xD800, 0xE000, 2))) + "]{65000}",
            )
        ),
    ],
)
def test_hostile_patterns_end_in_an_error(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"too large|is empty"):
        compile_regex(pattern)


def test_choices_that_begin_alike_share_states() -> None:
    choices = Alternation(tuple(literal(f"{number:05d}") for number in range(10_000)))
    assert compile_expression(choices).num_states == 1 + 1 + 10 + 100 + 1000 + 1
    with pytest.raises(ValueError, match="more than 500 states"):
        compile_expression(choices, 500)
