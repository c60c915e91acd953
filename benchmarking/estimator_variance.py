"""Variance of one draw of the training loss, by estimator and block length, for a model that is known exactly.

    python -m benchmarking.estimator_variance

The model is the ideal denoiser of a sticky Markov chain, in closed form: what a masked token's neighbours say of it.

Shapes: B rows, L tokens, V symbols.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarking.harness import markdown_table, print_message
from config.model import ModelConfig
from config.objective import BlockDiffusionConfig, Estimator, FixedCountMasking, IndependentMasking
from diffusionlm.diffusion.noised_batch import CleanBatch, NoiseKey
from diffusionlm.diffusion.objectives import build_objective

SYMBOLS, LENGTH, STAY, ROWS = 8, 32, 0.8, 16
BLOCKS = (1, 2, 4, 8, 16, 32)

ESTIMATORS: dict[str, Estimator] = {
    "Bernoulli 1/p, uniform t": IndependentMasking(times="uniform"),
    "Bernoulli 1/p, antithetic t": IndependentMasking(times="antithetic"),
    "Bernoulli 1/p, stratified t": IndependentMasking(times="stratified"),
    "counts": FixedCountMasking(),
    "counts, complementary pairs (two forwards)": FixedCountMasking(complementary=True),
}

Floats = NDArray[np.float64]


def transition_powers() -> Floats:
    """The chain's transition matrix to the powers 0 ... L; [L + 1, V, V]."""
    step = np.full((SYMBOLS, SYMBOLS), (1.0 - STAY) / (SYMBOLS - 1))
    np.fill_diagonal(step, STAY)
    powers = [np.eye(SYMBOLS)]
    for _ in range(LENGTH):
        powers.append(powers[-1] @ step)
    return np.stack(powers)


def sample_rows(rows: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Rows of the chain; [B, L]."""
    x = np.empty((rows, LENGTH), dtype=np.int64)
    x[:, 0] = rng.integers(SYMBOLS, size=rows)
    for i in range(1, LENGTH):
        other = (x[:, i - 1] + rng.integers(1, SYMBOLS, size=rows)) % SYMBOLS
        x[:, i] = np.where(rng.random(rows) < STAY, x[:, i - 1], other)
    return x


def cross_entropies(x_BL: NDArray[np.int64], masked_BL: NDArray[np.bool_], block: int, powers: Floats) -> Floats:
    """Of the masked tokens under the ideal denoiser of block diffusion, 0 elsewhere; [B, L].

    A masked token depends on the nearest visible token before it, in its block or an earlier one, and on the nearest
    visible one behind it in its block.
    """
    rows, index = np.arange(len(x_BL))[:, None], np.arange(LENGTH)
    # In an earlier block every token is visible, masked in xt or not.
    left_BL = np.maximum.accumulate(np.where(masked_BL, -1, index), axis=1)
    left_BL = np.maximum(left_BL, index // block * block - 1)
    end_L = np.minimum((index // block + 1) * block, LENGTH)
    right_BL = np.minimum.accumulate(np.where(masked_BL, LENGTH, index)[:, ::-1], axis=1)[:, ::-1]
    has_left, has_right = left_BL >= 0, right_BL < end_L
    left, right = np.maximum(left_BL, 0), np.minimum(right_BL, LENGTH - 1)
    a, b = index - left, right - index
    before = np.where(has_left, powers[a, x_BL[rows, left], x_BL], 1.0 / SYMBOLS)
    behind = np.where(has_right, powers[b, x_BL, x_BL[rows, right]], 1.0)
    # Without a left neighbour the right one is uniform, too.
    total = np.where(has_left, powers[right - left, x_BL[rows, left], x_BL[rows, right]], 1.0 / SYMBOLS)
    return np.where(masked_BL, -np.log(before * behind / np.where(has_right, total, 1.0)), 0.0)


def sample_losses(estimator: Estimator, block: int, draws: int) -> Floats:
    """The loss in nats per token of one fixed batch, once for each draw."""
    powers = transition_powers()
    x = sample_rows(ROWS, np.random.default_rng(0))
    tokens = torch.from_numpy(x)
    batch = CleanBatch(tokens, torch.ones_like(tokens, dtype=torch.bool))
    objective = build_objective(BlockDiffusionConfig(block_length=block, estimator=estimator), _vocabulary())
    values = np.empty(draws)
    for step in range(draws):
        draw = objective.build_noised_batch(batch, NoiseKey(0, step, 0, ROWS))
        S, copies = draw.inputs_BS.shape[1], len(draw.inputs_BS) // ROWS
        masked = np.zeros((copies * ROWS, LENGTH), dtype=np.bool_)
        rows, places = draw.positions_N.numpy() // S, draw.positions_N.numpy() % S
        masked[rows, places] = True
        ce = cross_entropies(np.tile(x, (copies, 1)), masked, block, powers)
        values[step] = float((ce[rows, places] * draw.weights_N.numpy()).sum() / draw.denominator)
    return values


def _vocabulary() -> ModelConfig:
    shape: dict[str, Any] = dict.fromkeys(
        ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"), 2
    )
    return ModelConfig(
        **shape, head_dim=2, max_position_embeddings=LENGTH, vocab_size=SYMBOLS + 1, mask_token_id=SYMBOLS
    )


def report(blocks: Sequence[int], draws: int) -> str:
    """Markdown table: variance of each estimator over that of Bernoulli with uniform t, and its mean."""
    rows = []
    reference: dict[int, float] = {}
    for name, estimator in ESTIMATORS.items():
        print_message(name)
        cells = []
        for block in blocks:
            values = sample_losses(estimator, block, draws)
            variance = values.var(ddof=1)
            reference.setdefault(block, variance)
            error = math.sqrt(variance / draws)
            cells.append(f"{variance / reference[block]:.3f} ({values.mean():.3f} +- {error:.3f})")
        rows.append([name, *cells])
    return markdown_table(["estimator", *(f"block length {block}" for block in blocks)], rows)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description="Compare the variance of loss estimators.", allow_abbrev=False)
    parser.add_argument("--draws", type=int, default=4_000, help="of each estimator and block length (default: 4000)")
    arguments = parser.parse_args()
    if arguments.draws < 2:
        parser.error("--draws must be at least 2")
    print(report(BLOCKS, arguments.draws))


if __name__ == "__main__":
    main()
