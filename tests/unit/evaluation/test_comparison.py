"""pass@k and paired differences against enumeration, AUP against a value computed by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from diffusionlm.evaluation.grading.comparison import accuracy_under_parallelism, compare_paired, sign_test
from diffusionlm.evaluation.tasks.evaluation import pass_at_k


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample() -> None:
    for n, c in ((1, 0), (1, 1), (5, 2), (7, 6)):
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(range(n), k))
            expected = sum(min(subset) < c for subset in subsets) / len(subsets)
            assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("num_coins", [0, 1, 6, 11])
def test_the_sign_test_counts_all_outcomes_at_most_as_likely(num_coins: int) -> None:
    heads = [sum(coins) for coins in itertools.product((0, 1), repeat=num_coins)]
    for num_a in range(num_coins + 1):
        distance = abs(num_a - num_coins / 2)
        expected = sum(abs(count - num_coins / 2) >= distance for count in heads) / len(heads)
        assert sign_test(num_a, num_coins - num_a) == pytest.approx(expected, abs=1e-12)


def test_the_error_of_a_difference_is_its_spread_over_all_resamples() -> None:
    """The bootstrap over all n^n resamples of the items has exactly this variance."""
    first_N, second_N = np.array([1.0, 0.25, 0.0, 0.5]), np.array([0.0, 0.75, 0.0, 0.25])
    means = [np.mean([(second_N - first_N)[i] for i in rows]) for rows in itertools.product(range(4), repeat=4)]
    assert compare_paired(first_N, second_N).standard_error == pytest.approx(float(np.std(means)))


def test_ties_and_single_items() -> None:
    ties = compare_paired(np.ones(5), np.ones(5))
    assert (ties.difference, ties.standard_error, ties.p_value) == (0.0, 0.0, 1.0)
    single = compare_paired(np.zeros(1), np.ones(1))
    assert (single.difference, single.standard_error, single.p_value) == (1.0, None, 1.0)


def test_three_points_by_hand() -> None:
    """y_max = 75: W(72) = exp(-0.12), W(75) = 1, W(70) = exp(-0.2); the point at 66 is more than 5 below the first."""
    points = [(1.0, 72.0), (2.0, 75.0), (4.0, 66.0), (5.0, 70.0)]
    low, high, last = 72.0 * math.exp(-0.12), 75.0, 70.0 * math.exp(-0.2)
    expected = 72.0 + 1.0 * (low + high) / 2 + 3.0 * (high + last) / 2
    assert accuracy_under_parallelism(points, best_accuracy=75.0) == pytest.approx(expected)
    assert expected == pytest.approx(339.896, abs=1e-3)
