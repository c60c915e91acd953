"""Evaluate a model on held-out rows: likelihood bound, bits per byte, mask-filling accuracy.

Shapes: B rows, L tokens of a row, N masked positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ddp.map_over_ranks import SINGLE_PROCESS_MAP, MapOverRanks
from diffusionlm.data.loader import collate_rows
from diffusionlm.data.packing import Row
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.diffusion.noised_batch import CleanBatch
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.evaluation.nelbo import NelboEstimator
from diffusionlm.evaluation.statistics import MAX_LOGITS_BYTES, bits_per_byte, count_row_bytes, entropy
from diffusionlm.models.transformer import Transformer
from profiling import nvtx
from tokenizer import Tokenizer

FILL_FRACTIONS = (0.15, 0.50)
"""Masked fractions at which mask-filling accuracy is measured."""
VALIDATION_SEED = 0
"""Rows and masks of a validation do not depend on the run's seed, so that runs compare."""


@dataclass(frozen=True)
class FillAccuracy:
    """Accuracy on masked held-out tokens, as shares of the masked tokens."""

    fraction: float
    """Fraction of each row's tokens that is masked."""
    top1_accuracy: float
    top5_accuracy: float
    majority_baseline: float | None
    """Accuracy of always predicting the most frequent training token."""


@dataclass(frozen=True)
class EvaluationResult:
    """Result of `evaluate`; the fields are keys of summary.json."""

    nats_per_token: float
    standard_error: float
    bits_per_byte: float
    bits_per_byte_standard_error: float
    unigram_entropy: float
    """Entropy of the validation tokens' own frequencies, in nats per token."""
    num_tokens: int
    num_bytes: int
    by_masked_fraction: tuple[tuple[float, float, float], ...]
    """See `NelboReport`."""
    fills: tuple[FillAccuracy, ...]
    """Empty unless the evaluation is bidirectional."""
    block_length: int | None
    """Block length of block diffusion; 1: exact, token by token. None: bidirectional."""
    num_rows: int
    eos_padding_nats_per_token: float | None = None
    """Bound of the EOS padding after an answer, which no other number counts; None: there are
    none."""


def evaluate(
    model: Transformer,
    tokenizer: Tokenizer,
    rows: list[Row],
    *,
    num_mc_samples: int,
    batch_size: int,
    layout: InputLayout | None = None,
    majority_token: int | None = None,
    map_forwards: MapOverRanks = SINGLE_PROCESS_MAP,
) -> EvaluationResult:
    """Evaluate rows on a fixed grid of masks.

    Args:
        rows: validation rows; padding and prompts are not counted.
        num_mc_samples: masked versions of each row.
        batch_size: rows per forward.
        layout: of the forwards. None: bidirectional. Without blocks the result includes mask-filling accuracy.
        majority_token: the most frequent training token, if known.
        map_forwards: shares the forwards among the ranks.

    Raises:
        ValueError: no token can be scored, or the model's probabilities are not finite.
    """
    batch = collate_rows(rows)
    layout = layout or InputLayout.from_config(model.config, None)
    estimator = NelboEstimator.from_batch(layout, batch, num_mc_samples, VALIDATION_SEED, batch_size)
    report = estimator.build_report(
        map_forwards(estimator.num_forwards, lambda index: estimator.run_forward(model, index))
    )
    tokens = batch.tokens_BL.numpy()[estimator.is_scored_BL]
    bytes_B = count_row_bytes(tokenizer, batch.tokens_BL.numpy(), estimator.is_scored_BL)
    bits, bits_error = bits_per_byte(report.row_nats, bytes_B)
    fills = [
        measure_fill_accuracy(model, layout, batch, fraction, batch_size, majority_token, map_forwards)
        for fraction in FILL_FRACTIONS
        if layout.block_length is None
    ]
    return EvaluationResult(
        nats_per_token=report.nats_per_token,
        standard_error=report.standard_error,
        bits_per_byte=bits,
        bits_per_byte_standard_error=bits_error,
        unigram_entropy=entropy(np.bincount(tokens)),
        num_tokens=report.num_tokens,
        num_bytes=int(bytes_B.sum()),
        by_masked_fraction=report.by_masked_fraction,
        fills=tuple(fills),
        block_length=layout.block_length,
        num_rows=len(rows),
        eos_padding_nats_per_token=report.eos_padding_nats_per_token,
    )


@torch.no_grad()
def measure_fill_accuracy(
    model: Transformer,
    layout: InputLayout,
    batch: CleanBatch,
    fraction: float,
    batch_size: int,
    majority_token: int | None,
    map_forwards: MapOverRanks = SINGLE_PROCESS_MAP,
) -> FillAccuracy:
    """Mask a fraction of each row's tokens once, and measure top-1 and top-5 accuracy on them. Padding stays visible.

    Args:
        batch_size: rows per forward; fewer if their logits exceed `MAX_LOGITS_BYTES`.
    """
    maskable_BL = layout.maskable(batch)
    if batch.is_eos_padding_BL is not None:
        maskable_BL = maskable_BL & ~batch.is_eos_padding_BL.numpy()
    counts_B = np.ceil(fraction * maskable_BL.sum(axis=1)).astype(np.int64)
    masked_BL = np.zeros_like(maskable_BL)
    for row, count in enumerate(counts_B):
        rng = keyed_rng(VALIDATION_SEED, RngStream.FILL_MASKS, round(1000 * fraction), row)
        masked_BL[row, rng.permutation(np.flatnonzero(maskable_BL[row]))[:count]] = True
    row_bytes = 4 * model.config.vocab_size * max(1, int(counts_B.max(initial=0)))
    batch_size = max(1, min(batch_size, MAX_LOGITS_BYTES // row_bytes))

    def count_hits(index: int) -> tuple[int, int, int, int]:
        """Numbers of top-1 hits, top-5 hits, majority tokens and masked tokens in one batch of rows."""
        rows = slice(index * batch_size, (index + 1) * batch_size)
        noised = layout.build_noised_batch(batch.select(rows), masked_BL[rows], np.ones(masked_BL[rows].shape)).to(
            model.lm_head.weight.device
        )
        with nvtx.annotate("filling: forward"):
            logits_NV = model(noised.inputs_BS, pattern=noised.pattern, output_positions=noised.positions_N).float()
        logits_NV[:, model.config.required_mask_token_id] = float("-inf")
        is_hit_N5 = logits_NV.topk(min(5, logits_NV.shape[1]), dim=1).indices == noised.targets_N[:, None]
        num_majority = 0 if majority_token is None else int((noised.targets_N == majority_token).sum())
        return int(is_hit_N5[:, 0].sum()), int(is_hit_N5.sum()), num_majority, len(noised.targets_N)

    counts = map_forwards(-(-len(maskable_BL) // batch_size), count_hits)
    top1, top5, majority, total = (sum(column) for column in zip(*counts, strict=True))
    return FillAccuracy(fraction, top1 / total, top5 / total, None if majority_token is None else majority / total)
