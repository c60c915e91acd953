"""An answer after its context: its blocks, their masked copies, and the estimate that their log-probabilities make.

Shapes: T tokens of context and answer, n answer tokens of a block, C masks of a block, D draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from config.evaluation.likelihood import AnswerLikelihoodConfig
from diffusionlm.diffusion.layout import InputLayout
from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.evaluation.likelihood.copies import MaskedCopy
from diffusionlm.evaluation.likelihood.masks import (
    WeightedMasks,
    count_masks,
    count_order_pair_masks,
    enumerate_masks,
    independent_standard_error,
    mean_cover_sets,
    sample_covers,
    sample_levels,
    sample_order_pairs,
    stratified_standard_error,
)

MIN_ORDER_PAIRS = 2
"""Answers of which fewer orders fit into the samples are estimated from covers."""


@dataclass(frozen=True)
class AnswerBlock:
    """The answer tokens of one block of a text; if attention is bidirectional or causal, the text is one block."""

    start: int
    end: int
    positions: NDArray[np.int64]
    """Positions of the answer tokens in the text, [n]."""


class BlockedAnswer:
    """An answer after its context, of ``num_tokens`` tokens that are scored; what follows these is only read."""

    def __init__(self, layout: InputLayout, tokens: Sequence[int], num_context: int, num_tokens: int) -> None:
        self.layout, self.num_context, self.num_tokens = layout, num_context, num_tokens
        self.tokens_T = np.array(tokens, dtype=np.int64)
        length, size = len(self.tokens_T), layout.block_length
        self.positions = positions = num_context + np.arange(num_tokens)
        if size is None or layout.is_autoregressive:
            self.blocks = [AnswerBlock(0, length, positions)]
        else:
            starts = range(num_context - num_context % size, num_context + num_tokens, size)
            self.blocks = [
                AnswerBlock(start, min(start + size, length), positions[positions // size == start // size])
                for start in starts
            ]
        self.clean_tokens = self.tokens_T[: self.blocks[-1].start]
        """What the copies of blocks attend to."""

    @property
    def num_masks(self) -> int:
        """Masks that enumeration takes: those of the longest block, since all blocks are masked at once."""
        if self.layout.is_autoregressive:
            return 1
        return count_masks(max(len(block.positions) for block in self.blocks))

    def mask_block(self, block: AnswerBlock, is_masked_n: NDArray[np.bool_]) -> MaskedCopy:
        """Mask some of the answer tokens of a block."""
        positions = block.positions[is_masked_n]
        if self.layout.is_autoregressive:
            tokens = self.tokens_T[:-1]
        else:
            assert self.layout.mask_token is not None, "checked by InputLayout.from_config"
            tokens = self.tokens_T[block.start : block.end].copy()
            tokens[positions - block.start] = self.layout.mask_token
        targets = self.tokens_T[positions]
        return MaskedCopy(self.clean_tokens, self.num_context, block.start, tokens, positions, targets)


@dataclass(frozen=True)
class SamplingPlan:
    """How the answers of a document, or a single answer, are estimated."""

    is_exact: bool
    draws_orders: bool = False
    """Draws are orders with their reverses, else covers."""
    num_first: int = 1
    """Draws of the first stage; each stage after it doubles all draws."""
    num_stages: int = 1

    def num_draws(self, num_stages: int) -> int:
        """Draws of the first stages together."""
        return self.num_first << (num_stages - 1)

    @classmethod
    def from_answers(cls, answers: Sequence[BlockedAnswer], config: AnswerLikelihoodConfig) -> SamplingPlan:
        """One plan for the answers of a document: exact if all of them can be enumerated."""
        limit = config.max_enumerated_forwards or config.num_mc_samples
        if max(answer.num_masks for answer in answers) <= limit:
            return cls(is_exact=True)
        longest = max(len(block.positions) for answer in answers for block in answer.blocks)
        num_draws = config.num_mc_samples // count_order_pair_masks(longest)
        draws_orders = num_draws >= MIN_ORDER_PAIRS
        if not draws_orders:
            num_draws = max(1, int(config.num_mc_samples / mean_cover_sets(longest)))
        num_stages = 1
        while num_draws >> num_stages >= config.racing_first_draws:
            num_stages += 1
        return cls(False, draws_orders, num_draws >> (num_stages - 1), num_stages)


class AnswerEstimate:
    """The log-likelihood of an answer, as far as it is computed."""

    def __init__(self, answer: BlockedAnswer, plan: SamplingPlan, seed: int, key: tuple[int, ...]) -> None:
        self.answer, self.plan = answer, plan
        self._seed, self._key = seed, key
        self.values_GD = np.zeros((len(answer.blocks), 0))
        """Estimate of each block's log-likelihood in each draw; a single column if it is exact."""
        self.copies: list[MaskedCopy] = []
        """Copies that it reads."""
        self._new_masks: list[WeightedMasks] = []
        """Masks of each block whose copies are computed next."""
        num_draws = plan.num_draws(plan.num_stages)
        self.levels_GD = np.stack(
            [
                sample_levels(plan.num_first, num_draws, keyed_rng(seed, RngStream.ANSWER_LEVELS, *key, number))
                for number in range(len(answer.blocks))
            ]
        )

    @property
    def log_likelihood(self) -> float:
        """Sum over the blocks of the means of their draws."""
        return float(self.values_GD.mean(axis=1).sum())

    @property
    def standard_error(self) -> float:
        """Standard error of `log_likelihood`; 0 if it is exact."""
        return 0.0 if self.plan.is_exact else self._combine_errors(self.values_GD)

    def difference_error(self, other: AnswerEstimate, divisors: tuple[float, float] = (1.0, 1.0)) -> float:
        """Standard error of the difference of two log-likelihoods with common random numbers, each divided first."""
        if self.plan.is_exact:
            return 0.0
        longer, shorter = self, other
        if len(self.values_GD) < len(other.values_GD):
            longer, shorter, divisors = other, self, divisors[::-1]
        differences_GD = longer.values_GD / divisors[0]
        differences_GD[: len(shorter.values_GD)] -= shorter.values_GD / divisors[1]
        return longer._combine_errors(differences_GD)

    def _combine_errors(self, values_GD: NDArray[np.float64]) -> float:
        """Standard error of the sum over blocks of the means over draws; the draws of blocks are independent."""
        errors = [
            independent_standard_error(values_D)
            if self.plan.draws_orders
            else stratified_standard_error(levels_D[: len(values_D)], values_D)
            for levels_D, values_D in zip(self.levels_GD, values_GD, strict=True)
        ]
        return float(np.sqrt(np.sum(np.square(errors))))

    def add_draws(self, num_draws: int) -> list[MaskedCopy]:
        """The masked copies of the draws up to ``num_draws``, whose log-probabilities `read` takes."""
        blocks = self.answer.blocks
        self._new_masks = [self._choose_masks(number, num_draws) for number in range(len(blocks))]
        copies = [
            self.answer.mask_block(block, is_masked_n)
            for block, masks in zip(blocks, self._new_masks, strict=True)
            for is_masked_n in masks.is_masked_Cn
        ]
        self.copies += copies
        return copies

    def read(self, log_probabilities: Iterator[NDArray[np.float64]]) -> None:
        """Read the log-probabilities of the new copies, in order."""
        first_draw = self.values_GD.shape[1]
        end_draw = 1 + max(int(masks.draws_C[-1]) for masks in self._new_masks)
        values_GD = np.zeros((len(self._new_masks), end_draw - first_draw))
        for values_D, masks in zip(values_GD, self._new_masks, strict=True):
            values_C = [
                float(weights_n[is_masked_n] @ next(log_probabilities))
                for is_masked_n, weights_n in zip(masks.is_masked_Cn, masks.weights_Cn, strict=True)
            ]
            np.add.at(values_D, masks.draws_C - first_draw, values_C)
        self.values_GD = np.concatenate([self.values_GD, values_GD], axis=1)

    def _choose_masks(self, number: int, num_draws: int) -> WeightedMasks:
        size = len(self.answer.blocks[number].positions)
        if self.answer.layout.is_autoregressive:
            return WeightedMasks(np.ones((1, size), dtype=np.bool_), np.ones((1, size)), np.zeros(1, dtype=np.int64))
        if self.plan.is_exact:
            return enumerate_masks(size)
        first, key = self.values_GD.shape[1], (*self._key, number)
        if self.plan.draws_orders:
            return sample_order_pairs(size, first, num_draws, self._seed, key)
        return sample_covers(size, self.levels_GD[number, :num_draws], first, self._seed, key)
