"""Compare two models, or two decoders, on the same items. N items."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """The difference of the mean scores of two variants over the same items."""

    num_items: int
    difference: float
    """Mean of the second minus that of the first."""
    standard_error: float | None
    """Over the items' differences; None: a single item."""
    p_value: float
    """Exact two-sided sign test on the items that differ (of right and wrong answers: McNemar's exact test)."""
    num_only_first: int
    """Items that only the first variant answers right; with repeats: more often."""
    num_only_second: int


def compare_paired(first_N: NDArray[np.float64], second_N: NDArray[np.float64]) -> PairedDifference:
    """Compare the scores of two variants on the same items, such as 0 and 1 or means over repeats of an item.

    For scores 0 and 1 the standard error is ``sqrt(b + c - (b - c)^2 / n) / n`` with b and c the items on which one is
    better. For other scores it is the same formula: ``sqrt(sum_i (d_i - mean)^2) / n``.

    Raises:
        ValueError: there are no items, the lengths differ or a score is not finite.
    """
    if first_N.ndim != 1 or first_N.shape != second_N.shape:
        raise ValueError(f"scores have shapes {first_N.shape} and {second_N.shape}: expected the same items in both")
    if not len(first_N):
        raise ValueError("there are no items to compare")
    if not (np.isfinite(first_N).all() and np.isfinite(second_N).all()):
        raise ValueError("a score is not finite: leave its item out of both variants")
    differences_N = second_N - first_N
    num_items, mean = len(differences_N), float(differences_N.mean())
    num_first, num_second = int((differences_N < 0).sum()), int((differences_N > 0).sum())
    return PairedDifference(
        num_items=num_items,
        difference=mean,
        standard_error=math.sqrt(float(((differences_N - mean) ** 2).sum())) / num_items if num_items > 1 else None,
        p_value=sign_test(num_first, num_second),
        num_only_first=num_first,
        num_only_second=num_second,
    )


def sign_test(num_a: int, num_b: int) -> float:
    """Return the exact two-sided p-value of ``num_a`` of ``num_a + num_b`` fair coins; 1 without coins."""
    num_coins = num_a + num_b
    ways, tail = 1, 0
    for count in range(min(num_a, num_b) + 1):
        tail += ways
        ways = ways * (num_coins - count) // (count + 1)
    return min(1.0, 2 * tail / (1 << num_coins))
