"""Token healing: the end of a text is decoded again where it may be the beginning of a longer token.

Encoded on its own, ``for i in `` ends with the token of a space, which no word follows in training: there the space is
a part of the word's token. So the end of the text is taken back, and the first masked position after it allows only
tokens that begin with what was taken back (Lundberg 2023, "Prompt Boundaries and Token Healing"). The text itself never
changes. Text after a masked span is encoded on its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from diffusionlm.inference.settings import DecodingSettings
from diffusionlm.inference.text import required_mask_token_id, split_infill
from tokenizer import Tokenizer

SPACE = b" "


@dataclass(frozen=True, eq=False)
class HealedText:
    """A text as token ids, and the tokens that its healed positions allow."""

    token_ids: tuple[int, ...]
    """A prompt or a canvas, without what was taken back."""
    allowed_token_ids: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)
    """Healed position -> the tokens that begin with what was taken back before it. In a prompt it is the position of
    the first new token."""
    repeated_bytes: bytes = b""
    """The end of a prompt, which the first new token repeats."""
    num_removed_tokens: int = 0
    """How many more tokens the text has without healing."""

    @property
    def num_repeated_bytes(self) -> int:
        return len(self.repeated_bytes)


@dataclass(frozen=True)
class _Continuations:
    """Tokens that begin with some bytes, as ids."""

    equal: NDArray[np.int64]
    """Tokens of these bytes."""
    longer: NDArray[np.int64]
    all: NDArray[np.int64]


class TokenHealer:
    """Encodes texts with token healing.

    Args:
        excluded_token_ids: tokens that a healed position must not hold, such as suppressed ones.
        max_new_tokens: of prompts; None: more than one.
    """

    def __init__(
        self, tokenizer: Tokenizer, excluded_token_ids: Collection[int] = (), max_new_tokens: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        allowed_ids = set(tokenizer.vocab.values()) - set(excluded_token_ids)
        self._tokens = sorted((tokenizer.token_bytes(token), token) for token in allowed_ids)
        self._continuations: dict[bytes, _Continuations] = {}

    @classmethod
    def from_settings(cls, tokenizer: Tokenizer, settings: DecodingSettings) -> TokenHealer:
        """Return a healer that excludes the tokens that are never generated and those that would end the text."""
        excluded_token_ids = {*settings.forbidden_token_ids, *settings.stop_token_ids}
        return cls(tokenizer, excluded_token_ids, settings.config.max_new_tokens)

    def heal_prompt(self, text: str, prefix_ids: Sequence[int] = ()) -> HealedText:
        """Encode a text to continue, and take back its last token, or its last space.

        Nothing is taken back if no longer token begins with it, if it is the first token, or, except for a space, if
        only one new token is requested.

        Args:
            prefix_ids: tokens before the text, which stay.
        """
        text_ids, kept_ids, start = self._split_end(text)
        allowed_ids = self._allowed_token_ids(start, is_alone=self._max_new_tokens == 1)
        if allowed_ids is None or not (prefix_ids or kept_ids):
            return HealedText((*prefix_ids, *text_ids))
        token_ids = (*prefix_ids, *kept_ids)
        return HealedText(token_ids, {len(token_ids): allowed_ids}, start, len(text_ids) - len(kept_ids))

    def heal_infill(self, text: str, prefix_ids: Sequence[int] = (), mask_token_id: int | None = None) -> HealedText:
        """Encode a text with masked spans, like `parse_infill`, and take back the space before each span.

        Other tokens stay, because a token that is taken back takes a position of the span.

        Raises:
            ValueError: like `parse_infill`.
        """
        return self.heal_pieces(split_infill(text), prefix_ids, mask_token_id)

    def heal_pieces(
        self, pieces: Sequence[tuple[str, int]], prefix_ids: Sequence[int] = (), mask_token_id: int | None = None
    ) -> HealedText:
        """Encode pieces of a text like `heal_infill`.

        Args:
            pieces: each with the number of masked tokens after it; 0 after the last one alone.
        """
        mask = required_mask_token_id(self._tokenizer, mask_token_id)
        token_ids, allowed_token_ids, num_removed = list(prefix_ids), {}, 0
        for piece, num_masked in pieces[:-1]:
            piece_ids, kept_ids, start = self._split_end(piece)
            allowed_ids = self._allowed_token_ids(start, is_alone=num_masked == 1) if start == SPACE else None
            if allowed_ids is None or not (token_ids or kept_ids):
                token_ids += piece_ids
            else:
                token_ids += kept_ids
                num_removed += len(piece_ids) - len(kept_ids)
                allowed_token_ids[len(token_ids)] = allowed_ids
            token_ids += [mask] * num_masked
        token_ids += self._tokenizer.encode(pieces[-1][0])
        return HealedText(tuple(token_ids), allowed_token_ids, num_removed_tokens=num_removed)

    def _split_end(self, text: str) -> tuple[list[int], list[int], bytes]:
        """Ids of a text, its ids without its end, and the bytes of that end: the last token, or of white space the last
        space.

        There are no bytes if the text cannot be split so.
        """
        token_ids = self._tokenizer.encode(text)
        if not token_ids:
            return [], [], b""
        last = self._tokenizer.token_bytes(token_ids[-1])
        if not (last.isspace() and last.endswith(SPACE)):
            return token_ids, token_ids[:-1], last
        kept_ids = self._tokenizer.encode(text[:-1])
        is_same_text = self._tokenizer.decode_bytes(kept_ids) + SPACE == self._tokenizer.decode_bytes(token_ids)
        return (token_ids, kept_ids, SPACE) if is_same_text else (token_ids, [], b"")

    def _allowed_token_ids(self, start: bytes, *, is_alone: bool) -> NDArray[np.int64] | None:
        """Tokens that a position after ``start`` allows; None: nothing can be healed.

        Args:
            is_alone: no other masked position follows, so the token must be longer than a space.
        """
        if not start or (is_alone and start != SPACE):
            return None
        tokens = self._find_continuations(start)
        if not len(tokens.equal) or not len(tokens.longer):
            return None
        return tokens.longer if is_alone else tokens.all

    def _find_continuations(self, start: bytes) -> _Continuations:
        if start not in self._continuations:
            first = bisect_left(self._tokens, (start, -1))
            tokens = list(takewhile(lambda item: item[0].startswith(start), self._tokens[first:]))
            ids = np.array([token for _, token in tokens], dtype=np.int64)
            num_equal = sum(text == start for text, _ in tokens)
            self._continuations[start] = _Continuations(ids[:num_equal], ids[num_equal:], ids)
        return self._continuations[start]
