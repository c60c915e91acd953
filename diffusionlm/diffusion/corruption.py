"""Draws: which tokens are noised, and with what weight they count. Keyed chance, on the CPU.

Targets fall into units (rows, documents or blocks), each with a noise level of its own.

Shapes: B rows, L positions, U units of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from config.objective import Bernoulli, Counts, Estimator, Unit, Weight
from diffusionlm.diffusion.noised_batch import Batch, DrawKey
from diffusionlm.diffusion.rng import Stream, generator
from diffusionlm.diffusion.schedules import build_schedule
from diffusionlm.models.patterns import document_offsets

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


LEAST_TIME = 1e-12
"""Of Bernoulli draws: at t = 0 the weight of some schedules is infinite."""


@dataclass(frozen=True)
class Noise:
    """What was noised in a batch."""

    masked_BL: Bools
    """Noised positions; all of them are targets."""
    weights_BL: Floats
    """Factor of each noised token's cross-entropy; 0 elsewhere."""


# ----------------------------------------------------------------------------------------------------------------------
# Units


def unit_numbers(batch: Batch, eligible_BL: Bools, per: Unit, block_length: int | None) -> Ints:
    """Number of each target's unit within its row, from 0 without gaps; -1 where there is no target. [B, L]

    Blocks are counted from each document's start; the last one of a document may be short.
    """
    if per == "row":
        return np.where(eligible_BL, 0, -1)
    offsets_BL: Ints = np.broadcast_to(np.arange(eligible_BL.shape[1]), eligible_BL.shape)
    if batch.document_BL is not None:
        offsets_BL = document_offsets(batch.document_BL).numpy()
    if per == "block":
        assert block_length is not None
        offsets_BL = offsets_BL % block_length
    run_BL = np.cumsum(offsets_BL == 0, axis=1) - 1
    # Runs without a target get no number: strata are dealt to those that have one.
    seen_BL = np.zeros_like(eligible_BL)
    rows, places = np.nonzero(eligible_BL)
    seen_BL[rows, run_BL[rows, places]] = True
    numbers_BL = np.take_along_axis(np.cumsum(seen_BL, axis=1) - 1, run_BL, axis=1)
    return np.where(eligible_BL, numbers_BL, -1)


def targets_without_mask_token(batch: Batch, mask_token: int | None) -> Bools:
    """What may be noised: targets, but for a mask token that occurs in the data. [B, L]

    That one is data, not noise: it stays as it is, is not scored (the model gives it probability zero) and not counted.
    """
    eligible_BL: Bools = batch.is_target_BL.numpy()
    return eligible_BL if mask_token is None else eligible_BL & (batch.tokens_BL.numpy() != mask_token)


# ----------------------------------------------------------------------------------------------------------------------
# Noise levels


def row_offsets(key: DrawKey, num_rows: int, times: str = "stratified") -> Floats:
    """A number in [0, 1) for each of the batch's rows, from which the levels of its units are made. [B]

    stratified: evenly spread over all rows of the step, with one shared offset, dealt out by a random permutation: a
    stratum tied to the row's place would bias data that come in a fixed order. antithetic: u and 1 - u for the two rows
    of a pair. uniform: independent.
    """
    chance = generator(key.seed, Stream.DRAW_STRATA, key.step)
    total = key.rows_in_step
    match times:
        case "stratified":
            spread = (chance.permutation(total) + chance.random()) / total
        case "antithetic":
            spread = _in_pairs(chance.random((total + 1) // 2), total)
        case _:
            spread = chance.random(total)
    return spread[key.first_row : key.first_row + num_rows]


def unit_levels(offset: float, num_units: int, chance: np.random.Generator, times: str = "stratified") -> Floats:
    """A noise level in [0, 1] for each unit of a row. [U]

    With one unit it is the row's offset. Stratified: U strata, dealt out at random, all with the row's offset; since
    the offsets of the rows are spread evenly over one stratum, so are all levels of the step over [0, 1), wherever all
    rows have as many units.
    """
    if times == "stratified":
        return (chance.permutation(num_units) + offset) / num_units
    rest = chance.random(num_units)
    if times == "antithetic":
        return _in_pairs(np.concatenate([[offset], rest])[: (num_units + 1) // 2], num_units)
    rest[:1] = offset
    return rest


def _in_pairs(values: Floats, total: int) -> Floats:
    return np.stack([values, 1.0 - values], axis=1).flatten()[:total]


# ----------------------------------------------------------------------------------------------------------------------
# Noise


def draw_noise(units_BL: Ints, key: DrawKey, estimator: Estimator, weight: Weight) -> list[Noise]:
    """Noised positions and weights of a batch: one `Noise`, or a pair where masks come with their complements.

    Counts: k uniform on 1 ... n of the unit's n targets, with weight n / k: the weighted sum of cross-entropies is an
    unbiased estimate of the continuous-time NELBO (Ou et al. 2024, lambda-DCE; Nie et al. 2025, eq. 6), of less
    variance than any estimator by times. Bernoulli: see `config.objective.Bernoulli`.
    """
    B = len(units_BL)
    offsets_B = row_offsets(key, B, "stratified" if isinstance(estimator, Counts) else estimator.times)
    parts = 2 if isinstance(estimator, Counts) and estimator.complementary else 1
    masked = np.zeros((parts, *units_BL.shape), dtype=np.bool_)
    weights = np.zeros((parts, *units_BL.shape))
    for row in range(B):
        places = np.flatnonzero(units_BL[row] >= 0)
        if len(places) == 0:
            continue
        chance = generator(key.seed, Stream.DRAW_ROW, key.step, key.first_row + row)
        units, sizes_U = units_BL[row, places], np.bincount(units_BL[row, places])
        match estimator:
            case Counts():
                drawn = _draw_counts(units, sizes_U, offsets_B[row], chance, estimator)
            case Bernoulli():
                drawn = [_draw_bernoulli(units, sizes_U, offsets_B[row], chance, estimator, weight)]
            case _:
                assert_never(estimator)
        for part, (chosen, weight_U) in enumerate(drawn):
            factor_U = np.ones_like(weight_U) / parts if weight == "uniform" else weight_U
            if estimator.reweight_cap is not None:
                factor_U = np.minimum(factor_U, estimator.reweight_cap / parts)
            masked[part, row, places] = chosen
            weights[part, row, places] = np.where(chosen, factor_U[units], 0.0)
    return [Noise(masked[part], weights[part]) for part in range(parts)]


def _draw_counts(
    units: Ints, sizes_U: Ints, offset: float, chance: np.random.Generator, config: Counts
) -> list[tuple[Bools, Floats]]:
    """Chosen targets and the weight of each unit, for the mask and, where asked for, its complement."""
    low, high = config.range
    levels_U = low + (high - low) * unit_levels(offset, len(sizes_U), chance)
    order = _Order(units, sizes_U, chance, config.contiguous_probability)
    if not config.complementary:
        counts_U = counts_at(levels_U, sizes_U)
        return [(order.first(counts_U), sizes_U / counts_U)]
    counts_U = np.minimum((levels_U * (sizes_U + 1)).astype(np.int64), sizes_U)
    chosen = order.first(counts_U)
    # k is uniform on 0 ... n: E of (n + 1) / k, over k >= 1, is the NELBO, and half of it comes from each of the pair.
    return [
        (taken, (sizes_U + 1) / (2 * np.maximum(count_U, 1)))
        for taken, count_U in ((chosen, counts_U), (~chosen, sizes_U - counts_U))
    ]


def counts_at(levels: Floats, sizes: Ints) -> Ints:
    """Masked counts 1 ... n at levels in [0, 1]: uniform where the levels are."""
    return np.minimum((levels * sizes).astype(np.int64) + 1, np.maximum(sizes, 1))


def _draw_bernoulli(
    units: Ints, sizes_U: Ints, offset: float, chance: np.random.Generator, config: Bernoulli, weight: Weight
) -> tuple[Bools, Floats]:
    low, high = config.range
    t_U = np.maximum(low + (high - low) * unit_levels(offset, len(sizes_U), chance, config.times), LEAST_TIME)
    schedule = build_schedule(config.schedule)
    share_U = (1.0 - config.epsilon) * (1.0 - schedule.alpha(t_U)) + config.epsilon
    p_U = np.maximum(share_U, config.min_masking_rate)
    keys = chance.random(len(units))
    chosen = keys < p_U[units]
    if config.contiguous_probability > 0.0:
        spans = _Order(units, sizes_U, chance, 1.0).first(np.maximum(1, np.round(p_U * sizes_U)).astype(np.int64))
        chosen = np.where((chance.random(len(sizes_U)) < config.contiguous_probability)[units], spans, chosen)
    # Of the schedule that epsilon makes, whose alpha is (1 - epsilon) times that of the config.
    slope_U = -(1.0 - config.epsilon) * schedule.alpha_prime(t_U)
    factor_U = slope_U if weight == "elbo" else np.ones_like(p_U)
    # A probability of zero chooses nothing.
    return chosen, np.divide(factor_U, p_U, out=np.zeros_like(p_U), where=p_U > 0.0)


def choose_counts(units: Ints, counts_U: Ints, chance: np.random.Generator) -> Bools:
    """So many of each unit's targets, uniformly; ``units`` are the targets' units, ascending from 0 without gaps."""
    return _Order(units, np.bincount(units, minlength=len(counts_U)), chance, 0.0).first(counts_U)


class _Order:
    """An order of each unit's targets: at random, or, with probability ``contiguous``, one run from a random start."""

    def __init__(self, units: Ints, sizes_U: Ints, chance: np.random.Generator, contiguous: float) -> None:
        self.units, self.sizes_U = units, sizes_U
        keys = chance.random(len(units))
        order = np.lexsort((keys, units))
        firsts_U = np.concatenate([[0], np.cumsum(sizes_U)[:-1]])
        self.rank = np.empty(len(units), dtype=np.int64)
        self.rank[order] = np.arange(len(units)) - np.repeat(firsts_U, sizes_U)
        self.in_unit = np.arange(len(units)) - firsts_U[units]
        self.is_run_U = chance.random(len(sizes_U)) < contiguous
        self.start_U = chance.random(len(sizes_U))

    def first(self, counts_U: Ints) -> Bools:
        """So many targets of each unit."""
        starts_U = (self.start_U * (self.sizes_U - counts_U + 1)).astype(np.int64)
        place = np.where(self.is_run_U[self.units], self.in_unit - starts_U[self.units], self.rank)
        return (place >= 0) & (place < counts_U[self.units])


def replacement_tokens(shape: tuple[int, int], vocab_size: int, mask_token: int, key: DrawKey) -> Ints:
    """Tokens drawn uniformly from the vocabulary without the mask token. [B, L]"""
    tokens = np.stack(
        [
            generator(key.seed, Stream.DRAW_REPLACEMENT, key.step, key.first_row + row).integers(
                0, vocab_size - 1, shape[1]
            )
            for row in range(shape[0])
        ]
    )
    return tokens + (tokens >= mask_token)
