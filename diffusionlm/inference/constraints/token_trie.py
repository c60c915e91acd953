"""The texts of a vocabulary as a prefix tree.

Shapes: V tokens, D nodes of one depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class TrieLevel:
    """The nodes of one depth: texts of so many bytes with which tokens begin."""

    parents_D: NDArray[np.int64]
    """Index of the node without the last byte, in the level before."""
    bytes_D: NDArray[np.uint8]
    """Last byte of the prefix of each node."""
    token_ids: NDArray[np.int64]
    """Tokens of exactly this length."""
    token_nodes: NDArray[np.int64]
    """Node of each of them."""


@dataclass(frozen=True, eq=False)
class TokenTrie:
    """All tokens that stand for text; special tokens do not."""

    levels: tuple[TrieLevel, ...]
    vocab_size: int
    """Ids of the tokenizer."""

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> TokenTrie:
        token_ids = sorted(tokenizer.vocab.values())
        return cls.from_texts(token_ids, [tokenizer.token_bytes(token) for token in token_ids], tokenizer.vocab_size)

    @classmethod
    def from_texts(cls, token_ids: Sequence[int], texts: Sequence[bytes], vocab_size: int) -> TokenTrie:
        """Build the tree; tokens without a byte are left out.

        Args:
            texts: of each token.
        """
        lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        order = np.argsort(-lengths, kind="stable")  # the tokens that reach a depth come first
        ids, lengths = np.asarray(token_ids, dtype=np.int64)[order], lengths[order]
        letters = np.frombuffer(b"".join(texts[index] for index in order), dtype=np.uint8)
        starts = np.cumsum(lengths) - lengths
        nodes = np.zeros(len(ids), dtype=np.int64)
        levels = []
        for depth in range(int(lengths[0]) if len(lengths) else 0):
            count = int(np.searchsorted(-lengths, -depth, side="left"))
            keys = nodes[:count] * 256 + letters[starts[:count] + depth]
            unique_keys, nodes = np.unique(keys, return_inverse=True)
            nodes = nodes.reshape(-1)
            first = int(np.searchsorted(-lengths, -(depth + 1), side="left"))
            levels.append(
                TrieLevel(unique_keys // 256, (unique_keys % 256).astype(np.uint8), ids[first:count], nodes[first:])
            )
        return cls(tuple(levels), vocab_size)
