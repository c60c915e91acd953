"""From logits to a token: temperature, top-k, top-p, and the choice itself. Pure functions, row by row.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

CANDIDATES = 1024
"""Most probable tokens that are sorted first; a nucleus is seldom larger."""


def divide_by_temperature(logits_RV: Tensor, temperature: float) -> Tensor:
    """Logits of the tempered distribution; temperature > 0, however small."""
    # The best token is moved to 0 first, where a tiny divisor cannot make it overflow.
    return (logits_RV - logits_RV.amax(dim=1, keepdim=True)) / temperature


def keep_top_k(logits_RV: Tensor, top_k: int) -> Tensor:
    """-inf for all but the k highest logits: exactly k of them, the lowest ids among equals."""
    if top_k >= logits_RV.shape[1]:
        return logits_RV
    last_R1 = logits_RV.topk(top_k, dim=1).values[:, -1:]
    is_above_RV, is_last_RV = logits_RV > last_R1, logits_RV == last_R1
    room_R1 = top_k - is_above_RV.sum(dim=1, keepdim=True)
    return logits_RV.masked_fill(~(is_above_RV | is_last_RV & (is_last_RV.cumsum(dim=1) <= room_R1)), float("-inf"))


def keep_top_p(logits_RV: Tensor, top_p: float, num_candidates: int = CANDIDATES) -> Tensor:
    """-inf for all but the nucleus: the fewest most probable tokens whose probability together is at least p.

    The token that crosses p belongs to it, so that it is never empty (Holtzman et al. 2019). Among equals the lowest
    ids come first. Only so many candidates of a row are sorted, and all tokens if these do not hold the nucleus.
    """
    total_R1 = logits_RV.logsumexp(dim=1, keepdim=True)
    if num_candidates < logits_RV.shape[1]:
        ids_RC = logits_RV.topk(num_candidates, dim=1).indices.sort(dim=1).values
        sorted_RC, order_RC = logits_RV.gather(1, ids_RC).sort(dim=1, descending=True, stable=True)
        is_outside_RC = _is_outside(sorted_RC, total_R1, top_p)
        # Equals of the last candidate may be missing, so these must be outside.
        if bool((is_outside_RC | (sorted_RC > sorted_RC[:, -1:])).all()):
            return _without(logits_RV, ids_RC.gather(1, order_RC), is_outside_RC)
    sorted_RV, order_RV = logits_RV.sort(dim=1, descending=True, stable=True)
    return _without(logits_RV, order_RV, _is_outside(sorted_RV, total_R1, top_p))


def _is_outside(sorted_RC: Tensor, total_R1: Tensor, top_p: float) -> Tensor:
    """Whether what comes before, most probable first, holds p already."""
    probs_RC = (sorted_RC - total_R1).exp()
    return probs_RC.cumsum(dim=1) - probs_RC >= top_p


def _without(logits_RV: Tensor, ids_RC: Tensor, is_outside_RC: Tensor) -> Tensor:
    """-inf where an id is outside or not named."""
    is_outside_RV = torch.ones_like(logits_RV, dtype=torch.bool).scatter(1, ids_RC, is_outside_RC)
    return logits_RV.masked_fill(is_outside_RV, float("-inf"))


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
