"""From logits to a token: temperature, top-k, top-p, and the choice itself. Pure functions, row by row.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUM_TOP_P_CANDIDATES = 1024
"""Most probable tokens that are sorted first; a nucleus is seldom larger."""


def divide_by_temperature(logits_NV: Tensor, temperature: float) -> Tensor:
    """Logits of the tempered distribution; temperature > 0, however small."""
    # The best token is moved to 0 first, where a tiny divisor cannot make it overflow.
    return (logits_NV - logits_NV.amax(dim=1, keepdim=True)) / temperature


def keep_top_k(logits_NV: Tensor, top_k: int) -> Tensor:
    """-inf for all but the k highest logits: exactly k of them, the lowest ids among equals."""
    if top_k >= logits_NV.shape[1]:
        return logits_NV
    last_N1 = logits_NV.topk(top_k, dim=1).values[:, -1:]
    is_above_NV, is_last_NV = logits_NV > last_N1, logits_NV == last_N1
    room_N1 = top_k - is_above_NV.sum(dim=1, keepdim=True)
    return logits_NV.masked_fill(~(is_above_NV | is_last_NV & (is_last_NV.cumsum(dim=1) <= room_N1)), float("-inf"))


def keep_top_p(logits_NV: Tensor, top_p: float, num_candidates: int = NUM_TOP_P_CANDIDATES) -> Tensor:
    """-inf for all but the nucleus: the fewest most probable tokens whose probability together is at least p.

    The token that crosses p belongs to it, so that it is never empty (Holtzman et al. 2019). Among equals the lowest
    ids come first. Only so many candidates of a row are sorted, and all tokens if these do not hold the nucleus.
    """
    total_N1 = logits_NV.logsumexp(dim=1, keepdim=True)
    if num_candidates < logits_NV.shape[1]:
        ids_NC = logits_NV.topk(num_candidates, dim=1).indices.sort(dim=1).values
        sorted_NC, order_NC = logits_NV.gather(1, ids_NC).sort(dim=1, descending=True, stable=True)
        is_outside_NC = _is_outside_nucleus(sorted_NC, total_N1, top_p)
        # Equals of the last candidate may be missing, so these must be outside.
        if bool((is_outside_NC | (sorted_NC > sorted_NC[:, -1:])).all()):
            return _mask_outside(logits_NV, ids_NC.gather(1, order_NC), is_outside_NC)
    sorted_NV, order_NV = logits_NV.sort(dim=1, descending=True, stable=True)
    return _mask_outside(logits_NV, order_NV, _is_outside_nucleus(sorted_NV, total_N1, top_p))


def _is_outside_nucleus(sorted_NC: Tensor, total_N1: Tensor, top_p: float) -> Tensor:
    """Whether what comes before, most probable first, holds p already."""
    probs_NC = (sorted_NC - total_N1).exp()
    return probs_NC.cumsum(dim=1) - probs_NC >= top_p


def _mask_outside(logits_NV: Tensor, ids_NC: Tensor, is_outside_NC: Tensor) -> Tensor:
    """-inf where an id is outside or not named."""
    is_outside_NV = torch.ones_like(logits_NV, dtype=torch.bool).scatter(1, ids_NC, is_outside_NC)
    return logits_NV.masked_fill(is_outside_NV, float("-inf"))


def filter_logits(logits_NV: Tensor, *, temperature: float, top_k: int | None, top_p: float) -> Tensor:
    """Temperature, then top-k, then top-p of what is left (Hugging Face's order). Temperature 0 counts as 1 here.

    The logits themselves come back where nothing is to be done.
    """
    if temperature not in (0.0, 1.0):
        logits_NV = divide_by_temperature(logits_NV, temperature)
    if top_k is not None:
        logits_NV = keep_top_k(logits_NV, top_k)
    return keep_top_p(logits_NV, top_p) if top_p < 1.0 else logits_NV


def choose_tokens(probs_NV: Tensor, uniforms_N: Tensor | None) -> Tensor:
    """One token a row: the most probable one (lowest id among equals), or a sample by the inverse of the distribution.

    Args:
        probs_NV: probabilities; they need not sum to exactly 1.
        uniforms_N: a number in [0, 1) for each row; None: no sampling.

    Returns:
        token ids [R]; a token of probability zero is never sampled.
    """
    if uniforms_N is None:
        return probs_NV.argmax(dim=1)
    cumulative_NV = probs_NV.cumsum(dim=1)
    reached_NV = cumulative_NV > uniforms_N[:, None] * cumulative_NV[:, -1:]
    # argmax gives the first of equals.
    return (reached_NV & (probs_NV > 0.0)).to(torch.uint8).argmax(dim=1)
