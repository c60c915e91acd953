"""Likelihood of text under a model: the NELBO, which is exact for blocks of one token, with standard errors.

Shapes: B rows, L tokens, G noise groups of a row (the row itself, or its blocks), K Monte Carlo samples, N masked
positions, F bins of the masked fraction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionlm.diffusion.corruption import assign_noise_groups, choose_masked_in_groups, masked_counts_at_levels
from diffusionlm.diffusion.layout import InputLayout, target_positions
from diffusionlm.diffusion.noised_batch import CleanBatch
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.diffusion.segments import NoiseSequences, segment_starts
from diffusionlm.evaluation.likelihood.masks import count_masks, enumerate_masks
from diffusionlm.evaluation.statistics import LikelihoodReport, check_positive
from diffusionlm.inference.sampling.distributions import check_finite
from diffusionlm.kernels.cross_entropy import LossInputs
from diffusionlm.models.transformer import Transformer
from profiling import nvtx

NUM_FRACTION_BINS = 10


@dataclass(frozen=True, kw_only=True)
class NelboReport(LikelihoodReport):
    """An upper bound on the negative log-likelihood of text, in nats, of target tokens without EOS padding."""

    by_masked_fraction: tuple[tuple[float, float, float], ...]
    """(low, high, mean cross-entropy of a masked token) for each bin (low, high] of the masked fraction of a noise
    group: of the block in block diffusion, else of the row."""
    eos_padding_nats_per_token: float | None = None
    """Mean over the EOS padding after answers; no other number counts them. None: there are none."""
    num_eos_padding_tokens: int = 0


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
    """Estimate the negative evidence lower bound of masked or block diffusion without bias.

    Each noise group (a row or block) of n target tokens is masked ``num_mc_samples`` times. The counts k of masked
    tokens are spread evenly over 1 ... n, with offsets that are spread over groups and rows. An estimate is n / k times
    the sum of cross-entropies (Nie et al. 2025, eq. 6; Arriola et al. 2025, eq. 8). The masks depend only on the seed
    and the row's index, so that models are compared on the same masks.

    If no group has more masks than ``num_mc_samples``, all masks are enumerated instead, and the bound has no sampling
    error: blocks of 4 tokens take 15 forwards, blocks of one token one. The latter is the exact negative
    log-likelihood, with shifted outputs that of an autoregressive model.

    Args:
        tokens_BL: clean token ids.
        loss_mask_BL: target tokens, which are masked and counted; None: all. A mask token in the data is never a
            target, and with shifted outputs neither is the first token of a document.
        block_length: tokens per block, counted from each document's start; a shorter document is one block. None:
            bidirectional, the whole row.
        num_mc_samples: masked versions of each row, at most.
        seed: of the masks.
        document_BL: document id of each position; a position attends to its own document only.
        batch_size: rows per forward.

    Raises:
        ValueError: there is no target token, an argument is below 1, the model needs a mask token and has none, or its
            probabilities are not finite.
    """
    tokens_BL = tokens_BL.cpu()
    targets_BL = torch.ones_like(tokens_BL, dtype=torch.bool) if loss_mask_BL is None else loss_mask_BL.bool().cpu()
    batch = CleanBatch(tokens_BL, targets_BL, None if document_BL is None else document_BL.cpu())
    check_positive(block_length=block_length)
    layout = InputLayout.from_config(model.config, block_length)
    estimator = NelboEstimator(layout, batch, num_mc_samples, seed, batch_size)
    return estimator.build_report([estimator.run_forward(model, index) for index in range(estimator.num_forwards)])


@dataclass(frozen=True)
class NelboForwardSums:
    """Contribution of one forward to a `NelboReport`."""

    sums_B: NDArray[np.float64]
    """Weighted sum of cross-entropies of each row without EOS padding, in nats."""
    eos_padding_sum: float
    """The same of the EOS padding of all rows."""
    bins_2F: NDArray[np.float64]
    """Sums and counts of the masked tokens' cross-entropies in each bin of the masked fraction."""


class NelboEstimator:
    """The forwards of `nelbo`. They are independent, so they may run on any rank and in any order."""

    def __init__(self, layout: InputLayout, batch: CleanBatch, num_mc_samples: int, seed: int, batch_size: int) -> None:
        """Plan the forwards for a batch on the CPU. The arguments and errors are those of `nelbo`."""
        check_positive(num_mc_samples=num_mc_samples, batch_size=batch_size)
        self.layout, self.batch, self.seed, self.batch_size = layout, batch, seed, batch_size
        self.maskable_BL = layout.maskable(batch)
        if not self.maskable_BL.any():
            raise ValueError("no target token: loss_mask_BL is false at all positions that can be predicted")
        self.is_eos_padding_BL = np.zeros_like(self.maskable_BL)
        if batch.is_eos_padding_BL is not None:
            self.is_eos_padding_BL = self.maskable_BL & batch.is_eos_padding_BL.numpy()
        self.is_scored_BL = self.maskable_BL & ~self.is_eos_padding_BL
        """Target tokens without EOS padding, which `NelboReport.nats_per_token` is over."""
        if not self.is_scored_BL.any():
            raise ValueError("no answer token: all target tokens are EOS padding")
        groups_QM = _assign_groups(layout, batch, NoiseSequences.from_batch(batch))
        num_masks = count_masks(max(int(np.bincount(ids_M[ids_M >= 0]).max(initial=0)) for ids_M in groups_QM))
        self.is_enumerated = num_masks <= num_mc_samples
        """A sample is a mask of each noise group, and all masks are among the samples."""
        self.num_mc_samples = num_masks if self.is_enumerated else num_mc_samples
        counts = [1] * len(batch.tokens_BL)
        if batch.segment_BL is not None:
            counts = [len(segment_starts(segments_L)) for segments_L in batch.segment_BL.numpy()]
        self.first_sequences = np.cumsum([0, *counts])
        """First noise sequence of each row, and the number of all, [B + 1]: a row has one, or one for each segment."""
        self._num_row_batches = -(-len(self.maskable_BL) // batch_size)
        self.num_forwards = self.num_mc_samples * self._num_row_batches
        """Every batch of rows once for each Monte Carlo sample."""

    @torch.no_grad()
    def run_forward(self, model: Transformer, index: int) -> NelboForwardSums:
        """Run forward ``index`` of 0 ... `num_forwards` - 1."""
        rows, sample = self._locate_forward(index)
        batch = self.batch.select(rows)
        masked_BL, weights_BL, fractions_BL = self._build_masks(batch, rows.start, sample)
        nll_BL = compute_masked_nll(model, self.layout, batch, masked_BL)
        nats_BL = np.nan_to_num(nll_BL * weights_BL)
        is_eos_padding_BL = self.is_eos_padding_BL[rows]
        bins_2F = _bin_by_masked_fraction(np.where(is_eos_padding_BL, np.nan, nll_BL), fractions_BL)
        return NelboForwardSums(
            np.where(is_eos_padding_BL, 0.0, nats_BL).sum(axis=1), float(nats_BL[is_eos_padding_BL].sum()), bins_2F
        )

    def _build_masks(
        self, batch: CleanBatch, first_row: int, sample: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.float64], NDArray[np.float64]]:
        """Masks, weights and masked fractions of some rows, each [B, L]; segments get those of separate rows."""
        sequences = NoiseSequences.from_batch(batch)
        group_ids_QM = _assign_groups(self.layout, batch, sequences)
        shape, first = group_ids_QM.shape, int(self.first_sequences[first_row])
        masked_QM, weights_QM, fractions_QM = np.zeros(shape, dtype=np.bool_), np.zeros(shape), np.zeros(shape)
        choose = self._enumerate_mask if self.is_enumerated else self._draw_mask
        for index, ids_M in enumerate(group_ids_QM):
            positions = np.flatnonzero(ids_M >= 0)
            if len(positions):
                group_ids, sizes_G = ids_M[positions], np.bincount(ids_M[positions])
                masked_P, weights_P = choose(group_ids, sizes_G, sample, first + index)
                counts_G = np.bincount(group_ids[masked_P], minlength=len(sizes_G))
                masked_QM[index, positions], weights_QM[index, positions] = masked_P, weights_P
                fractions_QM[index, positions] = (counts_G / sizes_G)[group_ids]
        return sequences.scatter(masked_QM), sequences.scatter(weights_QM), sequences.scatter(fractions_QM)

    @cached_property
    def _level_offsets(self) -> NDArray[np.float64]:
        """Offset of the levels of each noise sequence, one in each stratum of [0, 1)."""
        total, rng = int(self.first_sequences[-1]), keyed_rng(self.seed, RngStream.LIKELIHOOD_LEVELS)
        offsets: NDArray[np.float64] = (rng.permutation(total) + rng.random(total)) / total
        return offsets

    def _draw_mask(
        self, group_ids: NDArray[np.int64], sizes_G: NDArray[np.int64], sample: int, sequence: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """A mask of the target tokens of a sequence, and the weights n / k of its noise groups."""
        order_G = keyed_rng(self.seed, RngStream.LIKELIHOOD_LEVELS, sequence).permutation(len(sizes_G))
        levels_G = (order_G + self._level_offsets[sequence]) / len(sizes_G) + sample / self.num_mc_samples
        counts_G = masked_counts_at_levels(levels_G % 1.0, sizes_G)
        rng = keyed_rng(self.seed, RngStream.LIKELIHOOD_MASKS, sample, sequence)
        return choose_masked_in_groups(group_ids, counts_G, rng), (sizes_G / counts_G)[group_ids]

    def _enumerate_mask(
        self, group_ids: NDArray[np.int64], sizes_G: NDArray[np.int64], sample: int, sequence: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """Mask number ``sample`` of each noise group, with weights for the mean over all samples. A group with fewer
        masks is not masked in the samples after its last one."""
        is_masked, weights = [], []
        for size in sizes_G.tolist():
            masks, is_left = enumerate_masks(size), sample < count_masks(size)
            is_masked.append(masks.is_masked_Cn[sample] if is_left else np.zeros(size, dtype=np.bool_))
            weights.append(self.num_mc_samples * masks.weights_Cn[sample] if is_left else np.zeros(size))
        return np.concatenate(is_masked), np.concatenate(weights)

    def build_report(self, forward_sums: Sequence[NelboForwardSums]) -> NelboReport:
        sums_BK = np.zeros((len(self.maskable_BL), self.num_mc_samples))
        for index, sums in enumerate(forward_sums):
            sums_BK[self._locate_forward(index)] = sums.sums_B
        bins_2F = np.sum([sums.bins_2F for sums in forward_sums], axis=0)
        num_eos_padding_tokens = int(self.is_eos_padding_BL.sum())
        eos_padding_nats = sum(sums.eos_padding_sum for sums in forward_sums) / self.num_mc_samples
        curve = tuple(
            (index / NUM_FRACTION_BINS, (index + 1) / NUM_FRACTION_BINS, float(total / count))
            for index, (total, count) in enumerate(bins_2F.T)
            if count
        )
        return NelboReport.from_rows(
            sums_BK.mean(axis=1),
            self.is_scored_BL.sum(axis=1),
            by_masked_fraction=curve,
            eos_padding_nats_per_token=eos_padding_nats / num_eos_padding_tokens if num_eos_padding_tokens else None,
            num_eos_padding_tokens=num_eos_padding_tokens,
        )

    def _locate_forward(self, index: int) -> tuple[slice, int]:
        """Rows and Monte Carlo sample of a forward."""
        sample, row_batch = divmod(index, self._num_row_batches)
        start = row_batch * self.batch_size
        return slice(start, start + self.batch_size), sample


def compute_masked_nll(
    model: Transformer, layout: InputLayout, batch: CleanBatch, masked_BL: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Negative log-likelihood in nats of each masked token given what the layout shows it, [B, L]; NaN if not masked.

    Raises:
        ValueError: the model's probabilities are not finite.
    """
    nll_BL = np.full(masked_BL.size, np.nan)
    if not masked_BL.any():
        return nll_BL.reshape(masked_BL.shape)
    noised = layout.build_noised_batch(batch, masked_BL, np.ones(masked_BL.shape))
    target_positions_N = target_positions(noised, layout.alignment).numpy()
    noised = noised.to(model.lm_head.weight.device)
    loss_inputs = LossInputs(noised.targets_N, noised.weights_N, excluded_token=layout.mask_token)
    with nvtx.annotate("likelihood: forward"):
        nll_N = noised.run(model, loss_inputs=loss_inputs).nll_N.double().cpu().numpy()
    check_finite(~np.isnan(nll_N))
    nll_BL[target_positions_N] = nll_N
    return nll_BL.reshape(masked_BL.shape)


def _assign_groups(layout: InputLayout, batch: CleanBatch, sequences: NoiseSequences) -> NDArray[np.int64]:
    """Noise group of each target token of each sequence, -1 for other tokens, [Q, M]."""
    return assign_noise_groups(
        layout.split_for_noise(sequences.batch),
        sequences.gather(layout.maskable(batch)),
        "row" if layout.block_length is None else "block",
        layout.block_length,
    )


def _bin_by_masked_fraction(nll_BL: NDArray[np.float64], fractions_BL: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums of the masked tokens' cross-entropies, and their counts, by bin of the masked fraction, [2, F]."""
    is_scored_BL = ~np.isnan(nll_BL)
    bins_N = np.ceil(fractions_BL[is_scored_BL] * NUM_FRACTION_BINS - 1e-9).astype(int) - 1
    bins_N = np.clip(bins_N, 0, NUM_FRACTION_BINS - 1)
    weights = (nll_BL[is_scored_BL], np.ones(len(bins_N)))
    return np.stack([np.bincount(bins_N, values_N, NUM_FRACTION_BINS) for values_N in weights])
