"""Draws: which tokens are masked, and with what weight they count. Keyed chance, on the CPU.

Shapes: B rows, L positions.
"""

from __future__ import annotations

from typing import assert_never

import numpy as np
import torch
from numpy.typing import NDArray

from config.objective import Bernoulli, Counts
from diffusionlm.diffusion.batch import Batch, Draw, DrawKey
from diffusionlm.models.patterns import Bidirectional

STRATA, ROW = 0, 1
"""Streams of keyed chance, so that none is used twice."""


def generator(seed: int, *key: int) -> np.random.Generator:
    """Counter-based chance for a key of non-negative integers: equal keys give equal numbers, anywhere."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy=seed, spawn_key=key)))


def stratified_uniforms(key: DrawKey, num_rows: int) -> NDArray[np.float64]:
    """One number in [0, 1) for each of the batch's rows, evenly spread over the whole step.

    Strata share one offset and are dealt out by a random permutation: a stratum tied to the row's place would bias
    data that come in a fixed order.
    """
    chance = generator(key.seed, key.step, STRATA)
    total = key.rows_in_step
    spread = (chance.permutation(total) + chance.random()) / total
    return spread[key.first_row : key.first_row + num_rows]


def draw_masks(
    batch: Batch, key: DrawKey, estimator: Counts | Bernoulli
) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
    """Masked positions and weights, each [B, L].

    Counts: k uniform on 1 ... n of the row's n targets are masked, with weight n / k. The weighted sum of
    cross-entropies is an unbiased estimate of the continuous-time NELBO (Ou et al. 2024, lambda-DCE; Nie et al. 2025,
    eq. 6), of less variance than any estimator by times.
    Bernoulli: LLaDA's, p = (1 - epsilon) t + epsilon and weight 1 / p (Nie et al. 2025, guidelines).
    """
    eligible_BL = batch.is_target_BL.numpy()
    B, _ = eligible_BL.shape
    masked_BL = np.zeros_like(eligible_BL)
    weights_BL = np.zeros(eligible_BL.shape, dtype=np.float32)
    uniforms_B = stratified_uniforms(key, B)
    for row in range(B):
        places = np.flatnonzero(eligible_BL[row])
        chance = generator(key.seed, key.step, ROW, key.first_row + row)
        match estimator:
            case Counts():
                if len(places) == 0:
                    continue
                count = min(int(uniforms_B[row] * len(places)) + 1, len(places))  # the uniform may round up to 1
                chosen = chance.permutation(places)[:count]
                weight = len(places) / count
            case Bernoulli(epsilon=epsilon):
                probability = (1.0 - epsilon) * chance.random() + epsilon
                chosen = places[chance.random(len(places)) < probability]
                weight = 1.0 / probability
            case _:
                assert_never(estimator)
        masked_BL[row, chosen] = True
        weights_BL[row, chosen] = weight
    return masked_BL, weights_BL


def masked_draw(batch: Batch, masked_BL: NDArray[np.bool_], weights_BL: NDArray[np.float32], mask_token: int) -> Draw:
    """The draw that replaces the masked positions by the mask token and scores them."""
    masked = torch.from_numpy(masked_BL)
    rows_R = masked.flatten().nonzero()[:, 0]
    return Draw(
        inputs_BL=batch.tokens_BL.masked_fill(masked, mask_token),
        pattern=Bidirectional(_documents(batch)),
        rows_R=rows_R,
        targets_R=batch.tokens_BL.flatten()[rows_R],
        weights_R=torch.from_numpy(weights_BL).flatten()[rows_R],
        num_targets=int(batch.is_target_BL.sum()),
    )


def _documents(batch: Batch) -> torch.Tensor | None:
    """The documents, or None where every row is a single one: then no mask is needed, which is faster."""
    documents_BL = batch.document_BL
    if documents_BL is None or bool((documents_BL == documents_BL[:, :1]).all()):
        return None
    return documents_BL
