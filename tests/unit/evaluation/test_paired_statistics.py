"""pass@k and paired differences, against enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from diffusionlm.evaluation.grading.paired import compare_paired, sign_test
from diffusionlm.evaluation.tasks.summary import pass_at_k


@pytest.mark.parametrize(
    ("n", "c", "k"), [(n, c, k) for n in range(1, 8) for c in range(n + 1) for k in range(1, n + 1)]
)
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n: int, c: int, k: int) -> None:
    subsets = list(itertools.combinations(range(n), k))
    expected = sum(min(subset) < c for subset in subsets) / len(subsets)
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("n", "c", "k", "name"), [(4, 5, 1, "c = 5"), (4, -1, 1, "c = -1"), (4, 2, 5, "k = 5"), (4, 2, 0, "k = 0")]
)
def test_pass_at_k_refuses_impossible_counts(n: int, c: int, k: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        pass_at_k(n, c, k)


@pytest.mark.parametrize("num_coins", range(13))
def test_the_sign_test_counts_all_outcomes_at_most_as_likely(num_coins: int) -> None:
    heads = [sum(coins) for coins in itertools.product((0, 1), repeat=num_coins)]
    for num_a in range(num_coins + 1):
        distance = abs(num_a - num_coins / 2)
        expected = sum(abs(count - num_coins / 2) >= distance for count in heads) / len(heads)
        assert sign_test(num_a, num_coins - num_a) == pytest.approx(expected, abs=1e-12)


def test_the_sign_test_of_many_coins() -> None:
    assert sign_test(7000, 7000) == 1.0
    assert sign_test(0, 14_000) == 0.0
    deviations = 40 / math.sqrt(7000 / 2)
    normal = math.erfc((deviations - 0.5 / math.sqrt(7000 / 2)) / math.sqrt(2))
    assert sign_test(7040, 6960) == pytest.approx(normal, rel=1e-3)


def test_right_and_wrong_answers_have_the_error_of_discordant_pairs() -> None:
    first_N = np.repeat([1.0, 0.0, 1.0, 0.0], [7, 3, 20, 10])
    second_N = np.repeat([0.0, 1.0, 1.0, 0.0], [7, 3, 20, 10])
    result = compare_paired(first_N, second_N)
    assert (result.num_items, result.num_only_first, result.num_only_second) == (40, 7, 3)
    assert result.difference == pytest.approx(-4 / 40)
    assert result.standard_error == pytest.approx(math.sqrt(10 - 16 / 40) / 40)
    assert result.p_value == pytest.approx(sign_test(7, 3)) == pytest.approx(352 / 1024)


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


@pytest.mark.parametrize(
    ("a", "b", "problem"), [([], [], "no items"), ([1.0], [1.0, 0.0], "shapes"), ([math.nan], [1.0], "not finite")]
)
def test_scores_that_cannot_be_compared_are_refused(a: list[float], b: list[float], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        compare_paired(np.array(a), np.array(b))
