"""Token healing: the end of a text is decoded again where it may be the beginning of a longer token.

Encoded on its own, ``for i in `` ends with the token of a space, which no word follows in training: there the space is
a part of the word's token. So the end of the text is taken back, and the first masked position after it allows only
tokens that begin with what was taken back (Lundberg 2023, "Prompt Boundaries and Token Healing"). The text itself never
changes. Text after a masked span is encoded on its own.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from diffusionlm.inference.requests import DEFAULT_OPTIONS, RequestOptions
from diffusionlm.vision.images import PlacedImage
from tokenizer import Tokenizer

SPACE = b" "


MAX_SPAN_LENGTH = 65_536
"""Largest n of ``[MASK:n]``."""

_MASKED_SPAN = re.compile(r"\[MASK:([^\[\]\n]*)\]")
_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, eq=False)
class HealedText:
    """A text as token ids, and what its tokens say about decoding."""

    token_ids: tuple[int, ...]
    """A prompt or a canvas, without what was taken back."""
    options: RequestOptions = DEFAULT_OPTIONS
    """What the text determines: tokens that healed positions allow, masked spans, where blocks are counted anew."""
    unhealed_token_ids: tuple[int, ...] = ()
    """The text with what was taken back. Empty: nothing was."""

    @property
    def plain_token_ids(self) -> tuple[int, ...]:
        """The text as it is, without healing."""
        return self.unhealed_token_ids or self.token_ids

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """Images of the text, whose placeholders are repeated among the token ids."""
        return self.options.images

    @property
    def allowed_token_ids(self) -> Mapping[int, NDArray[np.int64]]:
        """Healed position -> the tokens that begin with what was taken back before it. In a prompt it is the position
        of the first new token."""
        return {position: np.asarray(ids) for position, ids in self.options.allowed_token_ids.items()}

    @property
    def num_repeated_bytes(self) -> int:
        """Bytes of the end of a prompt, which the first new token repeats."""
        return 0 if self.options.is_infill else sum(map(len, self.options.repeated_bytes))

    @property
    def num_given_tokens(self) -> int:
        """Tokens of the text as it is, without its masks."""
        return len(self.plain_token_ids) - sum(self.options.span_lengths)


class TokenHealer:
    """Encodes texts with token healing.

    Args:
        excluded_token_ids: tokens that a healed position must not hold: those that are never generated or end the text.
    """

    def __init__(self, tokenizer: Tokenizer, excluded_token_ids: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        allowed_ids = set(tokenizer.vocab.values()) - set(excluded_token_ids)
        self._tokens = sorted((tokenizer.token_bytes(token), token) for token in allowed_ids)
        self._find_continuations = cache(self._search_continuations)

    def heal_prompt(self, text: str, prefix_ids: Sequence[int] = (), max_new_tokens: int | None = None) -> HealedText:
        """Encode a text to continue, and take back its last token, or its last space.

        Nothing is taken back if no longer token begins with it, if it is the first token, or, except for a space, if
        only one new token is requested.

        Args:
            prefix_ids: tokens before the text, which stay.
            max_new_tokens: None: more than one.
        """
        text_ids, kept_ids, start = self._split_end(text)
        allowed_ids = self._allowed_token_ids(start, is_alone=max_new_tokens == 1)
        if allowed_ids is None or not (prefix_ids or kept_ids):
            return HealedText((*prefix_ids, *text_ids))
        token_ids = (*prefix_ids, *kept_ids)
        options = RequestOptions(allowed_token_ids={len(token_ids): allowed_ids}, repeated_bytes=(start,))
        return HealedText(token_ids, options, (*prefix_ids, *text_ids))

    def heal_infill(self, text: str, prefix_ids: Sequence[int] = (), mask_token_id: int | None = None) -> HealedText:
        """Encode a text in which each ``[MASK:n]`` stands for n mask tokens, and take back the space before each span.

        Other tokens stay, because a token that is taken back takes a position of the span.

        Raises:
            ValueError: like `split_infill`, or there is no mask token.
        """
        return encode_pieces(self._tokenizer, split_infill(text), prefix_ids, mask_token_id, self)

    def heal_space(self, text: str, num_masked: int) -> tuple[list[int], NDArray[np.int64]] | None:
        """Take back the space before a masked span.

        Returns:
            The ids of the text without it, and the tokens that the span may begin with. None: nothing can be healed.
        """
        _, kept_ids, start = self._split_end(text)
        allowed_ids = self._allowed_token_ids(start, is_alone=num_masked == 1) if start == SPACE else None
        return None if allowed_ids is None else (kept_ids, allowed_ids)

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
        token_ids, num_equal = self._find_continuations(start)
        if not 0 < num_equal < len(token_ids):
            return None
        return token_ids[num_equal:] if is_alone else token_ids

    def _search_continuations(self, start: bytes) -> tuple[NDArray[np.int64], int]:
        """Tokens that begin with some bytes, and how many of them, the first ones, are these bytes."""
        first = bisect_left(self._tokens, (start, -1))
        tokens = list(takewhile(lambda item: item[0].startswith(start), self._tokens[first:]))
        ids = np.array([token for _, token in tokens], dtype=np.int64)
        return ids, sum(text == start for text, _ in tokens)


def split_infill(text: str) -> list[tuple[str, int]]:
    """Split a text into pieces, each with the number of masked tokens after it: 0 after the last one.

    Raises:
        ValueError: no masked span, or n is not a number from 1 to `MAX_SPAN_LENGTH`.
    """
    pieces, end = [], 0
    for match in _MASKED_SPAN.finditer(text):
        number = match[1]
        if not _NUMBER.fullmatch(number) or not 1 <= int(number) <= MAX_SPAN_LENGTH:
            span = match[0] if len(match[0]) <= 40 else match[0][:37] + "..."
            raise ValueError(f"{span} is not a masked span: write [MASK:n] with n from 1 to {MAX_SPAN_LENGTH}")
        pieces.append((text[end : match.start()], int(number)))
        end = match.end()
    if not pieces:
        raise ValueError(f"{text!r} has no masked span: write [MASK:n] for n tokens to fill in")
    return [*pieces, (text[end:], 0)]


def encode_pieces(
    tokenizer: Tokenizer,
    pieces: Sequence[tuple[str, int | Sequence[int]]],
    prefix_ids: Sequence[int] = (),
    mask_token_id: int | None = None,
    healer: TokenHealer | None = None,
) -> HealedText:
    """Encode pieces of a text, as ordinary text: special tokens written in them stay text.

    Args:
        pieces: each with the number of masked tokens after it, 0 after the last one alone, or with the token ids of a
            draft, before which nothing is taken back.
        mask_token_id: the model's; None: the tokenizer's.
        healer: takes back the space before each span; None: no token healing.

    Raises:
        ValueError: there is no mask token.
    """
    mask = tokenizer.mask_token_id if mask_token_id is None else mask_token_id
    if mask is None:
        raise ValueError("the tokenizer has no mask token: pass the model's mask_token_id")
    token_ids, plain_ids = list(prefix_ids), list(prefix_ids)
    allowed_token_ids: dict[int, NDArray[np.int64]] = {}
    repeated_bytes, draft_ids = [], []
    for piece, span in pieces:
        draft_ids += (span_ids := [-1] * span if isinstance(span, int) else [*span])
        piece_ids, num_masked = tokenizer.encode(piece), len(span_ids)
        plain_ids += [*piece_ids, *[mask] * num_masked]
        healed = healer.heal_space(piece, span) if healer is not None and isinstance(span, int) and span else None
        if healed is not None and (token_ids or healed[0]):
            piece_ids, allowed_token_ids[len(token_ids) + len(healed[0])] = healed
            repeated_bytes.append(SPACE)
        elif num_masked:
            repeated_bytes.append(b"")
        token_ids += [*piece_ids, *[mask] * num_masked]
    options = RequestOptions(
        is_infill=True,
        span_lengths=tuple(span if isinstance(span, int) else len(span) for _, span in pieces[:-1]),
        draft_token_ids=draft_ids if max(draft_ids, default=-1) >= 0 else (),
        allowed_token_ids=allowed_token_ids,
        repeated_bytes=tuple(repeated_bytes),
    )
    return HealedText(tuple(token_ids), options, tuple(plain_ids))
