"""Special tokens: their options, as Hugging Face files set them, and the search for them in a text."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import asdict, dataclass
from typing import Any

import regex  # type: ignore[import-untyped, unused-ignore]

_SPACES_AT_START = regex.compile(r"\A\p{White_Space}+")
_SPACES_AT_END = regex.compile(r"(?r)\p{White_Space}+\Z")
_WORD_AT_START = regex.compile(r"\A\w")
_WORD_AT_END = regex.compile(r"(?r)\w\Z")

TOKEN_SETS = ("visible_tokens", "normalized_tokens", "lstrip_tokens", "rstrip_tokens", "single_word_tokens")
"""The options that are sets of special tokens."""


@dataclass(frozen=True)
class TokenOptions:
    """Options for the encoding of words and special tokens. The sets contain special tokens by their text."""

    ignore_merges: bool = False
    """A word that is a token becomes that token without applying merges (Llama 3)."""
    visible_tokens: frozenset[str] = frozenset()
    """Tokens that `decode(skip_special=True)` keeps: added tokens that are not marked special, such as `<think>` of
    Qwen3."""
    normalized_tokens: frozenset[str] = frozenset()
    """Added tokens that are marked normalized. They are searched before normalization, like the others: the ids differ
    from Hugging Face's only where normalization changes or makes the text of one, or where one overlaps another."""
    lstrip_tokens: frozenset[str] = frozenset()
    """Tokens that absorb whitespace before them; `decode` does not restore it."""
    rstrip_tokens: frozenset[str] = frozenset()
    """Tokens that absorb whitespace after them; `decode` does not restore it."""
    single_word_tokens: frozenset[str] = frozenset()
    """Tokens that are recognized only as whole words."""
    bos_token: str | None = None
    """The token at the beginning of texts."""
    adds_bos: bool = False
    """Whether the model expects `bos_token` before a text that is not a chat. `encode` never adds it, see
    `Tokenizer.prefix_ids`."""

    def to_json(self) -> dict[str, Any]:
        """The options as JSON, of which the fingerprint is computed."""
        return {name: sorted(value) if name in TOKEN_SETS else value for name, value in asdict(self).items()}

    def check(self, special_tokens: Collection[str]) -> None:
        """Check that all tokens are special tokens.

        Raises:
            ValueError: one is not; names it and its option.
        """
        for name in TOKEN_SETS:
            for text in sorted(getattr(self, name) - set(special_tokens)):
                raise ValueError(f"{name}: {text!r} is not among the special tokens {sorted(special_tokens)}")
        if (self.bos_token is not None or self.adds_bos) and self.bos_token not in special_tokens:
            raise ValueError(f"bos_token {self.bos_token!r} is not among the special tokens {sorted(special_tokens)}")


class SpecialTokens:
    """A search for special tokens: leftmost first, at one position the longest.

    Args:
        ids: text to id.
        lstrip, rstrip: tokens that absorb the whitespace before them, or after them.
        single_word: tokens that match only if no letter, digit or underscore is adjacent.
    """

    def __init__(
        self,
        ids: Mapping[str, int],
        lstrip: Set[str] = frozenset(),
        rstrip: Set[str] = frozenset(),
        single_word: Set[str] = frozenset(),
    ) -> None:
        self._ids = {text: (token_id,) for text, token_id in ids.items()}
        self._lstrip, self._rstrip, self._single_word = lstrip, rstrip, single_word
        self._has_no_options = not (ids.keys() & (lstrip | rstrip | single_word))
        # Alternatives are tried in order: longest first makes the match the longest.
        alternatives = map(re.escape, sorted(ids, key=len, reverse=True))
        self.regex = re.compile("|".join(alternatives) or "(?!)")  # without tokens, it never matches

    def split_text(self, text: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield pieces of text, each with the id of the special token after it; the last piece has none."""
        end = 0
        for match in self.regex.finditer(text):
            start, next_end = match.span() if self._has_no_options else self._find_extent(text, end, match)
            if start < next_end:
                yield text[end:start], self._ids[match.group()]
                end = next_end
        yield text[end:], ()

    def insert_marker(self, text: str, marker: str) -> str:
        """Insert `marker` after the first character of each special token, so that it no longer matches."""
        return self.regex.sub(lambda match: match.group()[0] + marker + match.group()[1:], text)

    def _find_extent(self, text: str, end: int, match: re.Match[str]) -> tuple[int, int]:
        """Compute the extent of a match with the whitespace that it absorbs; an empty extent if it does not match."""
        token, start, stop = match.group(), match.start(), match.end()
        if token in self._single_word and (_WORD_AT_END.search(text, 0, start) or _WORD_AT_START.match(text[stop:])):
            return end, end
        if token in self._lstrip and (spaces := _SPACES_AT_END.search(text, 0, start)):
            start = spaces.start()
        if token in self._rstrip and (spaces := _SPACES_AT_START.match(text[stop:])):
            stop += spaces.end()
        return max(start, end), max(stop, end)
