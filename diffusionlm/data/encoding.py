"""Text to tokens, chunk by chunk, here or in other processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from diffusionlm.data.reader import Reader, Tokens
from diffusionlm.data.windows import Pending, Windows

CHUNK = 64
"""Documents that are tokenised together; a run that resumes does at most so many again."""

Encode = Callable[[str], list[int]]


class Encoder(Protocol):
    """Who tokenises."""

    @property
    def ahead(self) -> int:
        """Chunks that are worth handing over before they are needed."""

    def submit(self, texts: list[str]) -> Pending[Tokens]:
        """Take over a chunk. What comes back waits for its tokens."""


class InlineEncoder:
    """Tokenises in this process, when the tokens are asked for."""

    ahead = 0

    def __init__(self, encode: Encode) -> None:
        self._encode = encode

    def submit(self, texts: list[str]) -> Pending[Tokens]:
        """Nothing yet."""
        return lambda: encode_all(self._encode, texts)


def encode_all(encode: Encode, texts: list[str]) -> list[Tokens]:
    """Tokens of each text."""
    return [np.array(encode(text), dtype=np.int32) for text in texts]


def encoded(upstream: Reader[str], encoder: Encoder) -> Windows[str, Tokens]:
    """The documents of a reader, tokenised."""
    return Windows(upstream, CHUNK, lambda _epoch, _number, texts: encoder.submit(texts), encoder.ahead)
