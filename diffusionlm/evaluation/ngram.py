"""n-gram models of the training tokens: honest company for a small diffusion model's bound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DISCOUNT = 0.75
"""Taken from every seen count and given to the shorter context."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _OrderCounts:
    """Counts of one order: contexts are numbered by their place among the sorted keys."""

    contexts: Ints
    totals_per_context: Floats
    continuations_per_context: Floats
    grams: Ints
    counts_per_gram: Floats


class NgramModel:
    """Interpolated absolute discounting (Ney et al. 1994).

    p(w | c) = max(n(cw) - d, 0) / n(c) + d kinds(c) / n(c) p(w | c'), down to unigrams with one added to every count.

    Contexts reach over document ends; the end-of-text token is one like the others.
    """

    def __init__(self, tokens: Ints, order: int, vocab_size: int) -> None:
        self.order, self.vocab_size = order, vocab_size
        counts = np.bincount(tokens, minlength=vocab_size).astype(np.float64)
        self.unigram = (counts + 1.0) / (counts.sum() + vocab_size)
        self._orders = [
            _count_ngrams(_encode_ngrams(tokens, length, vocab_size), vocab_size) for length in range(2, order + 1)
        ]

    def nats_per_token(self, tokens: Ints) -> float:
        """Cross-entropy of a text, each token given up to ``order - 1`` before it."""
        return float(-np.log(self.probabilities(tokens)).mean())

    def probabilities(self, tokens: Ints) -> Floats:
        """Probability of each token given those before it."""
        result: Floats = self.unigram[tokens]
        for length, order in zip(range(2, self.order + 1), self._orders, strict=True):
            keys = _encode_ngrams(tokens, length, self.vocab_size)
            context, known = _look_up(order.contexts, keys // self.vocab_size)
            gram, seen = _look_up(order.grams, keys)
            total = order.totals_per_context[context]
            direct = np.where(seen, order.counts_per_gram[gram] - DISCOUNT, 0.0) / total
            backed = DISCOUNT * order.continuations_per_context[context] / total
            shorter = result[length - 1 :]
            result[length - 1 :] = np.where(known, direct + backed * shorter, shorter)
        return result


def max_order(vocab_size: int) -> int:
    """Longest n-gram, up to 4, whose number fits 63 bits."""
    return min(4, int(63 / np.log2(vocab_size)))


def _encode_ngrams(tokens: Ints, length: int, vocab_size: int) -> Ints:
    """Number of the n-gram that ends at each place from length - 1 on; its context is the number // vocab_size."""
    keys = np.zeros(max(0, len(tokens) - length + 1), dtype=np.int64)
    for offset in range(length):
        keys = keys * vocab_size + tokens[offset : offset + len(keys)]
    return keys


def _count_ngrams(keys: Ints, vocab_size: int) -> _OrderCounts:
    grams, counts = np.unique(keys, return_counts=True)
    contexts, first, kinds = np.unique(grams // vocab_size, return_index=True, return_counts=True)
    totals = np.add.reduceat(counts, first) if len(first) else counts
    return _OrderCounts(contexts, totals.astype(np.float64), kinds.astype(np.float64), grams, counts.astype(np.float64))


def _look_up(table: Ints, keys: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Place of each key in a sorted table (any place where it is not there), and whether it is there."""
    places = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return places, table[places] == keys
