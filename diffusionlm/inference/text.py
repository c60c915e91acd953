"""Texts with holes: reading them, and showing canvases.

Shapes: L positions of a canvas.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from tokenizer import IncrementalDecoder, Tokenizer

MASK_GLYPH = "░"
"""What a masked position looks like."""

MAX_SPAN_LENGTH = 65_536
"""Longest hole that `parse_infill` believes."""

_MASKED_SPAN = re.compile(r"\[MASK:([^\[\]\n]*)\]")
_NUMBER = re.compile(r"[0-9]{1,9}")


def parse_infill(text: str, tokenizer: Tokenizer, mask_token_id: int | None = None) -> list[int]:
    """Token ids of a text in which each ``[MASK:n]`` stands for n mask tokens.

    The pieces between holes are encoded on their own, as ordinary text: what looks like a special token stays text.

    Args:
        mask_token_id: the model's; None: the tokenizer's.

    Raises:
        ValueError: no hole, a hole without a sensible number, or no mask token.
    """
    mask = tokenizer.mask_token_id if mask_token_id is None else mask_token_id
    if mask is None:
        raise ValueError("the tokenizer has no mask token: pass the model's mask_token_id")
    ids: list[int] = []
    end = 0
    for match in _MASKED_SPAN.finditer(text):
        ids += tokenizer.encode(text[end : match.start()])
        ids += [mask] * _span_length(match)
        end = match.end()
    if end == 0:
        raise ValueError(f"{text!r} has no hole: write [MASK:n] where n tokens are to be filled in")
    return ids + tokenizer.encode(text[end:])


def _span_length(match: re.Match[str]) -> int:
    number = match[1]
    if not _NUMBER.fullmatch(number) or not 1 <= int(number) <= MAX_SPAN_LENGTH:
        shown = match[0] if len(match[0]) <= 40 else match[0][:37] + "..."
        raise ValueError(f"{shown} is no hole: write [MASK:n] with n from 1 to {MAX_SPAN_LENGTH}, as in [MASK:4]")
    return int(number)


def canvas_text_pieces(
    token_ids: Sequence[int], is_masked: Sequence[bool], is_new: Sequence[bool], tokenizer: Tokenizer
) -> list[tuple[str, bool]]:
    """A canvas as pieces of text, each with whether it is new; masked positions are `GLYPH`.

    Args:
        token_ids, is_masked: of each position.
        is_new: which positions were masked at the start.
    """
    pieces: list[tuple[str, bool]] = []
    kinds = zip(is_masked, is_new, token_ids, strict=True)
    for (masked, new), run in groupby(kinds, key=lambda kind: (kind[0], kind[1])):
        ids = [token for _, _, token in run]
        text = decode_continuation(tokenizer, ids) if pieces else tokenizer.decode(ids)
        pieces.append((MASK_GLYPH * len(ids) if masked else text, new))
    return pieces


def decode_continuation(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """The text of ids that follow others: `Tokenizer.decode`, but for the space that some take from a beginning."""
    return tokenizer.decode_bytes(ids).decode("utf-8", errors="replace")


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each id; together they are `Tokenizer.decode`. A character of several ids stands at the last one."""
    decoder = IncrementalDecoder(tokenizer)
    texts = [decoder.push(token) for token in ids]
    if texts:
        texts[-1] += decoder.finish()
    return texts


def render_canvas(token_ids: Sequence[int], is_masked: Sequence[bool], tokenizer: Tokenizer) -> str:
    """The text of a canvas, with `GLYPH` for each masked position."""
    return "".join(text for text, _ in canvas_text_pieces(token_ids, is_masked, is_masked, tokenizer))


def find_ids_without_text(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Ids of a model that its tokenizer does not know: padding of the embedding and unused ids, not to be generated."""
    known = {*tokenizer.vocab.values(), *tokenizer.special_tokens.values()}
    return tuple(token for token in range(vocab_size) if token not in known)
