"""Likelihood of text under a model: bounds and exact values, with their standard errors.

Shapes: B rows, L tokens, U units of a row (the row, or its blocks), K draws, R scored outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.model import ModelConfig
from diffusionlm.diffusion.corruption import assign_noise_groups, choose_masked_in_groups, masked_counts_at_levels
from diffusionlm.diffusion.layout import InputLayout, target_positions
from diffusionlm.diffusion.noised_batch import CleanBatch
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.models.transformer import Transformer
from profiling import nvtx

NUM_FRACTION_BINS = 10


@dataclass(frozen=True)
class NelboReport:
    """A bound on the negative log-likelihood, and what it is made of."""

    nats_per_token: float
    """Mean over target tokens."""
    standard_error: float
    """Of `nats_per_token`, over draws and rows; infinite for a single row."""
    num_tokens: int
    """Target tokens, each counted once."""
    nats: float
    """Sum over target tokens."""
    by_masked_fraction: tuple[tuple[float, float, float], ...]
    """(low, high, mean cross-entropy in nats of a masked token) for shares of masked tokens in (low, high]; of the
    block's tokens, where there are blocks."""
    row_nats: tuple[float, ...]
    """The sum of each row."""


@dataclass(frozen=True)
class LikelihoodEstimate:
    """Log-likelihood of an answer after its prompt."""

    log_likelihood: float
    """Sum over the answer's tokens in nats, at most 0; minus the NELBO, or exact."""
    standard_error: float
    """Over draws; 0 where it is exact."""
    num_tokens: int
    """Tokens of the answer."""


@torch.no_grad()
def nelbo(
    model: Transformer,
    tokens_BL: Tensor,
    loss_mask_BL: Tensor | None = None,
    block_length: int | None = None,
    num_mc_samples: int = 4,
    seed: int = 0,
    *,
    document_BL: Tensor | None = None,
    batch_size: int = 32,
) -> NelboReport:
    """Negative evidence lower bound of masked or block diffusion, unbiased, by masked counts.

    Each unit (row or block) of n target tokens is masked ``num_mc_samples`` times; its counts k are spread evenly over
    1 ... n, the offsets over units and rows; an estimate is n / k times the sum of cross-entropies (Nie et al. 2025,
    eq. 6; Arriola et al. 2025, eq. 8). The grid depends on the seed and the rows' places alone, so two models are
    compared on the same draws. With blocks of one token the value is exact, and with shifted outputs it is that of the
    autoregressive model.

    Args:
        tokens_BL: clean token ids.
        loss_mask_BL: tokens that are masked and counted; all if None. A mask token in the data is never one, and with
            shifted outputs nor is the first token of a document.
        block_length: tokens of a block, counted from each document's start; None: bidirectional, the whole row. A
            document that is shorter is one block.
        num_mc_samples: masked versions of each row.
        seed: of the grid.
        document_BL: document of each position; positions see only their own.
        batch_size: rows of one forward.

    Raises:
        ValueError: no target token at all, ``num_mc_samples`` or ``block_length`` below 1, or a model without a mask token
            where one is needed.
    """
    forwards = NelboEstimator.of(
        model.config,
        tokens_BL,
        loss_mask_BL,
        block_length,
        num_mc_samples,
        seed,
        document_BL=document_BL,
        batch_size=batch_size,
    )
    return forwards.report([forwards.run(model, index) for index in range(forwards.count)])


@dataclass(frozen=True)
class NelboForwardSums:
    """What one forward adds to a bound; small."""

    sums_B: NDArray[np.float64]
    """Weighted cross-entropies of its rows, in nats."""
    bin_sums: NDArray[np.float64]
    bin_counts: NDArray[np.float64]


@dataclass(frozen=True)
class NelboEstimator:
    """The forwards that `nelbo` is made of, one by one: they may run anywhere and in any order."""

    layout: InputLayout
    batch: CleanBatch
    maskable_BL: NDArray[np.bool_]
    group_ids_BL: NDArray[np.int64]
    num_mc_samples: int
    seed: int
    batch_size: int

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        tokens_BL: Tensor,
        loss_mask_BL: Tensor | None,
        block_length: int | None,
        num_mc_samples: int,
        seed: int,
        *,
        document_BL: Tensor | None,
        batch_size: int,
    ) -> NelboEstimator:
        """Arguments and errors are those of `nelbo`; ``config`` is the model's."""
        for name, value in (
            ("num_mc_samples", num_mc_samples),
            ("block_length", block_length),
            ("batch_size", batch_size),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value} must be at least 1")
        tokens_BL = tokens_BL.cpu()
        targets_BL = torch.ones_like(tokens_BL, dtype=torch.bool) if loss_mask_BL is None else loss_mask_BL.bool().cpu()
        batch = CleanBatch(tokens_BL, targets_BL, None if document_BL is None else document_BL.cpu())
        layout = InputLayout.from_config(config, block_length)
        maskable_BL = layout.maskable(batch)
        if not maskable_BL.any():
            raise ValueError("no target token: loss_mask_BL is false wherever a token could be predicted")
        group_ids_BL = assign_noise_groups(batch, maskable_BL, "row" if block_length is None else "block", block_length)
        draws = 1 if block_length == 1 else num_mc_samples  # blocks of one token leave nothing to chance
        return cls(layout, batch, maskable_BL, group_ids_BL, draws, seed, batch_size)

    @property
    def count(self) -> int:
        """All batches of rows, for each draw."""
        return self.num_mc_samples * self._num_row_batches

    @torch.no_grad()
    def run(self, model: Transformer, index: int) -> NelboForwardSums:
        """One of them, from 0.

        Raises:
            ValueError: the model's own numbers are not.
        """
        some, draw = self._locate_forward(index)
        masked_BL, weights_BL, fractions_BL = _build_mask_grid(
            self.group_ids_BL, self.seed, draw, self.num_mc_samples, some
        )
        nll_BL = compute_masked_nll(model, self.layout, self.batch.select(some), masked_BL)
        return NelboForwardSums(np.nansum(nll_BL * weights_BL, axis=1), *_bin_by_masked_fraction(nll_BL, fractions_BL))

    def report(self, parts: Sequence[NelboForwardSums]) -> NelboReport:
        """The bound, of the parts in order."""
        sums_BK = np.zeros((len(self.group_ids_BL), self.num_mc_samples))
        bin_sums, bin_counts = np.zeros(NUM_FRACTION_BINS), np.zeros(NUM_FRACTION_BINS)
        for index, part in enumerate(parts):
            sums_BK[self._locate_forward(index)] = part.sums_B
            bin_sums += part.bin_sums
            bin_counts += part.bin_counts
        sizes_B, nats_B = self.maskable_BL.sum(axis=1), sums_BK.mean(axis=1)
        mean, error = ratio_with_standard_error(nats_B, sizes_B)
        curve = tuple(
            (index / NUM_FRACTION_BINS, (index + 1) / NUM_FRACTION_BINS, float(bin_sums[index] / bin_counts[index]))
            for index in range(NUM_FRACTION_BINS)
            if bin_counts[index]
        )
        return NelboReport(mean, error, int(sizes_B.sum()), float(nats_B.sum()), curve, tuple(nats_B.tolist()))

    @property
    def _num_row_batches(self) -> int:
        return -(-len(self.group_ids_BL) // self.batch_size)

    def _locate_forward(self, index: int) -> tuple[slice, int]:
        """Rows and draw of a forward."""
        draw, batch = divmod(index, self._num_row_batches)
        first = batch * self.batch_size
        return slice(first, first + self.batch_size), draw


def conditional_likelihood(
    model: Transformer,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    block_length: int | None = None,
    num_mc_samples: int = 128,
    seed: int = 0,
    batch_size: int = 32,
) -> LikelihoodEstimate:
    """Log-likelihood of an answer given a clean prompt: LLaDA's Monte-Carlo protocol (Nie et al. 2025, appendix B.5).

    Counts of masked answer tokens are spread over ``num_mc_samples`` copies of the row. The published code rounds its
    spread counts half to even, so that they are not uniform and its mean is off by tenths of a nat; here they are.
    One-token answers and blocks of one token are exact and take a single forward.

    Raises:
        ValueError: an empty answer, one with a token that the model cannot predict, or what `nelbo` raises.
    """
    if not answer:
        raise ValueError("an empty answer has no likelihood: give at least one token")
    if num_mc_samples < 1:
        raise ValueError(f"num_mc_samples = {num_mc_samples} must be at least 1")
    exact = len(answer) == 1 or block_length == 1
    copies = 1 if exact else num_mc_samples
    row = torch.tensor([*prompt, *answer])
    is_answer = torch.arange(len(row)) >= len(prompt)
    report = nelbo(
        model,
        row.repeat(copies, 1),
        is_answer.repeat(copies, 1),
        block_length,
        num_mc_samples=1,
        seed=seed,
        batch_size=batch_size,
    )
    tokens = report.num_tokens // copies
    if tokens < len(answer):
        raise ValueError(
            f"{len(answer) - tokens} of the answer's {len(answer)} tokens cannot be predicted: a mask token never is, "
            "and with shifted outputs nor is the first token of a text: give a prompt"
        )
    error = 0.0 if exact else report.standard_error * tokens
    return LikelihoodEstimate(-report.nats / copies, error, tokens)


def compute_masked_nll(
    model: Transformer, layout: InputLayout, batch: CleanBatch, masked_BL: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Negative log-likelihood in nats of the masked tokens given what the layout lets them see, [B, L]; NaN where not
    masked.

    Raises:
        ValueError: the model's own numbers are not.
    """
    ones_BL = np.ones(masked_BL.shape)
    draw = layout.build_noised_batch(batch, masked_BL, ones_BL, num_targets=0, denominator=0.0)
    places_R = target_positions(draw, layout.alignment).numpy()
    draw = draw.to(model.lm_head.weight.device)
    loss_inputs = LossInputs(draw.targets_N, draw.weights_N, excluded_token=layout.mask_token)
    with nvtx.range("likelihood: forward"):
        scored = model(draw.inputs_BS, pattern=draw.pattern, output_positions=draw.positions_N, loss_inputs=loss_inputs)
    nll_N = scored.nll_N.double().cpu().numpy()
    if np.isnan(nll_N).any():
        raise ValueError(
            "the model's probabilities are not finite: its weights may be damaged, or its numbers overflow in this "
            'dtype; try dtype = "float32"'
        )
    nll_BL = np.full(masked_BL.size, np.nan)
    nll_BL[places_R] = nll_N
    return nll_BL.reshape(masked_BL.shape)


def choose_masked_per_sequence(
    maskable_BL: NDArray[np.bool_], counts_B: NDArray[np.int64], seed: int, stream: RngStream, *key: int
) -> NDArray[np.bool_]:
    """So many of each row's eligible positions, uniformly; keyed by (``key``, row)."""
    masked_BL = np.zeros_like(maskable_BL)
    for row, count in enumerate(counts_B):
        places = np.flatnonzero(maskable_BL[row])
        masked_BL[row, keyed_rng(seed, stream, *key, row).permutation(places)[:count]] = True
    return masked_BL


def _build_mask_grid(
    group_ids_BL: NDArray[np.int64], seed: int, draw: int, draws: int, some: slice
) -> tuple[NDArray[np.bool_], NDArray[np.float64], NDArray[np.float64]]:
    """Masked positions, weights n / k, and masked shares k / n of the units, of some rows of one draw of the grid; each
    [B, L] of those rows."""
    rows = len(group_ids_BL)
    rng = keyed_rng(seed, RngStream.LIKELIHOOD_LEVELS)
    offsets_B = (rng.permutation(rows) + rng.random(rows)) / rows
    shape = group_ids_BL[some].shape
    masked_BL, weights_BL, fractions_BL = np.zeros(shape, dtype=np.bool_), np.zeros(shape), np.zeros(shape)
    for own, row in enumerate(range(rows)[some]):
        places = np.flatnonzero(group_ids_BL[row] >= 0)
        if len(places) == 0:
            continue
        group_ids = group_ids_BL[row, places]
        group_sizes_G = np.bincount(group_ids)
        order_U = keyed_rng(seed, RngStream.LIKELIHOOD_LEVELS, row).permutation(len(group_sizes_G))
        levels_U = ((order_U + offsets_B[row]) / len(group_sizes_G) + draw / draws) % 1.0
        counts_G = masked_counts_at_levels(levels_U, group_sizes_G)
        masked_BL[own, places] = choose_masked_in_groups(
            group_ids, counts_G, keyed_rng(seed, RngStream.LIKELIHOOD_MASKS, draw, row)
        )
        weights_BL[own, places] = (group_sizes_G / counts_G)[group_ids]
        fractions_BL[own, places] = (counts_G / group_sizes_G)[group_ids]
    return masked_BL, weights_BL, fractions_BL


def _bin_by_masked_fraction(
    nll_BL: NDArray[np.float64], fractions_BL: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sums of cross-entropies of masked tokens, and their counts, by the share of their unit that is masked."""
    scored = ~np.isnan(nll_BL)
    index = np.ceil(fractions_BL[scored] * NUM_FRACTION_BINS - 1e-9).astype(int) - 1
    index = np.clip(index, 0, NUM_FRACTION_BINS - 1)
    sums, counts = np.zeros(NUM_FRACTION_BINS), np.zeros(NUM_FRACTION_BINS)
    np.add.at(sums, index, nll_BL[scored])
    np.add.at(counts, index, 1)
    return sums, counts


def ratio_with_standard_error(sums_B: NDArray[np.float64], sizes_B: NDArray[np.int64]) -> tuple[float, float]:
    """Ratio of sums over rows, and its standard error from the rows' residuals, since what is within a row is not
    independent; infinite for a single row."""
    total, rows = int(sizes_B.sum()), len(sizes_B)
    mean = float(sums_B.sum()) / total
    residuals_B = sums_B - mean * sizes_B
    error = np.sqrt(rows / (rows - 1) * (residuals_B**2).sum()) / total if rows > 1 else np.inf
    return mean, float(error)
