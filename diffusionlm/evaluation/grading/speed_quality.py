"""Accuracy under parallelism (AUP): one number for a curve of accuracy over tokens per forward."""

from __future__ import annotations

import math
from collections.abc import Sequence

MAX_ACCURACY_LOSS = 5.0
"""Points that are more than this many percentage points below the slowest point do not count."""
DECAY = 3.0
"""How fast the weight falls with the distance to the best accuracy."""


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
