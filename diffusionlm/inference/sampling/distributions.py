"""Distributions of tokens: temperature, filters, the choice of a token.

Shapes: N positions, V vocabulary, C candidates of a nucleus.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.generation import GenerationConfig

PROBABILITY_CHUNK_BYTES = 64 << 20
"""Budget for one [positions, V] array of fp64 probabilities."""
CPU_CHUNK_BYTES = 4 << 20
"""The same on a CPU: arrays that stay in its caches, and whose memory the allocator keeps for the next chunk."""

NUM_TOP_P_CANDIDATES = 1024
"""Most probable tokens that a CPU sorts first; a nucleus is rarely larger."""


def exclude_tokens(probs_NV: Tensor, token_ids: Tensor) -> Tensor:
    """Distribution of the other tokens; zero where they have no probability. The argument itself if there are no ids.

    Confidences of positions that predict another token do not count deferred ones, as in LLaDA's code.
    """
    if not len(token_ids):
        return probs_NV
    others_NV = probs_NV.index_fill(1, token_ids, 0.0)
    total_N1 = others_NV.sum(dim=1, keepdim=True)
    return others_NV / total_N1.where(total_N1 > 0.0, 1.0)


def find_top_tokens(logits_NV: Tensor, num_top: int) -> Tensor:
    """The most probable tokens [N, T], the most probable first, the lowest id among equals."""
    num_top = min(num_top, logits_NV.shape[1])
    top_NT = keep_top_k(logits_NV, num_top).topk(num_top, dim=1).indices.sort(dim=1).values
    order_NT = logits_NV.gather(1, top_NT).sort(dim=1, descending=True, stable=True).indices
    return top_NT.gather(1, order_NT)


def iterate_chunks(logits_NV: Tensor) -> Iterator[slice]:
    """Slices of positions whose fp64 probabilities are within `PROBABILITY_CHUNK_BYTES`, and on a CPU within
    `CPU_CHUNK_BYTES`."""
    N, V = logits_NV.shape
    budget = PROBABILITY_CHUNK_BYTES
    if logits_NV.device.type == "cpu":
        budget = min(budget, CPU_CHUNK_BYTES)
    size = max(1, budget // (8 * V))
    return (slice(start, start + size) for start in range(0, N, size))


def check_finite(is_finite: NDArray[np.bool_]) -> None:
    """Check the model's probabilities.

    Raises:
        ValueError: one is not finite.
    """
    if not is_finite.all():
        raise ValueError(
            "the model's probabilities are not finite: its weights are corrupt, or its activations overflow in this "
            'dtype; try dtype = "float32"'
        )


def filter_logits(logits_NV: Tensor, config: GenerationConfig, temperature: float) -> Tensor:
    """Apply a temperature (0 counts as 1), then top-k, top-p and min-p, each to what is left (the order of Hugging
    Face).

    Returns the argument itself if nothing changes.
    """
    if temperature not in (0.0, 1.0):
        logits_NV = divide_by_temperature(logits_NV, temperature)
    if config.top_k is not None:
        logits_NV = keep_top_k(logits_NV, config.top_k)
    if config.top_p < 1.0:
        logits_NV = keep_top_p(logits_NV, config.top_p)
    return keep_min_p(logits_NV, config.min_p) if config.min_p > 0.0 else logits_NV


def divide_by_temperature(logits_NV: Tensor, temperature: float | Tensor) -> Tensor:
    """Logits of the tempered distribution, for a temperature above 0, however small; or one for each position,
    [N, 1]."""
    # With the highest logit at 0, a tiny divisor cannot make it overflow.
    return (logits_NV - logits_NV.amax(dim=1, keepdim=True)) / temperature


def keep_top_k(logits_NV: Tensor, top_k: int) -> Tensor:
    """Set all but the k highest logits to -inf: exactly k stay, the lowest ids among equals."""
    if top_k >= logits_NV.shape[1]:
        return logits_NV
    return _keep_highest(logits_NV, _sort_highest(logits_NV, top_k)[:, -1:], top_k)


def keep_top_p(logits_NV: Tensor, top_p: float) -> Tensor:
    """Set all logits outside the nucleus to -inf: the fewest most probable tokens whose probabilities sum to top_p.

    The token that crosses top_p belongs to it, so it is never empty (Holtzman et al. 2019). Among equals the lowest ids
    come first. A CPU sorts `NUM_TOP_P_CANDIDATES` tokens, and all of them only in the rows whose nucleus is larger; a
    GPU sorts all, so that nothing waits for it.
    """
    V = logits_NV.shape[1]
    if logits_NV.device.type != "cpu" or V <= NUM_TOP_P_CANDIDATES:
        return _keep_nucleus(logits_NV, top_p, V)[0]
    filtered_NV, is_complete_N = _keep_nucleus(logits_NV, top_p, NUM_TOP_P_CANDIDATES)
    if not is_complete_N.all():
        filtered_NV[~is_complete_N] = _keep_nucleus(logits_NV[~is_complete_N], top_p, V)[0]
    return filtered_NV


def keep_min_p(logits_NV: Tensor, min_p: float) -> Tensor:
    """Set the logits of tokens to -inf whose probability is less than ``min_p`` times the highest one (Nguyen et al.
    2024, arXiv 2407.01082)."""
    return logits_NV.masked_fill(logits_NV < logits_NV.amax(dim=1, keepdim=True) + math.log(min_p), float("-inf"))


def _keep_nucleus(logits_NV: Tensor, top_p: float, num_candidates: int) -> tuple[Tensor, Tensor]:
    """The logits of `keep_top_p`, [N, V], and whether the most probable tokens that were sorted contain the nucleus,
    [N]; only then are the logits right."""
    sorted_NC = _sort_highest(logits_NV, num_candidates)
    probs_NC = (sorted_NC - logits_NV.logsumexp(dim=1, keepdim=True)).exp_()
    is_inside_NC = probs_NC.cumsum(dim=1).sub_(probs_NC) < top_p  # the more probable tokens do not sum to top_p yet
    size_N1 = is_inside_NC.sum(dim=1, keepdim=True).clamp_min(1)
    return _keep_highest(logits_NV, sorted_NC.gather(1, size_N1 - 1), size_N1), ~is_inside_NC[:, -1]


def _sort_highest(logits_NV: Tensor, count: int) -> Tensor:
    """The highest logits of each row without their ids, the highest first, [N, count]."""
    if logits_NV.device.type != "cpu":
        return logits_NV.topk(count, dim=1).values
    # torch sorts ids along; numpy sorts values alone, with vector instructions.
    negated_NC = -logits_NV.numpy()
    if count < negated_NC.shape[1]:
        negated_NC.partition(count - 1, axis=1)
        negated_NC = negated_NC[:, :count]
    negated_NC.sort(axis=1)
    return torch.from_numpy(np.negative(negated_NC, out=negated_NC))


def _keep_highest(logits_NV: Tensor, lowest_N1: Tensor, count_N1: Tensor | int) -> Tensor:
    """Set all but the ``count_N1`` highest logits, the last of which is ``lowest_N1``, to -inf; among equals the lowest
    ids stay."""
    is_above_NV, is_tie_NV = logits_NV > lowest_N1, logits_NV == lowest_N1
    num_ties_N1 = count_N1 - is_above_NV.sum(dim=1, keepdim=True)
    return logits_NV.masked_fill(
        ~(is_above_NV | is_tie_NV & (is_tie_NV.cumsum(dim=1, dtype=torch.int32) <= num_ties_N1)), float("-inf")
    )


def choose_tokens(probs_NV: Tensor, uniforms_N: Tensor | None) -> Tensor:
    """Choose one token per position, [N]: the most probable one, or a sample by the inverse of the distribution.

    Args:
        probs_NV: probabilities; they need not sum to exactly 1. A token of probability zero is never sampled.
        uniforms_N: a number in [0, 1) per position; None: the most probable token, the lowest id among equals.
    """
    if uniforms_N is None:
        return probs_NV.argmax(dim=1)
    cumulative_NV = probs_NV.cumsum(dim=1)
    is_reached_NV = cumulative_NV > uniforms_N[:, None] * cumulative_NV[:, -1:]
    # argmax returns the first of equals.
    return (is_reached_NV & (probs_NV > 0.0)).to(torch.uint8).argmax(dim=1)
