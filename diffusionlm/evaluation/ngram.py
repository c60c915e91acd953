"""n-gram language models of the training tokens, as baselines for a small diffusion model's bound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DISCOUNT = 0.75
"""Subtracted from every count above zero; its probability goes to the shorter context."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _OrderCounts:
    """Counts of the n-grams of one order. Contexts and n-grams are sorted codes of `_encode_ngrams`."""

    contexts: Ints
    totals_per_context: Floats
    continuations_per_context: Floats
    ngrams: Ints
    counts_per_ngram: Floats


class NgramModel:
    """n-gram model with interpolated absolute discounting (Ney et al. 1994).

    p(w | c) = max(n(cw) - d, 0) / n(c) + d continuations(c) / n(c) p(w | c'), down to unigrams with add-one counts. c'
    is c without its first token, d is `DISCOUNT`.

    Contexts cross document boundaries; the end-of-text token is one like the others.
    """

    def __init__(self, tokens: Ints, order: int, vocab_size: int) -> None:
        self.order, self.vocab_size = order, vocab_size
        counts = np.bincount(tokens, minlength=vocab_size).astype(np.float64)
        self.unigram = (counts + 1.0) / (counts.sum() + vocab_size)
        self._orders = [
            _count_ngrams(_encode_ngrams(tokens, length, vocab_size), vocab_size) for length in range(2, order + 1)
        ]

    def probabilities(self, tokens: Ints) -> Floats:
        """Probability of each token given the up to ``order - 1`` tokens before it."""
        result: Floats = self.unigram[tokens]
        for length, order in zip(range(2, self.order + 1), self._orders, strict=True):
            codes = _encode_ngrams(tokens, length, self.vocab_size)
            context, has_context = _look_up(order.contexts, codes // self.vocab_size)
            ngram, has_ngram = _look_up(order.ngrams, codes)
            total = order.totals_per_context[context]
            discounted = np.where(has_ngram, order.counts_per_ngram[ngram] - DISCOUNT, 0.0) / total
            backoff_weight = DISCOUNT * order.continuations_per_context[context] / total
            shorter = result[length - 1 :]
            result[length - 1 :] = np.where(has_context, discounted + backoff_weight * shorter, shorter)
        return result


def max_order(vocab_size: int) -> int:
    """Largest order, up to 4, whose n-gram codes fit into 63 bits."""
    return min(4, int(63 / np.log2(vocab_size)))


def _encode_ngrams(tokens: Ints, length: int, vocab_size: int) -> Ints:
    """Code of the n-gram that ends at each position from length - 1 on; code // vocab_size is its context's code."""
    codes = np.zeros(max(0, len(tokens) - length + 1), dtype=np.int64)
    for offset in range(length):
        codes = codes * vocab_size + tokens[offset : offset + len(codes)]
    return codes


def _count_ngrams(codes: Ints, vocab_size: int) -> _OrderCounts:
    ngrams, counts = np.unique(codes, return_counts=True)
    contexts, starts, continuations = np.unique(ngrams // vocab_size, return_index=True, return_counts=True)
    totals = np.add.reduceat(counts, starts) if len(starts) else counts
    return _OrderCounts(
        contexts, totals.astype(np.float64), continuations.astype(np.float64), ngrams, counts.astype(np.float64)
    )


def _look_up(table: Ints, codes: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Index of each code in a sorted table (any index if it is absent), and whether it is present."""
    indices = np.minimum(np.searchsorted(table, codes), len(table) - 1)
    return indices, table[indices] == codes
