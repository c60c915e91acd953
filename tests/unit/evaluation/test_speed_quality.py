"""AUP, against values computed by hand."""

from __future__ import annotations

import math

import pytest

from diffusionlm.evaluation.grading.speed_quality import accuracy_under_parallelism


def test_a_single_point_is_its_rectangle() -> None:
    assert accuracy_under_parallelism([(2.0, 70.0)], best_accuracy=80.0) == 140.0


def test_two_points_at_the_best_accuracy_are_a_rectangle() -> None:
    assert accuracy_under_parallelism([(3.0, 80.0), (1.0, 80.0)], best_accuracy=80.0) == pytest.approx(240.0)


def test_three_points_by_hand() -> None:
    """y_max = 75: W(72) = exp(-0.12), W(75) = 1, W(70) = exp(-0.2); the point at 66 is more than 5 below the first."""
    points = [(1.0, 72.0), (2.0, 75.0), (4.0, 66.0), (5.0, 70.0)]
    low, high, last = 72.0 * math.exp(-0.12), 75.0, 70.0 * math.exp(-0.2)
    expected = 72.0 + 1.0 * (low + high) / 2 + 3.0 * (high + last) / 2
    assert accuracy_under_parallelism(points, best_accuracy=75.0) == pytest.approx(expected)
    assert expected == pytest.approx(339.896, abs=1e-3)


def test_another_pool_changes_the_score() -> None:
    points = [(1.0, 70.0), (4.0, 70.0)]
    assert accuracy_under_parallelism(points, 70.0) == pytest.approx(280.0)
    assert accuracy_under_parallelism(points, 140.0) == pytest.approx(70.0 + 3 * 70.0 * math.exp(-1.5))


@pytest.mark.parametrize(("points", "best"), [([], 1.0), ([(1.0, math.nan)], 1.0), ([(1.0, 0.0)], 0.0)])
def test_values_without_a_score_are_refused(points: list[tuple[float, float]], best: float) -> None:
    with pytest.raises(ValueError, match="AUP needs"):
        accuracy_under_parallelism(points, best)
