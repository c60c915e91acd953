"""n-gram models against their definition, word by word."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from diffusionlm.evaluation.ngram import DISCOUNT, NgramModel, max_order

VOCAB = 7


def text(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB - 1, length)


def probability(train: list[int], context: tuple[int, ...], word: int) -> float:
    """The definition, by counting."""
    if not context:
        return (train.count(word) + 1) / (len(train) + VOCAB)
    size = len(context) + 1
    grams = Counter(tuple(train[i : i + size]) for i in range(len(train) - size + 1))
    total = sum(count for gram, count in grams.items() if gram[:-1] == context)
    shorter = probability(train, context[1:], word)
    if total == 0:
        return shorter
    kinds = sum(gram[:-1] == context for gram in grams)
    return max(grams[(*context, word)] - DISCOUNT, 0) / total + DISCOUNT * kinds / total * shorter


@pytest.mark.parametrize("order", [1, 2, 4])
def test_probabilities_are_the_definition(order: int) -> None:
    train, held_out = text(0, 200), text(1, 30)
    held_out[5] = VOCAB - 1  # never seen in training
    probabilities = NgramModel(train, order, VOCAB).probabilities(held_out)
    for position, word in enumerate(held_out.tolist()):
        context = tuple(held_out[max(0, position - order + 1) : position].tolist())
        assert probabilities[position] == pytest.approx(probability(train.tolist(), context, word), rel=1e-12)


def test_probabilities_sum_to_one() -> None:
    model = NgramModel(text(0, 300), 3, VOCAB)
    for context in ([0, 1], [5, 5], [6, 6]):
        total = sum(model.probabilities(np.array([*context, word]))[-1] for word in range(VOCAB))
        assert total == pytest.approx(1.0, abs=1e-12)


def test_numbers_fit_63_bits() -> None:
    for vocab_size in (2, 2_048, 50_000, 151_936, 2**31):
        assert vocab_size ** max_order(vocab_size) < 2**63
    assert max_order(2_048) == 4
