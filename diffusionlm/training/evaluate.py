"""What a trained model is worth: the bound, how well it fills holes, and the company it keeps.

Shapes: B rows, L positions, V vocabulary, R masked positions.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diffusionlm.data.loader import batch_of
from diffusionlm.data.packing import Row
from diffusionlm.diffusion.batch import Batch
from diffusionlm.diffusion.corruption import masked_draw
from diffusionlm.diffusion.likelihood import choose_masked, nelbo
from diffusionlm.models.transformer import Transformer
from tokenizer import Tokenizer

FILL = 3
"""Stream of keyed chance of the fill test."""

FILL_FRACTIONS = (0.15, 0.50)


@dataclass(frozen=True)
class Fill:
    """Held-out tokens guessed right, as shares of the masked ones."""

    fraction: float
    """Share of each row that is masked."""
    first_guess: float
    first_five: float
    commonest: float | None
    """Share of the masked tokens that are the commonest training token: what guessing it always would get."""


@dataclass(frozen=True)
class Evaluation:
    """The table at the end of a run."""

    nats_per_token: float
    standard_error: float
    bits_per_byte: float
    bits_per_byte_standard_error: float
    unigram_entropy: float
    """Of the validation tokens themselves, in nats per token."""
    num_tokens: int
    num_bytes: int
    by_masked_fraction: tuple[tuple[float, float, float], ...]
    fills: tuple[Fill, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, for files."""
        return asdict(self)


def evaluate(
    model: Transformer,
    tokenizer: Tokenizer,
    rows: list[Row],
    *,
    draws: int,
    batch_size: int,
    commonest: int | None = None,
) -> Evaluation:
    """The evaluation of validation rows on a fixed grid of draws.

    Args:
        rows: validation rows; padding is not counted.
        draws: masked versions of each row.
        batch_size: rows of one forward.
        commonest: the commonest training token, where it is known.
    """
    batch = batch_of(rows)
    report = nelbo(
        model,
        batch.tokens_BL,
        batch.is_target_BL,
        num_draws=draws,
        document_BL=batch.document_BL,
        batch_size=batch_size,
    )
    tokens = batch.tokens_BL[batch.is_target_BL].numpy()
    num_bytes = max(1, tokenizer.num_bytes(tokens))
    bits_per_nat_per_token = report.num_tokens / num_bytes / math.log(2)
    return Evaluation(
        nats_per_token=report.nats_per_token,
        standard_error=report.standard_error,
        bits_per_byte=report.nats_per_token * bits_per_nat_per_token,
        bits_per_byte_standard_error=report.standard_error * bits_per_nat_per_token,
        unigram_entropy=entropy(np.bincount(tokens)),
        num_tokens=report.num_tokens,
        num_bytes=num_bytes,
        by_masked_fraction=report.by_masked_fraction,
        fills=tuple(fill_accuracy(model, batch, fraction, batch_size, commonest) for fraction in FILL_FRACTIONS),
    )


def entropy(counts: NDArray[np.int64]) -> float:
    """Entropy in nats of the distribution with these counts."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@torch.no_grad()
def fill_accuracy(model: Transformer, batch: Batch, fraction: float, batch_size: int, commonest: int | None) -> Fill:
    """Mask a share of each row's tokens, once; count how many come back at the first and in the first five guesses."""
    eligible_BL = batch.is_target_BL.numpy()
    counts_B = np.ceil(fraction * eligible_BL.sum(axis=1)).astype(np.int64)
    masked_BL = choose_masked(eligible_BL, counts_B, (0, FILL, round(1000 * fraction)))
    mask_token = model.config.mask_token_id
    right, among, common, total = 0, 0, 0, 0
    for first in range(0, len(eligible_BL), batch_size):
        some = slice(first, first + batch_size)
        part = Batch(batch.tokens_BL[some], batch.is_target_BL[some], _slice(batch.document_BL, some))
        draw = masked_draw(part, masked_BL[some], masked_BL[some].astype(np.float32), mask_token)
        draw = draw.to(model.lm_head.weight.device)
        logits_RV = model(draw.inputs_BL, pattern=draw.pattern, rows=draw.rows_R).float()
        logits_RV[:, mask_token] = float("-inf")
        hits_R5 = logits_RV.topk(min(5, logits_RV.shape[1]), dim=1).indices == draw.targets_R[:, None]
        right += int(hits_R5[:, 0].sum())
        among += int(hits_R5.sum())
        common += 0 if commonest is None else int((draw.targets_R == commonest).sum())
        total += len(draw.targets_R)
    return Fill(fraction, right / total, among / total, None if commonest is None else common / total)


def _slice(tensor: torch.Tensor | None, some: slice) -> torch.Tensor | None:
    return None if tensor is None else tensor[some]
