"""Masks of a block of answer tokens, with weights that make their sum the bound, or an unbiased estimate of it.

The bound of n tokens is the mean over counts k = 1 ... n and over sets S of k tokens of ``n / k`` times the sum over i
in S of ``log p(x_i | the tokens outside of S)``. It equals the sum over tokens i of the mean over k of the mean over
the sets of k tokens that contain i, which covers estimate, and the mean over all orders of the chain rule.

Shapes: C masks, n tokens of the block, D draws.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diffusionlm.diffusion.rng import RngStream, keyed_rng

MAX_COVER_SETS = 16
"""Masks of one draw. A longer cover is cut: its tokens count more."""


@dataclass(frozen=True)
class WeightedMasks:
    """Masks of a block and the weight of each log-probability."""

    is_masked_Cn: NDArray[np.bool_]
    weights_Cn: NDArray[np.float64]
    """Weight of each masked token's log-probability; 0 elsewhere."""
    draws_C: NDArray[np.int64]
    """Draw that each mask belongs to."""


def count_masks(num_tokens: int) -> int:
    """Number of masks of a block, 2^n - 1."""
    return (1 << num_tokens) - 1


@functools.lru_cache(maxsize=32)
def enumerate_masks(num_tokens: int) -> WeightedMasks:
    """All masks of a block, with weight ``1 / (k C(n, k))`` for a mask of k tokens: the sum is the bound itself."""
    masks_C = np.arange(1, count_masks(num_tokens) + 1)
    is_masked_Cn = (masks_C[:, None] >> np.arange(num_tokens) & 1).astype(np.bool_)
    sizes = is_masked_Cn.sum(axis=1).tolist()
    weights_C = np.array([1.0 / (size * math.comb(num_tokens, size)) for size in sizes])
    return WeightedMasks(is_masked_Cn, weights_C[:, None] * is_masked_Cn, np.zeros(len(masks_C), dtype=np.int64))


# ----------------------------------------------------------------------------------------------------------------------
# Sampling


def sample_masks(
    num_tokens: int,
    levels_D: NDArray[np.float64],
    first_draw: int,
    seed: int,
    key: tuple[int, ...],
    *,
    draws_orders: bool,
) -> WeightedMasks:
    """Sample the masks of the draws from ``first_draw`` on, each from a random order of the tokens.

    The order of the first tokens does not depend on how many follow: texts of different lengths share it.

    Args:
        levels_D: of all draws; the level of a cover gives k, uniform on 1 ... n.
        draws_orders: a draw is an order with its reverse (`weigh_order_pair`), else a cover (`weigh_cover`).
    """
    masks, weights, draws = [], [], []
    for draw, level in enumerate(levels_D[first_draw:].tolist(), start=first_draw):
        order_n = np.argsort(keyed_rng(seed, RngStream.ANSWER_MASKS, *key, draw).random(num_tokens), kind="stable")
        size = min(int(level * num_tokens), num_tokens - 1) + 1
        masks_Cn, weights_Cn = weigh_order_pair(order_n) if draws_orders else weigh_cover(order_n, size)
        masks.append(masks_Cn)
        weights.append(weights_Cn)
        draws.append(np.full(len(masks_Cn), draw))
    return WeightedMasks(np.concatenate(masks), np.concatenate(weights), np.concatenate(draws))


def weigh_order_pair(order_n: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Masks of an order of the tokens and of its reverse, and their weights: 2 n masks, of which one has all tokens.

    Token j of an order is predicted while it and those after it are masked: the chain rule, whose mean over orders is
    the bound. Of two tokens exactly one sees the other, so that what they say of each other counts once in every order;
    a model whose conditional probabilities agree has no variance at all. The masks of the reverse are complements but
    for the token itself, and the error of the pair is half that of two independent orders or less.
    """
    steps_n1 = np.arange(len(order_n))[:, None]
    ranks = [np.argsort(order) for order in (order_n, order_n[::-1])]
    masks_Cn = np.concatenate([rank_n >= steps_n1 for rank_n in ranks])
    return masks_Cn, np.concatenate([0.5 * (rank_n == steps_n1) for rank_n in ranks])


def count_order_pair_masks(num_tokens: int) -> int:
    """Different masks of `weigh_order_pair`."""
    return 2 * num_tokens - 1


def sample_levels(num_first: int, num_draws: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Levels in [0, 1) of the draws, [D]: one in each of D strata, for D = ``num_first`` times a power of 2.

    The first D / 2 draws are those of D / 2 strata: a doubling splits each stratum and draws in the half that is empty.
    """
    levels_D: NDArray[np.float64] = (rng.permutation(num_first) + rng.random(num_first)) / num_first
    while len(levels_D) < num_draws:
        num_strata = 2 * len(levels_D)
        other_halves = (levels_D * num_strata).astype(np.int64) ^ 1
        levels_D = np.concatenate([levels_D, (other_halves + rng.random(len(levels_D))) / num_strata])
    return levels_D


def weigh_cover(order_n: NDArray[np.int64], size: int) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Cut an order of the tokens into sets of ``size``, which together mask each token, and weigh the sets.

    The last set wraps around, and a token in two sets has weight 1/2 in both. Each token thus counts once with a
    uniform k and uniform others, so the sum over a draw is unbiased, and the differences between tokens cancel, which
    disturb a single set of k tokens that is weighted with n / k. Complementary masks are the cover for k = n / 2. A
    cover of more than `MAX_COVER_SETS` sets is cut, and its weights multiplied by the share that is left out. A draw
    takes about ln(n) + 1 masks, fewer than an order, and has a larger error.
    """
    num_tokens = len(order_n)
    starts_C = np.arange(0, num_tokens, size)[:MAX_COVER_SETS]
    cover_Cn = np.zeros((len(starts_C), num_tokens), dtype=np.bool_)
    tokens_CK = order_n[(starts_C[:, None] + np.arange(size)) % num_tokens]
    np.put_along_axis(cover_Cn, tokens_CK, True, axis=1)
    num_sets_n = cover_Cn.sum(axis=0)
    return cover_Cn, cover_Cn * (num_tokens / (np.maximum(num_sets_n, 1) * np.count_nonzero(num_sets_n)))


def mean_cover_sets(num_tokens: int) -> float:
    """Mean number of masks of a draw, over k = 1 ... n; about ln(n) + 1."""
    sizes_n = np.arange(1, num_tokens + 1)
    return float(np.minimum(-(-num_tokens // sizes_n), MAX_COVER_SETS).mean())


def independent_standard_error(values_D: NDArray[np.float64]) -> float:
    """Standard error of the mean of independent draws; infinite for a single one."""
    return math.inf if len(values_D) < 2 else float(values_D.std(ddof=1)) / math.sqrt(len(values_D))


def stratified_standard_error(levels_D: NDArray[np.float64], values_D: NDArray[np.float64]) -> float:
    """Standard error of the mean of draws with one level in each stratum; infinite for a single draw.

    In the order of the levels the second differences ``x_{d-1} - 2 x_d + x_{d+1}`` of independent values have 6 times
    their variance, while a trend over the levels, which stratification takes out of the mean, nearly cancels (Wolter
    2007, Introduction to Variance Estimation, section 8.2). Two draws have one difference, trend included.
    """
    if len(values_D) < 3:
        return math.inf if len(values_D) < 2 else abs(float(values_D[1] - values_D[0])) / 2.0
    differences = np.diff(values_D[np.argsort(levels_D)], n=2)
    return math.sqrt(float((differences**2).mean()) / 6.0 / len(values_D))
