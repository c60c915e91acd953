"""The text of answers, token by token."""

from __future__ import annotations

import codecs
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from tokenizer import IncrementalDecoder, Tokenizer


def decode_continuation(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """Text of ids that follow others: `Tokenizer.decode` without the rule that strips a space at the beginning."""
    return tokenizer.decode_bytes(ids).decode("utf-8", errors="replace")


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Text of each id; joined they equal `Tokenizer.decode`. A character of several ids is at the last of them."""
    decoder = IncrementalDecoder(tokenizer)
    texts = [decoder.push(token) for token in ids]
    if texts:
        texts[-1] += decoder.finish()
    return texts


@dataclass(frozen=True)
class AnswerToken:
    """A token of an answer."""

    token_id: int
    start: int
    """Characters of the answer before it."""
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]
    num_repeated_bytes: int = 0
    """Its first bytes that belong to the text before the answer."""
    text: str = ""
    """What it adds to the answer (`AnswerText.visible_tokens`)."""


class AnswerText:
    """Follows one text from the left, token by token, so that it does not depend on how many arrive together.

    Args:
        stop: the text ends before the first of these.
        num_repeated_bytes: bytes of the first token that belong to the text before this one.
        hidden_ids: tokens without a text.
        includes_stop: the text ends behind the stop string instead.
        min_new_tokens: among this many first tokens no stop string ends.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        num_repeated_bytes: int = 0,
        *,
        hidden_ids: Collection[int] = (),
        includes_stop: bool = False,
        min_new_tokens: int = 0,
    ) -> None:
        self.text = ""
        """All final text, without a stop string unless it is included."""
        self.tokens: list[AnswerToken] = []
        """Tokens of the text; with a stop string through the one that completes it."""
        self.is_stopped = False
        """A stop string was found."""
        self.is_complete = False
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._num_skipped = num_repeated_bytes
        self._hidden_ids, self._includes_stop, self._min_new_tokens = hidden_ids, includes_stop, min_new_tokens
        self._num_taken = self._num_taken_tokens = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._longest_stop = max(map(len, self._stop), default=0)

    @property
    def sendable_length(self) -> int:
        """Characters that no later token takes back: without the beginning of what may become a stop string."""
        if self.is_complete:
            return len(self.text)
        longest = min(self._longest_stop - 1, len(self.text))
        for length in range(longest, 0, -1):
            end = self.text[-length:]
            if any(stop.startswith(end) for stop in self._stop if len(stop) > length):
                return len(self.text) - length
        return len(self.text)

    def visible_tokens(self, first: int = 0) -> list[AnswerToken]:
        """Tokens of the text from a number on, without those of a stop string. Their texts joined are the text: a
        character of several tokens is in the last of them."""
        tokens = [token for token in self.tokens[first:] if not self.is_stopped or token.start < len(self.text)]
        ends = [*(token.start for token in tokens), len(self.text)][1:]
        return [replace(token, text=self.text[token.start : end]) for token, end in zip(tokens, ends, strict=True)]

    def take_new(self) -> tuple[str, list[AnswerToken]]:
        """Text and tokens since the last call that no later token changes."""
        end = last_end = self.sendable_length
        if not self.is_complete and self._decoder.getstate()[0]:  # an incomplete character may end the last token
            last_end = min(end, len(self.text) - 1)
        tokens = self.visible_tokens(self._num_taken_tokens)
        tokens = [token for token in tokens if self.is_complete or token.start + len(token.text) <= last_end]
        text = self.text[self._num_taken : end]
        self._num_taken = max(end, self._num_taken)
        self._num_taken_tokens += len(tokens)
        return text, tokens

    def push(self, token_id: int, logprob: float = math.nan, top_logprobs: tuple[tuple[int, float], ...] = ()) -> None:
        """Add a token; nothing happens after a stop string."""
        if self.is_complete:
            return
        data = b"" if token_id in self._hidden_ids else self._tokenizer.token_bytes(token_id)
        num_repeated = min(self._num_skipped, len(data))
        self._num_skipped -= num_repeated
        self.tokens.append(AnswerToken(token_id, len(self.text), logprob, top_logprobs, num_repeated))
        self._append(self._decoder.decode(data[num_repeated:]))

    def finish(self) -> None:
        """End the text; an incomplete character becomes U+FFFD."""
        if not self.is_complete:
            self._append(self._decoder.decode(b"", final=True))
            self.is_complete = True

    def _append(self, piece: str) -> None:
        if not piece:
            return
        num_searched = len(self.text)
        self.text += piece
        if len(self.tokens) <= self._min_new_tokens:
            return
        starts = [(self.text.find(stop, max(0, num_searched - len(stop) + 1)), len(stop)) for stop in self._stop]
        if found := [(start, length) for start, length in starts if start >= 0]:
            start, length = min(found)
            self.text = self.text[: start + length * self._includes_stop]
            self.is_stopped = self.is_complete = True
