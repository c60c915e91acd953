"""From an autoregressive model to diffusion: attention that opens gradually, and context-adaptive loss weights.

Shapes: B sequences, L tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from diffusionlm.diffusion.noised_batch import CleanBatch, NoiseKey
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.models.patterns import AttentionPattern, Bidirectional, DenseBias, document_offsets

CART_P = 0.3
"""The p of the weights in training."""


def anneal_attention(pattern: AttentionPattern, length: int, key: NoiseKey, num_steps: int) -> AttentionPattern:
    """Pattern between causal and ``pattern``: keys after the query are visible with probability (step + 1) / num_steps.

    The pairs are sampled once for a step, for all of its sequences and layers (DiffuLLaMA, Gong et al. 2025).
    ``pattern`` is returned when the probability is 1.
    """
    probability = (key.step + 1) / num_steps if num_steps else 1.0
    if probability >= 1.0:
        return pattern
    assert isinstance(pattern, Bidirectional), "other patterns have no annealing"
    rng = keyed_rng(key.seed, RngStream.ATTENTION_ANNEALING, key.step)
    visible_LL = torch.from_numpy(rng.random((length, length)) < probability)
    return DenseBias(visible_LL | torch.ones_like(visible_LL).tril(), pattern.documents_BL)


def context_adaptive_weights(batch: CleanBatch, masked_BL: NDArray[np.bool_], p: float) -> NDArray[np.float64]:
    """Weight of each masked token by the visible tokens near it, [B, L]; 0 elsewhere (CART, Ye et al. 2025, Dream).

    Half the sum of p (1 - p)^(d - 1) over the visible tokens of the document, at distance d.
    """
    B, L = masked_BL.shape
    offsets_BL = np.broadcast_to(np.arange(L), (B, L))
    visible_BL = ~masked_BL
    if batch.document_BL is not None:
        offsets_BL = document_offsets(batch.document_BL).numpy()
        visible_BL = visible_BL & (batch.document_BL.numpy() >= 0)
    weights_BL = _discounted_counts(visible_BL, offsets_BL == 0, p)
    is_last_BL = np.roll(offsets_BL == 0, -1, axis=1)
    weights_BL += _discounted_counts(visible_BL[:, ::-1], is_last_BL[:, ::-1], p)[:, ::-1]
    return np.where(masked_BL, 0.5 * p * weights_BL, 0.0)


def _discounted_counts(visible_BL: NDArray[np.bool_], is_first_BL: NDArray[np.bool_], p: float) -> NDArray[np.float64]:
    """Sum of (1 - p)^(d - 1) over the visible tokens before each token, from the first one of its document on."""
    counts_BL = np.zeros(visible_BL.shape)
    for position in range(1, visible_BL.shape[1]):
        before = (1.0 - p) * counts_BL[:, position - 1] + visible_BL[:, position - 1]
        counts_BL[:, position] = np.where(is_first_BL[:, position], 0.0, before)
    return counts_BL
