"""Sample which tokens are masked, and their loss weights, with keyed random numbers on the CPU.

The target tokens of a sequence form noise groups (the whole sequence, a document or a block). The tokens of a group
share one noise level.

Shapes: B sequences, L tokens, G noise groups of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from config.training.objective import (
    AllMasked,
    Estimator,
    FixedCountMasking,
    IndependentMasking,
    LossWeighting,
    NoiseGrouping,
)
from diffusionlm.diffusion.noised_batch import CleanBatch, NoiseKey
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.models.patterns import document_offsets

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

CART_P = 0.3
"""The p of context-adaptive weights in training."""
MIN_TIME = 1e-12
"""Smallest time of independent masking: at t = 0 the weight of some schedules is infinite."""


@dataclass(frozen=True)
class MaskSample:
    """Masks of a batch and their loss weights."""

    masked_BL: Bools
    """Masked positions; all of them are target tokens."""
    weights_BL: Floats
    """Loss weight of each masked token; 0 elsewhere."""


# ----------------------------------------------------------------------------------------------------------------------
# Noise groups


def assign_noise_groups(
    batch: CleanBatch, maskable_BL: Bools, grouping: NoiseGrouping, block_length: int | None
) -> Ints:
    """Index of each target token's noise group in its sequence, from 0 without gaps; -1 for other tokens. [B, L]

    Blocks are counted from the start of each document; the last one of a document may be shorter.
    """
    if grouping == "row":
        return np.where(maskable_BL, 0, -1)
    offsets_BL: Ints = np.broadcast_to(np.arange(maskable_BL.shape[1]), maskable_BL.shape)
    if batch.document_BL is not None:
        offsets_BL = document_offsets(batch.document_BL).numpy()
    if grouping == "block":
        assert block_length is not None
        offsets_BL = offsets_BL % block_length
    part_BL = np.cumsum(offsets_BL == 0, axis=1) - 1
    # Documents and blocks without a target token get no index, so that every stratum of noise levels is used.
    has_target_BL = np.zeros_like(maskable_BL)
    sequences, positions = np.nonzero(maskable_BL)
    has_target_BL[sequences, part_BL[sequences, positions]] = True
    group_ids_BL = np.take_along_axis(np.cumsum(has_target_BL, axis=1) - 1, part_BL, axis=1)
    return np.where(maskable_BL, group_ids_BL, -1)


def exclude_mask_tokens(batch: CleanBatch, mask_token: int | None) -> Bools:
    """Target tokens that are not the mask token, [B, L].

    A mask token in the data is not noise: the model gives it probability zero, so it is never masked and not counted.
    """
    maskable_BL: Bools = batch.loss_mask_BL.numpy()
    return maskable_BL if mask_token is None else maskable_BL & (batch.tokens_BL.numpy() != mask_token)


# ----------------------------------------------------------------------------------------------------------------------
# Noise levels


def sample_sequence_offsets(key: NoiseKey, num_sequences: int, times: str = "stratified") -> Floats:
    """Offset in [0, 1) of the noise levels of each sequence of the batch, [B].

    stratified: evenly spaced over all sequences of the step, with one shared random shift, in a random permutation (a
    stratum tied to the index of the sequence would bias data in a fixed order). antithetic: u and 1 - u for two
    neighbors. uniform: independent.
    """
    rng = keyed_rng(key.seed, RngStream.NOISE_LEVELS, key.step)
    total = key.num_sequences_in_step
    match times:
        case "stratified":
            offsets = (rng.permutation(total) + rng.random()) / total
        case "antithetic":
            offsets = _antithetic_pairs(rng.random((total + 1) // 2), total)
        case _:
            offsets = rng.random(total)
    return offsets[key.first_sequence : key.first_sequence + num_sequences]


def sample_group_levels(offset: float, num_groups: int, rng: np.random.Generator, times: str = "stratified") -> Floats:
    """Noise level in [0, 1] of each noise group of a sequence, [G].

    With one group it is the offset of the sequence. stratified: each group gets one of G strata at random, shifted by
    the offset. The offsets of the sequences are evenly spaced, so the levels of the whole step are evenly spaced over
    [0, 1) if all sequences have the same number of groups.
    """
    if times == "stratified":
        return (rng.permutation(num_groups) + offset) / num_groups
    levels = rng.random(num_groups)
    if times == "antithetic":
        return _antithetic_pairs(np.concatenate([[offset], levels])[: (num_groups + 1) // 2], num_groups)
    levels[:1] = offset
    return levels


def _antithetic_pairs(values: Floats, total: int) -> Floats:
    return np.stack([values, 1.0 - values], axis=1).flatten()[:total]


# ----------------------------------------------------------------------------------------------------------------------
# Masks


def sample_masks(group_ids_BL: Ints, key: NoiseKey, estimator: Estimator, weight: LossWeighting) -> list[MaskSample]:
    """Sample masks and loss weights of a batch: one `MaskSample`, or two if masks come with their complements.

    Fixed-count masking: k is uniform on 1 ... n for a group of n target tokens, with weight n / k. The weighted sum of
    cross-entropies is an unbiased estimate of the continuous-time NELBO (Ou et al. 2024, lambda-DCE; Nie et al. 2025,
    eq. 6), with less variance than any estimator that samples times. Independent masking: see
    `config.training.objective.IndependentMasking`. All masked: every target token, with weight 1.

    ``group_ids_BL`` is the result of `assign_noise_groups`. Weights "cart" are 1 here, and multiplied later by
    `context_adaptive_weights`.
    """
    B = len(group_ids_BL)
    times = estimator.times if isinstance(estimator, IndependentMasking) else "stratified"
    offsets_B = sample_sequence_offsets(key, B, times)
    num_samples = 2 if isinstance(estimator, FixedCountMasking) and estimator.complementary else 1
    masked = np.zeros((num_samples, *group_ids_BL.shape), dtype=np.bool_)
    weights = np.zeros((num_samples, *group_ids_BL.shape))
    for row in range(B):
        positions = np.flatnonzero(group_ids_BL[row] >= 0)
        if len(positions) == 0:
            continue
        rng = keyed_rng(key.seed, RngStream.MASKS, key.step, key.first_sequence + row)
        group_ids, group_sizes_G = group_ids_BL[row, positions], np.bincount(group_ids_BL[row, positions])
        match estimator:
            case FixedCountMasking():
                samples = _sample_fixed_counts(group_ids, group_sizes_G, offsets_B[row], rng, estimator)
            case IndependentMasking():
                samples = [_sample_independent(group_ids, group_sizes_G, offsets_B[row], rng, estimator, weight)]
            case AllMasked():
                samples = [(np.ones(len(positions), dtype=np.bool_), np.ones(len(positions)))]
            case _:
                assert_never(estimator)
        for index, (is_masked, token_weights) in enumerate(samples):
            if weight in ("uniform", "cart"):
                token_weights = np.ones_like(token_weights) / num_samples
            if estimator.reweight_cap is not None:
                token_weights = np.minimum(token_weights, estimator.reweight_cap / num_samples)
            masked[index, row, positions] = is_masked
            weights[index, row, positions] = np.where(is_masked, token_weights, 0.0)
    return [MaskSample(masked[index], weights[index]) for index in range(num_samples)]


def _sample_fixed_counts(
    group_ids: Ints, group_sizes_G: Ints, offset: float, rng: np.random.Generator, config: FixedCountMasking
) -> list[tuple[Bools, Floats]]:
    """Masked target tokens and the weight of each; with ``complementary`` also those of the complement."""
    low, high = config.range
    levels_G = low + (high - low) * sample_group_levels(offset, len(group_sizes_G), rng)
    rates = position_rates(group_ids, group_sizes_G, config.position_ratio)
    order = _GroupOrder(group_ids, group_sizes_G, rng, config.contiguous_probability, rates)
    if not config.complementary:
        counts_G = masked_counts_at_levels(levels_G, group_sizes_G)
        is_masked = order.select_first(counts_G)
        if rates is None:
            return [(is_masked, (group_sizes_G / counts_G)[group_ids])]
        rates_of_masked_G = np.bincount(group_ids, weights=rates * is_masked)
        return [(is_masked, group_sizes_G[group_ids] * rates / rates_of_masked_G[group_ids])]
    counts_G = np.minimum((levels_G * (group_sizes_G + 1)).astype(np.int64), group_sizes_G)
    is_masked = order.select_first(counts_G)
    # k is uniform on 0 ... n. The expectation of the sum with weights (n + 1) / k over k >= 1 is the NELBO; each of the
    # two samples contributes half of it.
    return [
        (mask, ((group_sizes_G + 1) / (2 * np.maximum(count_G, 1)))[group_ids])
        for mask, count_G in ((is_masked, counts_G), (~is_masked, group_sizes_G - counts_G))
    ]


def masked_counts_at_levels(levels: Floats, sizes: Ints) -> Ints:
    """Masked counts in 1 ... n for levels in [0, 1]; uniform levels give uniform counts."""
    return np.minimum((levels * sizes).astype(np.int64) + 1, np.maximum(sizes, 1))


def _sample_independent(
    group_ids: Ints,
    group_sizes_G: Ints,
    offset: float,
    rng: np.random.Generator,
    config: IndependentMasking,
    weight: LossWeighting,
) -> tuple[Bools, Floats]:
    low, high = config.range
    t_G = np.maximum(low + (high - low) * sample_group_levels(offset, len(group_sizes_G), rng, config.times), MIN_TIME)
    schedule = config.schedule
    share_G = (1.0 - config.epsilon) * (1.0 - schedule.alpha(t_G)) + config.epsilon
    p_G = np.maximum(share_G, config.min_masking_rate)
    rates = position_rates(group_ids, group_sizes_G, config.position_ratio)
    probabilities = p_G[group_ids] if rates is None else p_G[group_ids] ** rates
    is_masked = rng.random(len(group_ids)) < probabilities
    if config.contiguous_probability > 0.0:
        spans = _GroupOrder(group_ids, group_sizes_G, rng, 1.0).select_first(
            np.maximum(1, np.round(p_G * group_sizes_G)).astype(np.int64)
        )
        is_contiguous_G = rng.random(len(group_sizes_G)) < config.contiguous_probability
        is_masked = np.where(is_contiguous_G[group_ids], spans, is_masked)
    # With epsilon, alpha is (1 - epsilon) times that of the schedule.
    slope_G = -(1.0 - config.epsilon) * schedule.alpha_prime(t_G)
    numerator_G = slope_G if weight == "elbo" else np.ones_like(p_G)
    # Where p is zero nothing is masked, and any weight will do.
    weights = np.divide(numerator_G, p_G, out=np.zeros_like(p_G), where=p_G > 0.0)[group_ids]
    if rates is None:
        return is_masked, weights
    # The derivative of log(p ** rate) is rate * p' / p.
    inverse = np.divide(1.0, probabilities, out=np.zeros_like(weights), where=probabilities > 0.0)
    return is_masked, rates * weights if weight == "elbo" else inverse


def position_rates(group_ids: Ints, group_sizes_G: Ints, ratio: float) -> Floats | None:
    """Rate at which each target token is decoded: that of the first of a group is ``ratio`` times that of the last, and
    their geometric mean is 1. None: all rates are 1.

    With rates, a token is masked with probability p ** rate in place of p. Decoding then draws the next token of the
    masked ones in proportion to its rate (the order of Plackett and Luce), and the loss is the NELBO for such orders.
    """
    if ratio == 1.0:
        return None
    exponents: Floats = 0.5 - _index_in_group(group_ids, group_sizes_G) / np.maximum(group_sizes_G - 1, 1)[group_ids]
    rates: Floats = np.where(group_sizes_G[group_ids] > 1, np.power(ratio, exponents), 1.0)
    return rates


def choose_masked_in_groups(group_ids: Ints, counts_G: Ints, rng: np.random.Generator) -> Bools:
    """Choose ``counts_G[g]`` target tokens of each noise group uniformly at random.

    ``group_ids`` has the group of each target token, ascending from 0 without gaps.
    """
    return _GroupOrder(group_ids, np.bincount(group_ids, minlength=len(counts_G)), rng, 0.0).select_first(counts_G)


def _index_in_group(group_ids: Ints, group_sizes_G: Ints) -> Ints:
    starts_G = np.concatenate([[0], np.cumsum(group_sizes_G)[:-1]])
    indices: Ints = np.arange(len(group_ids)) - starts_G[group_ids]
    return indices


class _GroupOrder:
    """Random order of the target tokens of each group.

    With probability ``contiguous_probability`` the tokens selected from a group are contiguous, from a random start.
    With ``rates`` (`position_rates`) the order is that of decoding, from its end.
    """

    def __init__(
        self,
        group_ids: Ints,
        group_sizes_G: Ints,
        rng: np.random.Generator,
        contiguous_probability: float,
        rates: Floats | None = None,
    ) -> None:
        self.group_ids, self.group_sizes_G = group_ids, group_sizes_G
        keys = rng.random(len(group_ids))
        if rates is not None:
            keys = np.log1p(-keys) / rates  # minus the time until a token is decoded, exponential with its rate
        self.index_in_group = _index_in_group(group_ids, group_sizes_G)
        self.random_rank = np.empty(len(group_ids), dtype=np.int64)
        self.random_rank[np.lexsort((keys, group_ids))] = self.index_in_group
        self.is_contiguous_G = rng.random(len(group_sizes_G)) < contiguous_probability
        self.start_fraction_G = rng.random(len(group_sizes_G))

    def select_first(self, counts_G: Ints) -> Bools:
        """Select ``counts_G[g]`` target tokens of each group."""
        span_starts_G = (self.start_fraction_G * (self.group_sizes_G - counts_G + 1)).astype(np.int64)
        index_in_span = self.index_in_group - span_starts_G[self.group_ids]
        order = np.where(self.is_contiguous_G[self.group_ids], index_in_span, self.random_rank)
        return (order >= 0) & (order < counts_G[self.group_ids])


def sample_replacement_tokens(shape: tuple[int, int], vocab_size: int, mask_token: int, key: NoiseKey) -> Ints:
    """Tokens sampled uniformly from the vocabulary without the mask token, [B, L]."""
    num_sequences, length = shape
    rngs = [
        keyed_rng(key.seed, RngStream.REPLACEMENT_TOKENS, key.step, key.first_sequence + row)
        for row in range(num_sequences)
    ]
    tokens = np.array([rng.integers(0, vocab_size - 1, length) for rng in rngs], dtype=np.int64).reshape(shape)
    return tokens + (tokens >= mask_token)


def context_adaptive_weights(batch: CleanBatch, masked_BL: Bools, p: float) -> Floats:
    """Weight of each masked token by the visible tokens near it, [B, L]; 0 elsewhere (CART, Ye et al. 2025, Dream).

    Half the sum of p (1 - p)^(d - 1) over the visible tokens of the document, at distance d.
    """
    B, L = masked_BL.shape
    offsets_BL = np.broadcast_to(np.arange(L), (B, L))
    visible_BL = ~masked_BL
    if batch.document_BL is not None:
        offsets_BL = document_offsets(batch.document_BL).numpy()
        visible_BL = visible_BL & (batch.document_BL.numpy() >= 0)
    weights_BL = _discounted_counts(visible_BL, offsets_BL == 0, p)
    is_last_BL = np.roll(offsets_BL == 0, -1, axis=1)
    weights_BL += _discounted_counts(visible_BL[:, ::-1], is_last_BL[:, ::-1], p)[:, ::-1]
    return np.where(masked_BL, 0.5 * p * weights_BL, 0.0)


def _discounted_counts(visible_BL: Bools, is_first_BL: Bools, p: float) -> Floats:
    """Sum of (1 - p)^(d - 1) over the visible tokens before each token, from the first one of its document on."""
    counts_BL = np.zeros(visible_BL.shape)
    for position in range(1, visible_BL.shape[1]):
        before = (1.0 - p) * counts_BL[:, position - 1] + visible_BL[:, position - 1]
        counts_BL[:, position] = np.where(is_first_BL[:, position], 0.0, before)
    return counts_BL
