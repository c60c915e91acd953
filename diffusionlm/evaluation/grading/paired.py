"""Compare two models, or two decoders, on the same items. N items."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PairedDifference:
    """The difference of two mean scores over the same items."""

    num_items: int
    difference: float
    """Mean of a minus mean of b."""
    standard_error: float
    """Of the difference, over items or clusters; infinite for a single one."""
    num_a_better: int
    """Items on which a scores higher."""
    num_b_better: int
    p_value: float
    """Exact two-sided sign test on the items that differ (of right and wrong answers: McNemar's exact test)."""


def compare_paired(a_N: Floats, b_N: Floats, clusters_N: NDArray[np.int64] | None = None) -> PairedDifference:
    """Compare the scores of two variants on the same items.

    For scores 0 and 1 the standard error is ``sqrt(b + c - (b - c)^2 / n) / n`` with b and c the items on which one is
    better. For other scores, such as means over repeats, and for clusters it is the same formula over the sums of
    clusters: ``sqrt(sum_g (sum_{i in g} (d_i - mean))^2) / n``. The sign test takes items as independent.

    Args:
        a_N: scores of the first variant, such as 0 and 1 or means over repeats of an item.
        b_N: scores of the second variant.
        clusters_N: number of each item's cluster, such as a subject or a text with several questions. None: each item
            is a cluster.

    Raises:
        ValueError: there are no items, the lengths differ or a score is not finite.
    """
    if a_N.ndim != 1 or a_N.shape != b_N.shape:
        raise ValueError(f"scores have shapes {a_N.shape} and {b_N.shape}: expected the same items in both")
    if not len(a_N):
        raise ValueError("there are no items to compare")
    if not (np.isfinite(a_N).all() and np.isfinite(b_N).all()):
        raise ValueError("a score is not finite: leave its item out of both variants")
    differences_N = a_N - b_N
    num_items, mean = len(differences_N), float(differences_N.mean())
    sums_G = differences_N - mean
    if clusters_N is not None:
        _, groups_N = np.unique(clusters_N, return_inverse=True)
        sums_G = np.bincount(groups_N, weights=sums_G).astype(np.float64)
    error = math.sqrt(float((sums_G**2).sum())) / num_items if len(sums_G) > 1 else math.inf
    num_a, num_b = int((differences_N > 0).sum()), int((differences_N < 0).sum())
    return PairedDifference(num_items, mean, error, num_a, num_b, sign_test(num_a, num_b))


def sign_test(num_a: int, num_b: int) -> float:
    """Return the exact two-sided p-value of ``num_a`` of ``num_a + num_b`` fair coins; 1 without coins."""
    num_coins = num_a + num_b
    ways, tail = 1, 0
    for count in range(min(num_a, num_b) + 1):
        tail += ways
        ways = ways * (num_coins - count) // (count + 1)
    return min(1.0, 2 * tail / (1 << num_coins))
