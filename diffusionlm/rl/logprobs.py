"""Log-probabilities of answers: which forwards score which tokens, and how their values become a log-probability.

| kind | log-probability of an answer | bias | rows of an answer |
|---|---|---|---|
| replay | that of its trajectory: a sum over steps | none | steps of the longest block; bidirectional: all steps |
| bound | the evidence bound, by masks and complements | below the log-likelihood | 2 a draw |
| sandwich | that bound; of a negative advantage an upper bound, up to a constant | either | 2 a draw |
| mean_field | of each token given the prompt alone | large | 1 |
| coupled | half of mean_field, half of a mask and its complement | marginals of tokens | 3 |

With blocks of one token, `replay` is the exact chain: one row. Every value is a sum of coefficients times log p of
scored positions, but for the upper bound, so the gradient is that of a weighted cross-entropy.

Shapes: L positions of a canvas, N scored positions of all rows, J tokens of all answers, Q answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from config.finetune.rl import (
    BoundConfig,
    CoupledConfig,
    LogprobConfig,
    MeanFieldConfig,
    ReplayConfig,
    SandwichConfig,
)
from config.training.objective import FixedCountMasking
from diffusionlm.diffusion.corruption import sample_masks
from diffusionlm.diffusion.noised_batch import NoiseKey
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.inference.blocks import TextSegments
from diffusionlm.inference.generate import Trajectory

COMPLEMENTS = FixedCountMasking(complementary=True)


@dataclass(frozen=True)
class ScoredText:
    """The text of an answer that rows score."""

    tokens_L: NDArray[np.int64]
    positions_J: NDArray[np.int64]
    """Positions of its own tokens, ascending."""
    blocks_J: NDArray[np.int64]
    """Number of each one's block, from 0 without gaps; all 0 with bidirectional attention."""
    steps_J: NDArray[np.int64]
    """Forward that committed each one."""
    hidden_positions: NDArray[np.int64]
    """Positions that no forward has committed, and that stay masked."""

    @classmethod
    def from_trajectory(
        cls, trajectory: Trajectory, block_length: int | None, segments: TextSegments, *, is_replayed: bool
    ) -> ScoredText:
        """The tokens that are scored: of a replay all that were committed, on the whole canvas, or with blocks up to
        that of the last one; else those up to the stop token, on the text that ends with it."""
        end = len(trajectory.tokens_L) if is_replayed else trajectory.text_length
        if is_replayed and block_length is not None and trajectory.step_map_L.any():
            last = trajectory.committed_positions[-1:]
            end = min(end, segments.block_end(int(segments.block_starts(last, block_length)[0]), block_length))
        is_scored_L = trajectory.step_map_L[:end] > 0
        positions_J = np.flatnonzero(is_scored_L)
        starts_J = np.zeros_like(positions_J)
        if block_length is not None:
            starts_J = segments.block_starts(positions_J, block_length)
        return cls(
            trajectory.tokens_L[:end],
            positions_J,
            np.unique(starts_J, return_inverse=True)[1],
            trajectory.step_map_L[positions_J],
            np.flatnonzero(~is_scored_L & ~trajectory.is_given_L[:end]),
        )


@dataclass(frozen=True)
class ScoredRow:
    """A row of a forward."""

    is_hidden_L: NDArray[np.bool_]
    """Positions that are masked in it."""
    tokens: NDArray[np.int64]
    """Index among the tokens of the answer of each scored one, ascending."""
    coefficients: NDArray[np.float64]
    """Factor of each one's log p in the log-probability of the token."""
    weight: float = 1.0
    """Weight of its tokens in the loss, in place of those that are not scored."""


def build_rows(config: LogprobConfig, texts: Sequence[ScoredText], key: NoiseKey) -> list[list[ScoredRow]]:
    """The rows of each answer. Random masks are a function of the key and the number of the answer in the step, and
    the same for every model that is compared.

    Args:
        texts: answers of this rank; `NoiseKey.first_sequence` is the number of the first one in the step.
    """
    rows: list[list[ScoredRow]] = []
    draws = _sample_complements(config, texts, key) if isinstance(config, BoundConfig | SandwichConfig) else []
    for index, text in enumerate(texts):
        rng = keyed_rng(key.seed, RngStream.MASKS, key.step, key.first_sequence + index)
        match config:
            case ReplayConfig():
                rows.append(list(_replay(config, text, rng)))
            case BoundConfig() | SandwichConfig():
                rows.append(draws[index])
            case MeanFieldConfig():
                rows.append([_hide_answer(text, 1.0, config.prompt_masking, rng)])
            case CoupledConfig():
                rows.append(_couple(config, text, rng))
    return rows


def _replay(config: ReplayConfig, text: ScoredText, rng: np.random.Generator) -> Iterator[ScoredRow]:
    """Row r masks what was committed in the r-th step of its block or later, and scores that step (TraceRL)."""
    slices_J = _rank_steps(text) // config.shrink
    count = int(slices_J.max(initial=-1)) + 1
    selected = np.arange(count)
    if config.sampled_steps is not None and config.sampled_steps < count:
        selected = np.sort(rng.permutation(count)[: config.sampled_steps])
    for number in selected.tolist():
        tokens = np.flatnonzero(slices_J == number)
        is_hidden_L = _mask(text, np.flatnonzero(slices_J >= number))
        yield ScoredRow(is_hidden_L, tokens, np.ones(len(tokens)), count / len(selected))


def _rank_steps(text: ScoredText) -> NDArray[np.int64]:
    """Number of each token's step among those of its block, from 0."""
    order_J = np.lexsort((text.steps_J, text.blocks_J))
    blocks_J, steps_J = text.blocks_J[order_J], text.steps_J[order_J]
    is_first_J = np.diff(blocks_J, prepend=-1) != 0
    changes_J = np.cumsum((np.diff(steps_J, prepend=-1) != 0) & ~is_first_J)
    ranks_J = np.empty_like(changes_J)
    ranks_J[order_J] = changes_J - np.repeat(
        changes_J[is_first_J], np.diff([*np.flatnonzero(is_first_J), len(blocks_J)])
    )
    return ranks_J


def _mask(text: ScoredText, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
    is_hidden_L = np.zeros(len(text.tokens_L), dtype=np.bool_)
    is_hidden_L[text.hidden_positions] = True
    is_hidden_L[text.positions_J[tokens]] = True
    return is_hidden_L


def _hide_answer(
    text: ScoredText, coefficient: float, prompt_masking: float = 0.0, rng: np.random.Generator | None = None
) -> ScoredRow:
    """All tokens of the answer are masked and scored, and a share of the prompt is masked."""
    tokens = np.arange(len(text.positions_J))
    is_hidden_L = _mask(text, tokens)
    if prompt_masking and rng is not None:
        is_hidden_L |= rng.random(len(is_hidden_L)) < prompt_masking
    return ScoredRow(is_hidden_L, tokens, np.full(len(tokens), coefficient))


def _couple(config: CoupledConfig, text: ScoredText, rng: np.random.Generator) -> list[ScoredRow]:
    share = rng.uniform(config.low, config.high)
    is_masked_J = rng.random(len(text.positions_J)) < share
    rows = [_hide_answer(text, 0.5)]
    for own_share, is_own_J in ((share, is_masked_J), (1.0 - share, ~is_masked_J)):
        tokens = np.flatnonzero(is_own_J)
        rows.append(ScoredRow(_mask(text, tokens), tokens, np.full(len(tokens), 0.5 / own_share)))
    return rows


def _sample_complements(
    config: BoundConfig | SandwichConfig, texts: Sequence[ScoredText], key: NoiseKey
) -> list[list[ScoredRow]]:
    """Masks and complements of each answer, whose coefficients n / k make the sum an estimate of the bound."""
    draws = config.num_draws
    groups_BJ = np.full((len(texts) * draws, max((len(text.blocks_J) for text in texts), default=0)), -1)
    for index, text in enumerate(texts):
        groups_BJ[index * draws : (index + 1) * draws, : len(text.blocks_J)] = text.blocks_J
    own_key = NoiseKey(key.seed, key.step, key.first_sequence * draws, key.num_sequences_in_step * draws)
    samples = sample_masks(groups_BJ, own_key, COMPLEMENTS, "inverse_p")
    rows: list[list[ScoredRow]] = [[] for _ in texts]
    for number in range(len(groups_BJ)):
        for sample in samples:
            tokens = np.flatnonzero(sample.masked_BL[number])
            if len(tokens):
                is_hidden_L = _mask(texts[number // draws], tokens)
                coefficients = sample.weights_BL[number, tokens] / draws
                rows[number // draws].append(ScoredRow(is_hidden_L, tokens, coefficients))
    return rows
