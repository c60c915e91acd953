"""Draws: which tokens are noised, and with what weight they count. Keyed chance, on the CPU.

Targets fall into units (rows, documents or blocks), each with a noise level of its own.

Shapes: B rows, L positions, U units of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from config.objective import Estimator, FixedCountMasking, IndependentMasking, LossWeighting, NoiseGrouping
from diffusionlm.diffusion.noised_batch import CleanBatch, NoiseKey
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.diffusion.schedules import build_schedule
from diffusionlm.models.patterns import document_offsets

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


MIN_TIME = 1e-12
"""Of Bernoulli draws: at t = 0 the weight of some schedules is infinite."""


@dataclass(frozen=True)
class MaskSample:
    """What was noised in a batch."""

    masked_BL: Bools
    """Noised positions; all of them are targets."""
    weights_BL: Floats
    """Factor of each noised token's cross-entropy; 0 elsewhere."""


# ----------------------------------------------------------------------------------------------------------------------
# Units


def assign_noise_groups(
    batch: CleanBatch, maskable_BL: Bools, grouping: NoiseGrouping, block_length: int | None
) -> Ints:
    """Number of each target's unit within its row, from 0 without gaps; -1 where there is no target. [B, L]

    Blocks are counted from each document's start; the last one of a document may be short.
    """
    if grouping == "row":
        return np.where(maskable_BL, 0, -1)
    offsets_BL: Ints = np.broadcast_to(np.arange(maskable_BL.shape[1]), maskable_BL.shape)
    if batch.document_BL is not None:
        offsets_BL = document_offsets(batch.document_BL).numpy()
    if grouping == "block":
        assert block_length is not None
        offsets_BL = offsets_BL % block_length
    run_BL = np.cumsum(offsets_BL == 0, axis=1) - 1
    # Runs without a target get no number: strata are dealt to those that have one.
    seen_BL = np.zeros_like(maskable_BL)
    rows, places = np.nonzero(maskable_BL)
    seen_BL[rows, run_BL[rows, places]] = True
    numbers_BL = np.take_along_axis(np.cumsum(seen_BL, axis=1) - 1, run_BL, axis=1)
    return np.where(maskable_BL, numbers_BL, -1)


def exclude_mask_tokens(batch: CleanBatch, mask_token: int | None) -> Bools:
    """What may be noised: targets, but for a mask token that occurs in the data. [B, L]

    That one is data, not noise: it stays as it is, is not scored (the model gives it probability zero) and not counted.
    """
    maskable_BL: Bools = batch.loss_mask_BL.numpy()
    return maskable_BL if mask_token is None else maskable_BL & (batch.tokens_BL.numpy() != mask_token)


# ----------------------------------------------------------------------------------------------------------------------
# Noise levels


def sample_sequence_offsets(key: NoiseKey, num_rows: int, times: str = "stratified") -> Floats:
    """A number in [0, 1) for each of the batch's rows, from which the levels of its units are made. [B]

    stratified: evenly spread over all rows of the step, with one shared offset, dealt out by a random permutation: a
    stratum tied to the row's place would bias data that come in a fixed order. antithetic: u and 1 - u for the two rows
    of a pair. uniform: independent.
    """
    rng = keyed_rng(key.seed, RngStream.NOISE_LEVELS, key.step)
    total = key.num_sequences_in_step
    match times:
        case "stratified":
            spread = (rng.permutation(total) + rng.random()) / total
        case "antithetic":
            spread = _antithetic_pairs(rng.random((total + 1) // 2), total)
        case _:
            spread = rng.random(total)
    return spread[key.first_sequence : key.first_sequence + num_rows]


def sample_group_levels(offset: float, num_groups: int, rng: np.random.Generator, times: str = "stratified") -> Floats:
    """A noise level in [0, 1] for each unit of a row. [U]

    With one unit it is the row's offset. Stratified: U strata, dealt out at random, all with the row's offset; since
    the offsets of the rows are spread evenly over one stratum, so are all levels of the step over [0, 1), wherever all
    rows have as many units.
    """
    if times == "stratified":
        return (rng.permutation(num_groups) + offset) / num_groups
    rest = rng.random(num_groups)
    if times == "antithetic":
        return _antithetic_pairs(np.concatenate([[offset], rest])[: (num_groups + 1) // 2], num_groups)
    rest[:1] = offset
    return rest


def _antithetic_pairs(values: Floats, total: int) -> Floats:
    return np.stack([values, 1.0 - values], axis=1).flatten()[:total]


# ----------------------------------------------------------------------------------------------------------------------
# Noise


def sample_masks(group_ids_BL: Ints, key: NoiseKey, estimator: Estimator, weight: LossWeighting) -> list[MaskSample]:
    """Noised positions and weights of a batch: one `MaskSample`, or a pair where masks come with their complements.

    Counts: k uniform on 1 ... n of the unit's n targets, with weight n / k: the weighted sum of cross-entropies is an
    unbiased estimate of the continuous-time NELBO (Ou et al. 2024, lambda-DCE; Nie et al. 2025, eq. 6), of less
    variance than any estimator by times. Bernoulli: see `config.objective.Bernoulli`.
    """
    B = len(group_ids_BL)
    offsets_B = sample_sequence_offsets(
        key, B, "stratified" if isinstance(estimator, FixedCountMasking) else estimator.times
    )
    parts = 2 if isinstance(estimator, FixedCountMasking) and estimator.complementary else 1
    masked = np.zeros((parts, *group_ids_BL.shape), dtype=np.bool_)
    weights = np.zeros((parts, *group_ids_BL.shape))
    for row in range(B):
        places = np.flatnonzero(group_ids_BL[row] >= 0)
        if len(places) == 0:
            continue
        rng = keyed_rng(key.seed, RngStream.MASKS, key.step, key.first_sequence + row)
        group_ids, group_sizes_G = group_ids_BL[row, places], np.bincount(group_ids_BL[row, places])
        match estimator:
            case FixedCountMasking():
                drawn = _sample_fixed_counts(group_ids, group_sizes_G, offsets_B[row], rng, estimator)
            case IndependentMasking():
                drawn = [_sample_independent(group_ids, group_sizes_G, offsets_B[row], rng, estimator, weight)]
            case _:
                assert_never(estimator)
        for part, (chosen, weight_U) in enumerate(drawn):
            factor_U = np.ones_like(weight_U) / parts if weight == "uniform" else weight_U
            if estimator.reweight_cap is not None:
                factor_U = np.minimum(factor_U, estimator.reweight_cap / parts)
            masked[part, row, places] = chosen
            weights[part, row, places] = np.where(chosen, factor_U[group_ids], 0.0)
    return [MaskSample(masked[part], weights[part]) for part in range(parts)]


def _sample_fixed_counts(
    group_ids: Ints, group_sizes_G: Ints, offset: float, rng: np.random.Generator, config: FixedCountMasking
) -> list[tuple[Bools, Floats]]:
    """Chosen targets and the weight of each unit, for the mask and, where asked for, its complement."""
    low, high = config.range
    levels_U = low + (high - low) * sample_group_levels(offset, len(group_sizes_G), rng)
    order = _GroupOrder(group_ids, group_sizes_G, rng, config.contiguous_probability)
    if not config.complementary:
        counts_G = masked_counts_at_levels(levels_U, group_sizes_G)
        return [(order.select_first(counts_G), group_sizes_G / counts_G)]
    counts_G = np.minimum((levels_U * (group_sizes_G + 1)).astype(np.int64), group_sizes_G)
    chosen = order.select_first(counts_G)
    # k is uniform on 0 ... n: E of (n + 1) / k, over k >= 1, is the NELBO, and half of it comes from each of the pair.
    return [
        (taken, (group_sizes_G + 1) / (2 * np.maximum(count_U, 1)))
        for taken, count_U in ((chosen, counts_G), (~chosen, group_sizes_G - counts_G))
    ]


def masked_counts_at_levels(levels: Floats, sizes: Ints) -> Ints:
    """Masked counts 1 ... n at levels in [0, 1]: uniform where the levels are."""
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
    t_U = np.maximum(low + (high - low) * sample_group_levels(offset, len(group_sizes_G), rng, config.times), MIN_TIME)
    schedule = build_schedule(config.schedule)
    share_U = (1.0 - config.epsilon) * (1.0 - schedule.alpha(t_U)) + config.epsilon
    p_U = np.maximum(share_U, config.min_masking_rate)
    keys = rng.random(len(group_ids))
    chosen = keys < p_U[group_ids]
    if config.contiguous_probability > 0.0:
        spans = _GroupOrder(group_ids, group_sizes_G, rng, 1.0).select_first(
            np.maximum(1, np.round(p_U * group_sizes_G)).astype(np.int64)
        )
        chosen = np.where((rng.random(len(group_sizes_G)) < config.contiguous_probability)[group_ids], spans, chosen)
    # Of the schedule that epsilon makes, whose alpha is (1 - epsilon) times that of the config.
    slope_U = -(1.0 - config.epsilon) * schedule.alpha_prime(t_U)
    factor_U = slope_U if weight == "elbo" else np.ones_like(p_U)
    # A probability of zero chooses nothing.
    return chosen, np.divide(factor_U, p_U, out=np.zeros_like(p_U), where=p_U > 0.0)


def choose_masked_in_groups(group_ids: Ints, counts_G: Ints, rng: np.random.Generator) -> Bools:
    """So many of each unit's targets, uniformly; ``units`` are the targets' units, ascending from 0 without gaps."""
    return _GroupOrder(group_ids, np.bincount(group_ids, minlength=len(counts_G)), rng, 0.0).select_first(counts_G)


class _GroupOrder:
    """An order of each unit's targets: at random, or, with probability ``contiguous``, one run from a random start."""

    def __init__(
        self, group_ids: Ints, group_sizes_G: Ints, rng: np.random.Generator, contiguous_probability: float
    ) -> None:
        self.group_ids, self.group_sizes_G = group_ids, group_sizes_G
        keys = rng.random(len(group_ids))
        order = np.lexsort((keys, group_ids))
        firsts_U = np.concatenate([[0], np.cumsum(group_sizes_G)[:-1]])
        self.random_rank = np.empty(len(group_ids), dtype=np.int64)
        self.random_rank[order] = np.arange(len(group_ids)) - np.repeat(firsts_U, group_sizes_G)
        self.index_in_group = np.arange(len(group_ids)) - firsts_U[group_ids]
        self.is_contiguous_G = rng.random(len(group_sizes_G)) < contiguous_probability
        self.start_fraction_G = rng.random(len(group_sizes_G))

    def select_first(self, counts_G: Ints) -> Bools:
        """So many targets of each unit."""
        starts_U = (self.start_fraction_G * (self.group_sizes_G - counts_G + 1)).astype(np.int64)
        place = np.where(
            self.is_contiguous_G[self.group_ids], self.index_in_group - starts_U[self.group_ids], self.random_rank
        )
        return (place >= 0) & (place < counts_G[self.group_ids])


def sample_replacement_tokens(shape: tuple[int, int], vocab_size: int, mask_token: int, key: NoiseKey) -> Ints:
    """Tokens drawn uniformly from the vocabulary without the mask token. [B, L]"""
    tokens = np.stack(
        [
            keyed_rng(key.seed, RngStream.REPLACEMENT_TOKENS, key.step, key.first_sequence + row).integers(
                0, vocab_size - 1, shape[1]
            )
            for row in range(shape[0])
        ]
    )
    return tokens + (tokens >= mask_token)
