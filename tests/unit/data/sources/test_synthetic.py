"""Synthetic text: entropies are exact, and documents are the same from every position."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from config.data import (
    CopiedSymbols,
    MarkovChain,
    NestedExpressions,
    ReversedAddition,
    ShidokuGrids,
    SyntheticText,
)
from diffusionlm.data.sources import open_source
from diffusionlm.data.sources.synthetic import (
    DIGITS,
    DOCUMENTS_PER_BLOCK,
    NESTING_PROBABILITY,
    OPERATORS,
    AdditionSource,
    CopySource,
    GrammarSource,
    MarkovSource,
    ShidokuSource,
    SyntheticSource,
    shidoku_grids,
)
from tests.reference.decoding.shidoku_puzzles import is_shidoku

Drain = Callable[..., list[Any]]
ALL = [
    MarkovChain(),
    MarkovChain(symbols="01", length=5, stay=0.0),
    MarkovChain(symbols="xyz", length=7, stay=1.0),
    ShidokuGrids(),
    CopiedSymbols(),
    ReversedAddition(),
    ReversedAddition(digits=25),
    NestedExpressions(),
    NestedExpressions(depth=0),
]


@pytest.fixture(params=ALL, ids=lambda config: f"{config.kind}{ALL.index(config)}")
def config(request: pytest.FixtureRequest) -> SyntheticText:
    return request.param


def of_size(config: SyntheticText, size: int, **changes: Any) -> SyntheticText:
    return type(config).model_validate(config.model_dump() | {"documents_per_epoch": size} | changes)


def open_train(config: SyntheticText) -> SyntheticSource:
    source = open_source(config, "train", "data.source")
    assert isinstance(source, SyntheticSource)
    return source


def log_probability(source: SyntheticSource, text: str) -> float:
    """Return ln p(text) in nats; AssertionError if the probability is 0."""
    match source:
        case MarkovSource(config=config):
            symbols, length, stay = config.symbols, config.length, config.stay
            assert len(text) == length and set(text) <= set(symbols)
            num_stays = sum(a == b for a, b in itertools.pairwise(text))
            num_moves = length - 1 - num_stays
            p_move = (1.0 - stay) / (len(symbols) - 1)
            return -math.log(len(symbols)) + _power_log(stay, num_stays) + _power_log(p_move, num_moves)
        case CopySource(config=config):
            symbols, length = config.symbols, config.length
            assert len(text) == 2 * length and text[:length] == text[length:] and set(text) <= set(symbols)
            return -length * math.log(len(symbols))
        case AdditionSource(config=config):
            digits = config.digits
            form = rf"([0-9]{{{digits}}})\+([0-9]{{{digits}}})=([0-9]{{{digits + 1}}})"
            match = re.fullmatch(form, text)
            assert match is not None
            a, b, total = (int(number[::-1]) for number in match.groups())
            assert a + b == total
            return -2 * digits * math.log(10)
        case ShidokuSource():
            assert is_shidoku(text)
            return -math.log(288)
        case GrammarSource(config=config):
            value, end = _parse_expression(text, 0, config.depth)
            assert end == len(text)
            return value
    raise AssertionError(f"unknown source {source}")


def _power_log(probability: float, exponent: int) -> float:
    return exponent * math.log(probability) if exponent else 0.0


def _parse_expression(text: str, start: int, depth: int) -> tuple[float, int]:
    """Return the log-probability of the expression that starts here, and its end."""
    if text[start] in DIGITS:
        return -math.log(len(DIGITS)) + (math.log(1.0 - NESTING_PROBABILITY) if depth else 0.0), start + 1
    assert text[start] == "(" and depth > 0
    left, middle = _parse_expression(text, start + 1, depth - 1)
    assert text[middle] in OPERATORS
    right, end = _parse_expression(text, middle + 1, depth - 1)
    assert text[end] == ")"
    return math.log(NESTING_PROBABILITY) - math.log(len(OPERATORS)) + left + right, end + 1


def test_samples_have_the_stated_entropy_and_lengths(config: SyntheticText) -> None:
    source = open_train(config)
    documents, _ = source.read(0, None, 10_000)
    information = -np.array([log_probability(source, text) for text in documents])
    standard_error = information.std(ddof=1) / math.sqrt(len(information))
    assert abs(information.mean() - source.entropy_nats) <= 4 * standard_error + 1e-9
    counts = Counter(map(len, documents))
    assert max(counts) <= source.max_length
    shares = np.array(list(counts.values())) / len(documents)
    # The plug-in estimate is biased down by about half a nat in 10,000 for each length.
    assert -(shares * np.log(shares)).sum() == pytest.approx(source.length_entropy_nats, abs=0.05)
    if source.length_entropy_nats == 0.0:
        assert set(counts) == {source.max_length}
    assert all(text.isascii() and text.isprintable() for text in documents)


def derivations(depth: int) -> list[str]:
    """Every expression of the grammar."""
    texts = list("0123456789")
    for _ in range(depth):
        texts = [*"0123456789", *(f"({a}{sign}{b})" for a in texts for sign in "+*" for b in texts)]
    return texts


@pytest.mark.parametrize(
    ("config", "texts"),
    [
        (
            MarkovChain(symbols="abc", length=5, stay=0.7),
            ["".join(text) for text in itertools.product("abc", repeat=5)],
        ),
        (MarkovChain(symbols="ab", length=1), ["a", "b"]),
        (ShidokuGrids(), list(shidoku_grids())),
        (CopiedSymbols(symbols="abc", length=3), ["".join(half) * 2 for half in itertools.product("abc", repeat=3)]),
        (ReversedAddition(digits=1), [f"{a}+{b}={(a + b) % 10}{(a + b) // 10}" for a in range(10) for b in range(10)]),
        (NestedExpressions(depth=1), derivations(1)),
        (NestedExpressions(depth=2), derivations(2)),
    ],
)
def test_probabilities_sum_to_one(config: SyntheticText, texts: list[str]) -> None:
    distribution = open_train(config)
    logs = np.array([log_probability(distribution, text) for text in texts])
    assert len(set(texts)) == len(texts)
    assert np.exp(logs).sum() == pytest.approx(1.0, abs=1e-12)
    assert -(np.exp(logs) * logs).sum() == pytest.approx(distribution.entropy_nats, abs=1e-10)
    lengths = np.bincount([len(text) for text in texts], weights=np.exp(logs))
    of_length = -sum(share * math.log(share) for share in lengths if share)
    assert of_length == pytest.approx(distribution.length_entropy_nats, abs=1e-10)


@pytest.mark.parametrize("size", [1, DOCUMENTS_PER_BLOCK - 1, DOCUMENTS_PER_BLOCK, 2 * DOCUMENTS_PER_BLOCK + 300])
def test_reading_on_from_any_position(size: int, config: SyntheticText, drain: Drain) -> None:
    whole = drain(open_train(of_size(config, size)), (10 * size,))
    assert len(whole) == size
    assert drain(open_train(of_size(config, size)), (7, 1, 1000)) == whole
    for start in {0, 1, size // 3, size - 1, size, min(DOCUMENTS_PER_BLOCK, size)}:
        head, position = open_train(of_size(config, size)).read(0, None, start)
        assert head + drain(open_train(of_size(config, size)), (513,), position=position) == whole
    assert drain(open_train(of_size(config, size + 99)))[:size] == whole, "a longer epoch starts alike"


def test_epochs_splits_and_seeds_differ(drain: Drain) -> None:
    config = MarkovChain(documents_per_epoch=3 * DOCUMENTS_PER_BLOCK, validation_documents=1500)
    train, validation = open_train(config), open_source(config, "validation", "data.source")
    others = [open_train(config.model_copy(update=change)) for change in ({"seed": 1}, {"length": 31}, {"stay": 0.7})]
    whole, held_out = drain(train), drain(validation)
    assert (len(whole), len(held_out)) == (3 * DOCUMENTS_PER_BLOCK, 1500)
    blocks = [whole[:DOCUMENTS_PER_BLOCK], whole[DOCUMENTS_PER_BLOCK:]]
    for a, b in itertools.combinations([*blocks, drain(train, epoch=1), held_out, drain(others[0])], 2):
        # Only chains that hardly ever move are likely enough to occur twice.
        assert len(set(a) & set(b)) < 40
    assert len({source.identity for source in (train, validation, *others)}) == 5
