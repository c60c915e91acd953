"""Likelihood of text under a model: the NELBO, with its standard error.

Shapes: B rows, L positions, R scored positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionlm.diffusion.batch import Batch
from diffusionlm.diffusion.corruption import generator, masked_draw
from diffusionlm.kernels.cross_entropy import Score
from diffusionlm.models.transformer import Transformer

GRID = 2
"""Stream of keyed chance of the evaluation grid; corruption.py has 0 and 1."""

NUM_FRACTION_BINS = 10


@dataclass(frozen=True)
class NelboReport:
    """A bound on the negative log-likelihood, and what it is made of."""

    nats_per_token: float
    """Mean over target tokens."""
    standard_error: float
    """Of `nats_per_token`, over draws and rows; infinite for a single row."""
    num_tokens: int
    """Target tokens, each row counted once."""
    nats: float
    """Sum over target tokens."""
    by_masked_fraction: tuple[tuple[float, float, float], ...]
    """(low, high, mean cross-entropy in nats of a masked token) for shares of masked tokens in (low, high]."""


@torch.no_grad()
def nelbo(
    model: Transformer,
    tokens_BL: Tensor,
    is_target_BL: Tensor | None = None,
    *,
    num_draws: int = 4,
    seed: int = 0,
    document_BL: Tensor | None = None,
    batch_size: int = 32,
) -> NelboReport:
    """Negative evidence lower bound of masked diffusion, unbiased, by masked counts.

    Each row of n target tokens is masked ``num_draws`` times; the counts k are spread evenly over 1 ... n within the
    row, and their offsets over the rows; an estimate is n / k times the sum of cross-entropies (Nie et al. 2025,
    eq. 6). The grid depends on the seed and the rows' places alone, so two models are compared on the same draws.

    Args:
        tokens_BL: clean token ids.
        is_target_BL: tokens that are masked and counted; all if None.
        num_draws: masked versions of each row.
        seed: of the grid.
        document_BL: document of each position; positions see only their own.
        batch_size: rows of one forward.

    Raises:
        ValueError: no target token at all.
    """
    tokens_BL = tokens_BL.cpu()
    targets_BL = torch.ones_like(tokens_BL, dtype=torch.bool) if is_target_BL is None else is_target_BL.bool().cpu()
    document_BL = None if document_BL is None else document_BL.cpu()
    sizes_B = targets_BL.sum(dim=1).numpy()
    if sizes_B.sum() == 0:
        raise ValueError("no target token: is_target_BL is false everywhere")
    rows = len(sizes_B)
    chance = generator(seed, GRID)
    offsets_B = (chance.permutation(rows) + chance.random(rows)) / rows
    sums_BK = np.zeros((rows, num_draws))
    bins = _FractionBins()

    for draw in range(num_draws):
        spread_B = ((draw + offsets_B) / num_draws * sizes_B).astype(np.int64) + 1
        counts_B = np.minimum(spread_B, np.maximum(sizes_B, 1))  # the offset may round up to 1
        masked_BL = choose_masked(targets_BL.numpy(), counts_B, (seed, GRID, draw))
        for first in range(0, rows, batch_size):
            some = slice(first, first + batch_size)
            batch = Batch(tokens_BL[some], targets_BL[some], None if document_BL is None else document_BL[some])
            nll_BL = masked_nll(model, batch, masked_BL[some])
            sums_BK[some, draw] = np.nansum(nll_BL, axis=1)
            bins.add(nll_BL, counts_B[some] / np.maximum(sizes_B[some], 1))
        sums_BK[:, draw] *= sizes_B / counts_B
    return _report(sums_BK, sizes_B, bins.means())


def choose_masked(
    eligible_BL: NDArray[np.bool_], counts_B: NDArray[np.int64], key: tuple[int, ...]
) -> NDArray[np.bool_]:
    """So many of each row's eligible positions, uniformly; keyed by (``key``, row)."""
    masked_BL = np.zeros_like(eligible_BL)
    for row, count in enumerate(counts_B):
        places = np.flatnonzero(eligible_BL[row])
        masked_BL[row, generator(*key, row).permutation(places)[:count]] = True
    return masked_BL


def masked_nll(model: Transformer, batch: Batch, masked_BL: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Negative log-likelihood in nats of the masked tokens given the others, [B, L]; NaN where not masked."""
    mask_token = model.config.mask_token_id
    draw = masked_draw(batch, masked_BL, masked_BL.astype(np.float32), mask_token).to(model.lm_head.weight.device)
    score = Score(draw.targets_R, draw.weights_R, excluded_token=mask_token)
    scored = model(draw.inputs_BL, pattern=draw.pattern, rows=draw.rows_R, score=score)
    nll_BL = np.full(masked_BL.shape, np.nan)
    nll_BL[masked_BL] = scored.nll_R.double().cpu().numpy()
    return nll_BL


class _FractionBins:
    """Mean cross-entropy of masked tokens by the share of the row that is masked."""

    def __init__(self) -> None:
        self.sums = np.zeros(NUM_FRACTION_BINS)
        self.counts = np.zeros(NUM_FRACTION_BINS)

    def add(self, nll_BL: NDArray[np.float64], fractions_B: NDArray[np.float64]) -> None:
        index_B = np.clip(np.ceil(fractions_B * NUM_FRACTION_BINS - 1e-9).astype(int) - 1, 0, NUM_FRACTION_BINS - 1)
        np.add.at(self.sums, index_B, np.nansum(nll_BL, axis=1))
        np.add.at(self.counts, index_B, (~np.isnan(nll_BL)).sum(axis=1))

    def means(self) -> tuple[tuple[float, float, float], ...]:
        return tuple(
            (index / NUM_FRACTION_BINS, (index + 1) / NUM_FRACTION_BINS, float(self.sums[index] / self.counts[index]))
            for index in range(NUM_FRACTION_BINS)
            if self.counts[index]
        )


def _report(
    sums_BK: NDArray[np.float64], sizes_B: NDArray[np.int64], curve: tuple[tuple[float, float, float], ...]
) -> NelboReport:
    """Ratio of sums; its error from the rows' residuals, since the strata within a row are not independent."""
    nats_B = sums_BK.mean(axis=1)
    total, tokens = float(nats_B.sum()), int(sizes_B.sum())
    mean, rows = total / tokens, len(sizes_B)
    residuals_B = nats_B - mean * sizes_B
    error = np.sqrt(rows / (rows - 1) * (residuals_B**2).sum()) / tokens if rows > 1 else np.inf
    return NelboReport(mean, float(error), tokens, total, curve)
