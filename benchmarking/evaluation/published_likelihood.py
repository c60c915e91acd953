"""Likelihoods of answers as published evaluations estimate them: one answer at a time, rows that are masked at random.

Shapes: B rows, n answer tokens, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.diffusion.noised_batch import CleanBatch
from diffusionlm.evaluation.nelbo import compute_masked_nll
from diffusionlm.models.transformer import Transformer

Masks = tuple[NDArray[np.bool_], NDArray[np.float64]]
"""Masked answer tokens and their weights, each [B, n]."""
DrawMasks = Callable[[int, int, np.random.Generator], Masks]
"""(answer tokens, rows, random numbers) -> masks; the sum over a row estimates the bound."""

EPSILON = 1e-3


def draw_bernoulli_masks(num_tokens: int, num_rows: int, rng: np.random.Generator) -> Masks:
    """Dream: evenly spaced times with one offset; a token is masked with rate p = (1 - eps) t + eps, weight 1 / p."""
    times_B1 = ((rng.random() + np.arange(num_rows) / num_rows) % 1.0)[:, None]
    rates_B1 = (1.0 - EPSILON) * times_B1 + EPSILON
    is_masked_Bn = rng.random((num_rows, num_tokens)) < rates_B1
    return is_masked_Bn, is_masked_Bn / rates_B1


def draw_count_masks(num_tokens: int, num_rows: int, rng: np.random.Generator) -> Masks:
    """LLaDA: evenly spaced counts k of masked tokens, weight n / k; without the rounding that biases its code."""
    counts_B1 = ((rng.random() + np.arange(num_rows) / num_rows) % 1.0 * num_tokens).astype(np.int64)[:, None] + 1
    ranks_Bn = rng.random((num_rows, num_tokens)).argsort(axis=1).argsort(axis=1)
    is_masked_Bn = ranks_Bn < counts_B1
    return is_masked_Bn, is_masked_Bn * num_tokens / counts_B1


def draw_complementary_masks(num_tokens: int, num_rows: int, rng: np.random.Generator) -> Masks:
    """Pairs of a mask and its complement: k uniform on 0 ... n, weights (n + 1) / (2 k) and (n + 1) / (2 (n - k))."""
    num_pairs = num_rows // 2
    counts_P1 = ((rng.random() + np.arange(num_pairs) / num_pairs) % 1.0 * (num_tokens + 1)).astype(np.int64)[:, None]
    ranks_Pn = rng.random((num_pairs, num_tokens)).argsort(axis=1).argsort(axis=1)
    is_masked_Bn = np.concatenate([ranks_Pn < counts_P1, ranks_Pn >= counts_P1])
    sizes_B1 = np.concatenate([counts_P1, num_tokens - counts_P1])
    # The mean over rows is the estimate: each row of a pair counts half in it.
    return is_masked_Bn, is_masked_Bn * (num_tokens + 1) / np.maximum(sizes_B1, 1)


DRAWS: dict[str, DrawMasks] = {
    "Bernoulli masks": draw_bernoulli_masks,
    "counts": draw_count_masks,
    "complementary pairs": draw_complementary_masks,
}


def estimate_answer(
    model: Transformer,
    layout: InputLayout,
    context: Sequence[int],
    answer: Sequence[int],
    draw_masks: DrawMasks,
    rng: np.random.Generator,
    *,
    num_rows: int = 128,
    batch_size: int = 32,
) -> float:
    """Log-likelihood of an answer by ``num_rows`` masked rows; blocks are masked independently."""
    is_masked_Bn, weights_Bn = np.zeros((num_rows, len(answer)), dtype=np.bool_), np.zeros((num_rows, len(answer)))
    start, size = 0, layout.block_length or len(context) + len(answer)
    while start < len(answer):
        end = min(len(answer), start + size - (len(context) + start) % size)
        is_masked_Bn[:, start:end], weights_Bn[:, start:end] = draw_masks(end - start, num_rows, rng)
        start = end
    row_L = torch.tensor([*context, *answer])
    is_answer_L = torch.arange(len(row_L)) >= len(context)
    total = 0.0
    for first in range(0, num_rows, batch_size):
        masked_Bn = is_masked_Bn[first : first + batch_size]
        masked_BL = np.concatenate([np.zeros((len(masked_Bn), len(context)), dtype=np.bool_), masked_Bn], axis=1)
        batch = CleanBatch(row_L.repeat(len(masked_Bn), 1), is_answer_L.repeat(len(masked_Bn), 1))
        nll_BL = compute_masked_nll(model, layout, batch, masked_BL)
        total -= float(np.nansum(nll_BL[:, len(context) :] * weights_Bn[first : first + batch_size]))
    return total / num_rows
