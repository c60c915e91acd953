"""A shuffled order of any length that is computed place by place."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from diffusionlm.diffusion.rng import RngStream, keyed_rng

ROUNDS = 16
"""Four suffice for large sets (Luby and Rackoff 1988); a handful of items mixes more slowly. Even, so
that both halves end where they began."""

_MULTIPLIERS = tuple(map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)))
"""Of the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""


class KeyedPermutation:
    """A permutation of 0 to n - 1 that is a function of (n, seed, stream, key) alone and takes no memory.

    A Feistel network over pairs (left, right) with left < a, right < b and a * b barely larger than n; what falls
    outside of n goes through it again until it is inside (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains").

    Raises:
        ValueError: n is not between 1 and 2 ** 62.
    """

    def __init__(self, n: int, seed: int, stream: RngStream, *key: int) -> None:
        if not 1 <= n <= 1 << 62:
            raise ValueError(f"a permutation of {n} places: there must be 1 to 2 ** 62")
        self.n = n
        left = math.isqrt(n - 1) + 1
        self._sizes = (np.uint64(left), np.uint64(-(-n // left)))
        # Raw output of the bit generator is the same in every version of NumPy.
        self._keys = keyed_rng(seed, stream, *key).bit_generator.random_raw(ROUNDS)

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The item at each of these places, all within 0 to n - 1; the shape is kept."""
        assert places.size == 0 or 0 <= int(places.min()) <= int(places.max()) < self.n, "places are 0 to n - 1"
        items = self._permute_pairs(places.astype(np.uint64))
        while (outside := items >= self.n).any():
            items[outside] = self._permute_pairs(items[outside])
        return items.astype(np.int64)

    def _permute_pairs(self, places: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """A permutation of all pairs, each as left + a * right."""
        first, second = self._sizes
        left, right = places % first, places // first
        for key in self._keys:
            moved = left + _hash_below(first, right, key)
            # Modulo a: where nothing is to be taken off, the difference wraps around and is the larger one.
            left, right = right, np.minimum(moved, moved - first)
            first, second = second, first
        return left + first * right


def _hash_below(size: np.uint64, values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Numbers from 0 to size - 1, as if random; size <= 2 ** 31."""
    bits = (values + key) * _MULTIPLIERS[0]
    bits = (bits ^ (bits >> np.uint64(30))) * _MULTIPLIERS[1]
    bits = (bits ^ (bits >> np.uint64(27))) * _MULTIPLIERS[2]
    return ((bits >> np.uint64(32)) * size) >> np.uint64(32)
