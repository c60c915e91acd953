"""The variance of the training loss of one noised batch, by estimator and block length, for an exact model.

    python -m benchmarking.estimator_variance

The model is the optimal denoiser of a sticky Markov chain, in closed form: the posterior of a masked token given its
nearest visible neighbors.

Shapes: B sequences, L tokens, V symbols, N masked positions of the batch.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarking.harness import Benchmark, Report, Settings, Table, main
from config.model import ModelConfig
from config.training.objective import BlockDiffusionConfig, Estimator, FixedCountMasking, IndependentMasking
from diffusionlm.diffusion.noised_batch import CleanBatch, NoiseKey
from diffusionlm.diffusion.objectives import build_objective
from files.terminal_text import print_message

SYMBOLS, LENGTH, STAY_PROBABILITY, BATCH_SIZE = 8, 32, 0.8, 16
BLOCK_LENGTHS = (1, 2, 4, 8, 16, 32)

ESTIMATORS: dict[str, Estimator] = {
    "independent, 1/p, uniform t": IndependentMasking(times="uniform"),
    "independent, 1/p, antithetic t": IndependentMasking(times="antithetic"),
    "independent, 1/p, stratified t": IndependentMasking(times="stratified"),
    "fixed counts": FixedCountMasking(),
    "fixed counts, complementary pairs (two forwards)": FixedCountMasking(complementary=True),
}

Floats = NDArray[np.float64]


def transition_powers() -> Floats:
    """The transition matrix of the chain to the powers 0 to L; ``[L + 1, V, V]``."""
    transition = np.full((SYMBOLS, SYMBOLS), (1.0 - STAY_PROBABILITY) / (SYMBOLS - 1))
    np.fill_diagonal(transition, STAY_PROBABILITY)
    powers = [np.eye(SYMBOLS)]
    for _ in range(LENGTH):
        powers.append(powers[-1] @ transition)
    return np.stack(powers)


def sample_sequences(count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Sample sequences of the chain; ``[B, L]``."""
    x_BL = np.empty((count, LENGTH), dtype=np.int64)
    x_BL[:, 0] = rng.integers(SYMBOLS, size=count)
    for i in range(1, LENGTH):
        other_B = (x_BL[:, i - 1] + rng.integers(1, SYMBOLS, size=count)) % SYMBOLS
        x_BL[:, i] = np.where(rng.random(count) < STAY_PROBABILITY, x_BL[:, i - 1], other_B)
    return x_BL


def cross_entropies(x_BL: NDArray[np.int64], masked_BL: NDArray[np.bool_], block: int, powers: Floats) -> Floats:
    """Cross-entropy of the masked tokens under the optimal denoiser of block diffusion, 0 elsewhere; ``[B, L]``.

    A masked token depends on the nearest visible token before it, in its block or an earlier one, and on the nearest
    visible token after it in its block.
    """
    row, index = np.arange(len(x_BL))[:, None], np.arange(LENGTH)
    # The clean half shows every token of an earlier block, also those that are masked in the noisy half.
    left_BL = np.maximum.accumulate(np.where(masked_BL, -1, index), axis=1)
    left_BL = np.maximum(left_BL, index // block * block - 1)
    end_L = np.minimum((index // block + 1) * block, LENGTH)
    right_BL = np.minimum.accumulate(np.where(masked_BL, LENGTH, index)[:, ::-1], axis=1)[:, ::-1]
    has_left, has_right = left_BL >= 0, right_BL < end_L
    left, right = np.maximum(left_BL, 0), np.minimum(right_BL, LENGTH - 1)
    from_left = np.where(has_left, powers[index - left, x_BL[row, left], x_BL], 1.0 / SYMBOLS)
    to_right = np.where(has_right, powers[right - index, x_BL, x_BL[row, right]], 1.0)
    # Without a left neighbor the marginal distribution of the right one is uniform.
    between = np.where(has_left, powers[right - left, x_BL[row, left], x_BL[row, right]], 1.0 / SYMBOLS)
    posterior = from_left * to_right / np.where(has_right, between, 1.0)
    return np.where(masked_BL, -np.log(posterior), 0.0)


def sample_losses(estimator: Estimator, block: int, samples: int) -> Floats:
    """Sample the loss of one fixed batch, in nats per token."""
    powers = transition_powers()
    x_BL = sample_sequences(BATCH_SIZE, np.random.default_rng(0))
    tokens_BL = torch.from_numpy(x_BL)
    batch = CleanBatch(tokens_BL, torch.ones_like(tokens_BL, dtype=torch.bool))
    objective = build_objective(BlockDiffusionConfig(block_length=block, estimator=estimator), _model_config())
    losses = np.empty(samples)
    for step in range(samples):
        noised = objective.build_noised_batch(batch, NoiseKey(0, step, 0, BATCH_SIZE))
        S, copies = noised.inputs_BS.shape[1], len(noised.inputs_BS) // BATCH_SIZE
        masked_BL = np.zeros((copies * BATCH_SIZE, LENGTH), dtype=np.bool_)
        rows_N, columns_N = noised.positions_N.numpy() // S, noised.positions_N.numpy() % S
        masked_BL[rows_N, columns_N] = True
        ce_BL = cross_entropies(np.tile(x_BL, (copies, 1)), masked_BL, block, powers)
        losses[step] = float((ce_BL[rows_N, columns_N] * noised.weights_N.numpy()).sum() / noised.denominator)
    return losses


def _model_config() -> ModelConfig:
    """A model config with the vocabulary of the chain; no model is built from it."""
    shape: dict[str, Any] = dict.fromkeys(
        ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"), 2
    )
    return ModelConfig(
        **shape, head_dim=2, max_position_embeddings=LENGTH, vocab_size=SYMBOLS + 1, mask_token_id=SYMBOLS
    )


def compare_estimators(block_lengths: Sequence[int], samples: int) -> Table:
    """Measure the variance of each estimator relative to the first one, and its mean with its standard error."""
    rows = []
    baseline: dict[int, float] = {}
    for name, estimator in ESTIMATORS.items():
        print_message(name)
        cells = []
        for block in block_lengths:
            losses = sample_losses(estimator, block, samples)
            variance = losses.var(ddof=1)
            baseline.setdefault(block, variance)
            error = math.sqrt(variance / samples)
            cells.append(f"{variance / baseline[block]:.3f} ({losses.mean():.3f} +- {error:.3f})")
        rows.append([name, *cells])
    return Table(["estimator", *(f"block length {block}" for block in block_lengths)], rows)


def run(settings: Settings) -> Report:
    return Report([compare_estimators(BLOCK_LENGTHS, settings.options.draws)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    note = "noised batches of each estimator and block length (default: 4000)"
    parser.add_argument("--draws", type=int, default=4_000, help=note)


def check_arguments(options: argparse.Namespace) -> str | None:
    return None if options.draws >= 2 else f"--draws must be at least 2, not {options.draws}"


BENCHMARK = Benchmark(
    "Compare the variance of loss estimators.",
    run,
    rounds=None,
    add_arguments=add_arguments,
    check_arguments=check_arguments,
)

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
