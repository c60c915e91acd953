"""KeyedPermutation: it is a permutation, depends on its key, and looks random."""

from __future__ import annotations

import math

import numpy as np
import pytest

from diffusionlm.data.shards import FEISTEL_ROUNDS, KeyedPermutation
from diffusionlm.diffusion.rng import RngStream, keyed_rng

STREAM = RngStream.DOCUMENT_ORDER


def order(n: int, seed: int = 0, *key: int) -> list[int]:
    return KeyedPermutation(n, seed, STREAM, *key)(np.arange(n)).tolist()


@pytest.mark.parametrize("key", [(0, 0), (7, 3)])
def test_every_item_once(key: tuple[int, int]) -> None:
    for n in [*range(1, 301), 1023, 1024, 1025, 65_536, 65_537, 1_000_003]:
        items = KeyedPermutation(n, key[0], STREAM, key[1])(np.arange(n))
        assert items.dtype == np.int64
        assert np.array_equal(np.sort(items), np.arange(n)), n


def permute_index(n: int, index: int, keys: list[int]) -> int:
    """Reference: Python integers, one index at a time."""
    mask = 2**64 - 1

    def below(size: int, value: int, key: int) -> int:
        bits = (value + key) * 0x9E3779B97F4A7C15 & mask
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & mask
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & mask
        return (bits >> 32) * size >> 32

    a = math.ceil(math.sqrt(n))
    b = math.ceil(n / a)
    while True:
        left, right = index % a, index // a
        sizes = (a, b)
        for key in keys:
            left, right = right, (left + below(sizes[0], right, key)) % sizes[0]
            sizes = sizes[::-1]
        index = left + a * right
        if index < n:
            return index


@pytest.mark.parametrize("n", [1, 2, 3, 5, 12, 30, 31, 257])
def test_it_equals_the_reference_network(n: int) -> None:
    keys = keyed_rng(5, STREAM, 2).bit_generator.random_raw(FEISTEL_ROUNDS).tolist()
    assert order(n, 5, 2) == [permute_index(n, index, keys) for index in range(n)]


def test_the_order_stays_the_same() -> None:
    """Checkpoints store positions in this order: another order would read other documents."""
    assert order(12, 0, 0) == [1, 8, 2, 9, 4, 10, 6, 3, 11, 5, 0, 7]


@pytest.mark.parametrize("n", [10**12, 1 << 62])
def test_more_items_than_fit_into_memory(n: int) -> None:
    permutation = KeyedPermutation(n, 3, STREAM, 1)
    indices = np.concatenate([np.arange(50_000), n - 1 - np.arange(50_000)])
    items = permutation(indices)
    assert len(set(items.tolist())) == 100_000
    assert 0 <= items.min() <= items.max() < n
    # Spread over all of them: the mean of 100,000 has a standard error of 0.0009.
    assert items.astype(np.float64).mean() / n == pytest.approx(0.5, abs=0.005)


def test_keys_matter() -> None:
    orders = [order(50, *key) for key in [(0, 0), (0, 1), (1, 0), (0,), (0, 0, 0), (0, 1, 0), (2**70, 0)]]
    assert len(set(map(tuple, orders))) == len(orders)
    assert order(50, 0, 1) == orders[1]
    other = KeyedPermutation(50, 0, RngStream.SEQUENCE_ORDER, 0)(np.arange(50)).tolist()
    assert other not in orders
