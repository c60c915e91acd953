"""Pre-tokenization: regular expressions that split text into words; BPE merges within words only.

`regex` uses a newer version of Unicode than `tokenizers` and `tiktoken` (18 and 16 in late 2026). A text with
characters that were added in between may be split differently. The round trip is exact for any text.
"""

import re
from collections.abc import Callable
from itertools import chain, pairwise

import regex  # type: ignore[import-untyped, unused-ignore]

from files.regular_expression import check_pattern
from files.usage_error import prefix_errors

_CASELESS_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Each is spelled exactly as in the tokenizer.json of its family, so that loaded files are recognized. The pattern of
# GPT-4 is the published one; tiktoken has since changed how it splits trailing whitespace.
PATTERNS: dict[str, str] = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "gpt4": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    "qwen": _CASELESS_SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _REST,
    "llama3": _CASELESS_SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST,
}

Splitter = Callable[[str], list[str]]

_SPLIT_SECONDS = 30.0
_SPLIT_SECONDS_PER_CHARACTER = 1e-4
"""CPU time of the process to split a text by a pattern of a file, a hundred times what usual ones take."""


def pattern_name(expression: str) -> str:
    """Return the name of a regular expression in PATTERNS, or the expression itself if it has none."""
    return next((name for name, pattern in PATTERNS.items() if pattern == expression), expression)


def pattern_regex(pattern: str) -> str:
    """Return the regular expression of a name in PATTERNS; anything else is returned as it is."""
    return PATTERNS.get(pattern, pattern)


def make_splitter(pattern: str) -> Splitter:
    """Build a function that splits text into words whose concatenation is the text.

    `pattern` is a name in PATTERNS or a regular expression. Text between two matches is a separate word, as in
    Hugging Face's `Split(behavior="isolated")`; `^` and `$` match at line ends, as they do there (Oniguruma).

    Raises:
        ValueError: the expression does not compile, or looks like a misspelled name.
    """
    if pattern not in PATTERNS and (not pattern or regex.fullmatch(r"[\w.-]+", pattern)):
        raise ValueError(f"pattern {pattern!r} is unknown: use one of {', '.join(PATTERNS)}, or a regular expression")
    with prefix_errors("pattern"):
        compiled = regex.compile(check_pattern(pattern_regex(pattern)), regex.MULTILINE)
    if pattern_name(pattern) in PATTERNS:
        return _make_ascii_splitter(pattern_regex(pattern), compiled.findall)

    def split(text: str) -> list[str]:
        seconds = _SPLIT_SECONDS + len(text) * _SPLIT_SECONDS_PER_CHARACTER
        try:
            words: list[str] = [] if compiled.groups else compiled.findall(text, timeout=seconds)
            if sum(map(len, words)) < len(text):  # there is text between matches, or findall would return groups
                spans = (match.span() for match in compiled.finditer(text, timeout=seconds))
                words = [text[start:end] for start, end in pairwise(sorted({0, len(text), *chain(*spans)}))]
            return list(filter(None, words))
        except TimeoutError:
            raise ValueError(
                f"the tokenizer's pattern {pattern[:200]!r} takes more than {seconds:.0f} s for a text of {len(text)} "
                "characters: correct pre_tokenizer in tokenizer.json, without nested repetitions such as (a|aa)+"
            ) from None

    return split


def _make_ascii_splitter(expression: str, find_all: Splitter) -> Splitter:
    """Build the splitter of one of PATTERNS, whose matches cover any text.

    In ASCII text the Unicode properties are character ranges, for which `re` is twice as fast as `regex`.
    """
    ranges = expression.replace(r"\p{L}\p{N}", "A-Za-z0-9").replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]")
    find_all_ascii: Splitter = re.compile(ranges, re.ASCII).findall
    return lambda text: find_all_ascii(text) if text.isascii() else find_all(text)
