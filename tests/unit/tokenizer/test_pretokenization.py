"""How text is cut into words: every named pattern, on both of its ways."""

from __future__ import annotations

from itertools import product

import pytest
import regex

from tokenizer import PATTERNS, patterns
from tokenizer.patterns import make_splitter

SOME_PATTERNS = [pytest.param(name, marks=[] if name == "qwen" else pytest.mark.slow) for name in PATTERNS]


@pytest.mark.parametrize("name", SOME_PATTERNS)
def test_ascii_text_is_split_by_the_pattern(name: str) -> None:
    """ASCII goes through another engine, so all short texts of what the patterns tell apart are compared."""
    split, expected = make_splitter(name), regex.compile(PATTERNS[name]).findall
    for length, symbols in ((5, "sL1' \n\r!"), (4, "aTlVeRM'd\t\x0b\x1c\x00 9\n~")):
        for symbols_of_text in product(symbols, repeat=length):
            text = "".join(symbols_of_text)
            assert split(text) == expected(text), ascii(text)
    for first, second in product(map(chr, range(0x80)), repeat=2):
        text = f"{first}{second}{first}  {second}a'{first}"
        assert split(text) == expected(text), ascii(text)


def test_the_expression_of_a_named_pattern_is_that_pattern() -> None:
    text = "It'S 1234 \n\n  é!"
    for name, expression in PATTERNS.items():
        assert make_splitter(expression)(text) == make_splitter(name)(text)
    assert make_splitter("gpt4")(text)[:4] == ["It", "'S", " ", "123"]
    assert make_splitter("qwen")(text)[:4] == ["It", "'S", " ", "1"]
    assert make_splitter("gpt2")(text)[:4] == ["It", "'", "S", " 1234"]


def test_a_pattern_that_takes_forever_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without groups, which have splitters of their own."""
    monkeypatch.setattr(patterns, "_SPLIT_SECONDS", 0.01)
    for expression in ("(?:.|..|...)+(?<=z)", "(.|..|...)+(?<=z)"):
        split = make_splitter(expression)
        assert split("xz") == ["xz"]
        with pytest.raises(ValueError, match=r"pattern .* takes more than .* tokenizer\.json"):
            split("x" * 60)
