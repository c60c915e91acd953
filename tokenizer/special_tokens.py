"""Search for special tokens in a text."""

import re
from collections.abc import Iterator, Mapping, Set

import regex  # type: ignore[import-untyped, unused-ignore]

_SPACES_AT_START = regex.compile(r"\A\p{White_Space}+")
_SPACES_AT_END = regex.compile(r"(?r)\p{White_Space}+\Z")
_WORD_AT_START = regex.compile(r"\A\w")
_WORD_AT_END = regex.compile(r"(?r)\w\Z")


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
        self._regex = re.compile("|".join(alternatives)) if ids else None

    def split_text(self, text: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield pieces of text, each with the id of the special token after it; the last piece has none."""
        end = 0
        if self._regex is not None:
            for match in self._regex.finditer(text):
                start, next_end = match.span() if self._has_no_options else self._find_extent(text, end, match)
                if start < next_end:
                    yield text[end:start], self._ids[match.group()]
                    end = next_end
        yield text[end:], ()

    def search(self, text: str) -> re.Match[str] | None:
        """Find the first special token."""
        return None if self._regex is None else self._regex.search(text)

    def insert_marker(self, text: str, marker: str) -> str:
        """Insert `marker` after the first character of each special token, so that it no longer matches."""
        if self._regex is None:
            return text
        return self._regex.sub(lambda match: match.group()[0] + marker + match.group()[1:], text)

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
