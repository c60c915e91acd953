"""Masks and weights of answers: their sums are the bound, by enumeration of all orders and counts."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from diffusionlm.evaluation.likelihood import masks as masks_module
from diffusionlm.evaluation.likelihood.masks import (
    WeightedMasks,
    count_order_pair_masks,
    mean_cover_sets,
    sample_levels,
    sample_masks,
    weigh_cover,
    weigh_order_pair,
)

Table = dict[tuple[bool, ...], NDArray[np.float64]]


def build_table(num_tokens: int) -> Table:
    """Any log-probability of each token of each mask."""
    rng = np.random.default_rng(num_tokens)
    return {mask: -rng.exponential(1.0, num_tokens) for mask in itertools.product((False, True), repeat=num_tokens)}


def mean_over_orders(table: Table, num_tokens: int) -> float:
    """The mean over all orders of the chain rule."""
    total = 0.0
    for order in itertools.permutations(range(num_tokens)):
        for index, token in enumerate(order):
            masked = set(order[index:])
            total += table[tuple(i in masked for i in range(num_tokens))][token]
    return total / math.factorial(num_tokens)


def weighted_sum(table: Table, is_masked_Cn: NDArray[np.bool_], weights_Cn: NDArray[np.float64]) -> float:
    return sum(float(w @ table[tuple(m.tolist())]) for m, w in zip(is_masked_Cn, weights_Cn, strict=True))


@pytest.mark.parametrize(("num_tokens", "max_sets"), [(1, 16), (2, 16), (3, 16), (4, 16), (5, 16), (5, 2), (4, 1)])
def test_covers_are_unbiased(num_tokens: int, max_sets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over all orders and counts is the bound, also of covers that are cut."""
    monkeypatch.setattr(masks_module, "MAX_COVER_SETS", max_sets)
    table, totals, num_sets = build_table(num_tokens), [], []
    for size in range(1, num_tokens + 1):
        for order in itertools.permutations(range(num_tokens)):
            cover_Cn, weights_Cn = weigh_cover(np.array(order), size)
            assert (cover_Cn.sum(axis=1) == size).all()
            assert max_sets < 16 or cover_Cn.any(axis=0).all()
            totals.append(weighted_sum(table, cover_Cn, weights_Cn))
        num_sets.append(len(cover_Cn))
    assert np.mean(totals) == pytest.approx(mean_over_orders(table, num_tokens), abs=1e-12)
    assert mean_cover_sets(num_tokens) == pytest.approx(np.mean(num_sets))


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
def test_orders_are_the_chain_rule(num_tokens: int) -> None:
    """The mean over all orders is the bound; a model whose conditional probabilities agree has no variance."""
    joint = np.random.default_rng(1).dirichlet(np.ones(2**num_tokens)).reshape((2,) * num_tokens)
    # The text is all zeros: p(x_i | the visible) is a ratio of sums over the masked.
    consistent: Table = {}
    for mask in itertools.product((False, True), repeat=num_tokens):
        given = joint[tuple(slice(None) if is_masked else 0 for is_masked in mask)]
        values, masked = np.zeros(num_tokens), np.flatnonzero(mask)
        for axis, token in enumerate(masked):
            values[token] = math.log(given.take(0, axis=axis).sum() / given.sum())
        consistent[mask] = values
    table, totals = build_table(num_tokens), []
    for order in itertools.permutations(range(num_tokens)):
        masks_Cn, weights_Cn = weigh_order_pair(np.array(order))
        assert len(np.unique(masks_Cn, axis=0)) == count_order_pair_masks(num_tokens)
        totals.append(weighted_sum(table, masks_Cn, weights_Cn))
        log_joint = math.log(joint[(0,) * num_tokens])
        assert weighted_sum(consistent, masks_Cn, weights_Cn) == pytest.approx(log_joint)
    assert np.mean(totals) == pytest.approx(mean_over_orders(table, num_tokens), abs=1e-12)


def test_levels_are_one_in_each_stratum_at_every_stage() -> None:
    for seed in range(5):
        levels_D = sample_levels(5, 40, np.random.default_rng(seed))
        for num_draws in (5, 10, 20, 40):
            assert sorted((levels_D[:num_draws] * num_draws).astype(int).tolist()) == list(range(num_draws))
    values = np.stack([sample_levels(2, 8, np.random.default_rng(seed)) for seed in range(1000)])
    assert np.abs(values.mean(axis=0) - 0.5).max() < 4 * math.sqrt(1 / 12 / 1000)


def test_orders_do_not_depend_on_stages_or_on_longer_texts() -> None:
    def sample(num_tokens: int, levels: list[float], first: int, seed: int = 7) -> WeightedMasks:
        return sample_masks(num_tokens, np.array(levels), first, seed, (1, 2), draws_orders=False)

    levels = [0.1, 0.6, 0.3, 0.9]
    whole, later = sample(9, levels, 0), sample(9, levels, 2)
    is_later = whole.draws_C >= 2
    np.testing.assert_array_equal(whole.is_masked_Cn[is_later], later.is_masked_Cn)
    np.testing.assert_array_equal(whole.weights_Cn[is_later], later.weights_Cn)
    assert not np.array_equal(whole.is_masked_Cn, sample(9, levels, 0, seed=8).is_masked_Cn)
    # Sets of one token name the order of the tokens: that of 4 is that of 9 without the later ones.
    long, short = (sample(n, [0.0], 0).is_masked_Cn.argmax(axis=1).tolist() for n in (9, 4))
    assert [token for token in long if token < 4] == short
