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


def accuracy_under_parallelism(points: Sequence[tuple[float, float]], best_accuracy: float) -> float:
    """Return the area under the weighted curve, from 0 tokens per forward to the fastest point (d3LLM, `aup_utils.py`).

    ``r_1 y_1 + sum_i (r_i - r_{i-1}) (y_i W(y_i) + y_{i-1} W(y_{i-1})) / 2`` over the points in order of speed r,
    without those whose accuracy is below ``y_1 - 5``; ``W(y) = min(exp(-3 (1 - y / y_max)), 1)``.

    Args:
        points: tokens per forward and accuracy in percent.
        best_accuracy: y_max, the best accuracy of all methods that are compared, in percent. Values with different
            y_max are not comparable.

    Raises:
        ValueError: there are no points, one is not finite, or the best accuracy is not positive.
    """
    if not points or not all(math.isfinite(value) for point in points for value in point):
        raise ValueError("AUP needs finite points: tokens per forward and accuracy")
    if not best_accuracy > 0.0:
        raise ValueError(f"AUP needs a positive best accuracy, got {best_accuracy:g}")
    ordered = sorted(points)
    speed, accuracy = ordered[0]
    area, slowest = speed * accuracy, accuracy
    last_speed, last_height = speed, accuracy * _weight(accuracy, best_accuracy)
    for speed, accuracy in ordered[1:]:
        if accuracy < slowest - MAX_ACCURACY_LOSS:
            continue
        height = accuracy * _weight(accuracy, best_accuracy)
        area += (speed - last_speed) * (height + last_height) / 2
        last_speed, last_height = speed, height
    return area


def _weight(accuracy: float, best_accuracy: float) -> float:
    return min(math.exp(-DECAY * (1.0 - accuracy / best_accuracy)), 1.0)
