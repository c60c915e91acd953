"""Text to tokens, chunk by chunk, here or in other processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from diffusionlm.data.reader import ResumableReader, Tokens
from diffusionlm.data.windows import ItemsFuture, WindowedReader

CHUNK = 64
"""Documents that are tokenised together; a run that resumes does at most so many again."""

EncodeFunction = Callable[[str], list[int]]


class TextEncoder(Protocol):
    """Who tokenises."""

    @property
    def prefetch_depth(self) -> int:
        """Chunks that are worth handing over before they are needed."""

    def submit(self, texts: list[str]) -> ItemsFuture[Tokens]:
        """Take over a chunk. What comes back waits for its tokens."""


class InlineTextEncoder:
    """Tokenises in this process, when the tokens are asked for."""

    prefetch_depth = 0

    def __init__(self, encode: EncodeFunction) -> None:
        self._encode = encode

    def submit(self, texts: list[str]) -> ItemsFuture[Tokens]:
        """Nothing yet."""
        return lambda: encode_texts(self._encode, texts)


def encode_texts(encode: EncodeFunction, texts: list[str]) -> list[Tokens]:
    """Tokens of each text."""
    return [np.array(encode(text), dtype=np.int32) for text in texts]


def tokenize_reader(upstream: ResumableReader[str], encoder: TextEncoder) -> WindowedReader[str, Tokens]:
    """The documents of a reader, tokenised."""
    return WindowedReader(upstream, CHUNK, lambda _epoch, _number, texts: encoder.submit(texts), encoder.prefetch_depth)
