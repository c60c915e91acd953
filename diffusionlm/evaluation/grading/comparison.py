"""Compare models or decoders: paired differences on the same N items, and accuracy under parallelism (AUP), one number
for a curve of accuracy over tokens per forward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_ACCURACY_LOSS = 5.0
"""Points that are more than this many percentage points below the slowest point do not count."""
DECAY = 3.0
"""How fast the weight falls with the distance to the best accuracy."""


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
    """
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
    tail = sum(math.comb(num_coins, count) for count in range(min(num_a, num_b) + 1))
    return min(1.0, 2 * tail / (1 << num_coins))


def accuracy_under_parallelism(points: Sequence[tuple[float, float]], best_accuracy: float) -> float:
    """Return the area under the weighted curve, from 0 tokens per forward to the fastest point (d3LLM, `aup_utils.py`).

    ``r_1 y_1 + sum_i (r_i - r_{i-1}) (y_i W(y_i) + y_{i-1} W(y_{i-1})) / 2`` over the points in order of speed r,
    without those whose accuracy is below ``y_1 - 5``; ``W(y) = min(exp(-3 (1 - y / y_max)), 1)``.

    Args:
        points: tokens per forward and accuracy in percent; at least one.
        best_accuracy: y_max, the best accuracy of all methods that are compared, in percent. Values with different
            y_max are not comparable.
    """
    ordered = sorted(points)
    slowest = ordered[0][1]
    speed_P, accuracy_P = np.array([point for point in ordered if point[1] >= slowest - MAX_ACCURACY_LOSS]).T
    height_P = accuracy_P * np.minimum(np.exp(-DECAY * (1.0 - accuracy_P / best_accuracy)), 1.0)
    areas = np.diff(speed_P) * (height_P[1:] + height_P[:-1]) / 2
    return float(speed_P[0] * slowest + areas.sum())
