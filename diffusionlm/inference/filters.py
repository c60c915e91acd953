"""From logits to a token: temperature, top-k, top-p, and the choice itself. Pure functions, row by row.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def divide_by_temperature(logits_RV: Tensor, temperature: float) -> Tensor:
    """Logits of the tempered distribution; temperature > 0, however small."""
    # The best token is moved to 0 first, where a tiny divisor cannot make it overflow.
    return (logits_RV - logits_RV.amax(dim=1, keepdim=True)) / temperature


def keep_top_k(logits_RV: Tensor, top_k: int) -> Tensor:
    """-inf for all but the k highest logits: exactly k of them, the lowest ids among equals."""
    _, order_RV = logits_RV.sort(dim=1, descending=True, stable=True)
    return logits_RV.scatter(1, order_RV[:, top_k:], float("-inf"))


def keep_top_p(logits_RV: Tensor, top_p: float) -> Tensor:
    """-inf for all but the nucleus: the fewest most probable tokens whose probability together is at least p.

    The token that crosses p belongs to it, so that it is never empty (Holtzman et al. 2019). Among equals the lowest
    ids come first.
    """
    sorted_RV, order_RV = logits_RV.sort(dim=1, descending=True, stable=True)
    probs_RV = sorted_RV.softmax(dim=1)
    before_RV = probs_RV.cumsum(dim=1) - probs_RV
    outside_RV = (before_RV >= top_p).scatter(1, order_RV, before_RV >= top_p)
    return logits_RV.masked_fill(outside_RV, float("-inf"))


def filter_logits(logits_RV: Tensor, *, temperature: float, top_k: int | None, top_p: float) -> Tensor:
    """Temperature, then top-k, then top-p of what is left (Hugging Face's order). Temperature 0 counts as 1 here.

    The logits themselves come back where nothing is to be done.
    """
    if temperature not in (0.0, 1.0):
        logits_RV = divide_by_temperature(logits_RV, temperature)
    if top_k is not None:
        logits_RV = keep_top_k(logits_RV, top_k)
    return keep_top_p(logits_RV, top_p) if top_p < 1.0 else logits_RV


def choose_tokens(probs_RV: Tensor, uniforms_R: Tensor | None) -> Tensor:
    """One token a row: the most probable one (lowest id among equals), or a sample by the inverse of the distribution.

    Args:
        probs_RV: probabilities; they need not sum to exactly 1.
        uniforms_R: a number in [0, 1) for each row; None: no sampling.

    Returns:
        token ids [R]; a token of probability zero is never sampled.
    """
    if uniforms_R is None:
        return probs_RV.argmax(dim=1)
    cumulative_RV = probs_RV.cumsum(dim=1)
    reached_RV = cumulative_RV > uniforms_R[:, None] * cumulative_RV[:, -1:]
    # argmax gives the first of equals.
    return (reached_RV & (probs_RV > 0.0)).to(torch.uint8).argmax(dim=1)
