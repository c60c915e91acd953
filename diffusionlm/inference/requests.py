"""One request between two forwards: its canvas, its block, and what became final when.

Shapes: L positions of the canvas, N positions of the current block that a policy looks at, R those of them whose
logits the next forward computes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diffusionlm.diffusion.rng import RngStream, keyed_rng
from diffusionlm.inference.blocks import DecodingBlock, round_if_uniform_canvas
from diffusionlm.inference.stopping import find_stop_token
from diffusionlm.inference.strategies import DecodeState, Strategy


@dataclass(frozen=True)
class Predictions:
    """What a forward says of the positions that were read."""

    tokens_N: NDArray[np.int64]
    """A token each; of a settled position the one that it has."""
    confidence_N: NDArray[np.float64]
    logprobs_N: NDArray[np.float64]


class ActiveRequest:
    """The state of one request."""

    def __init__(
        self,
        tokens_L: NDArray[np.int64],
        masked_positions: NDArray[np.int64],
        seed: int,
        blocks: list[DecodingBlock],
        length: int,
    ) -> None:
        self.tokens_L = tokens_L
        """Placeholders where nothing is settled."""
        self.masked_positions = masked_positions
        """What is decoded, ascending."""
        self.seed = seed
        self.blocks = blocks
        """Still to be decoded, the current one first."""
        self.length = length
        """Positions of the text; a last block may be decoded beyond it."""
        self.new = masked_positions[masked_positions < length]
        """Those of the holes that are the answer."""
        self.placeholder_id = int(tokens_L[masked_positions[0]]) if len(masked_positions) else 0
        self.is_masked_L = np.zeros(len(tokens_L), dtype=np.bool_)
        self.is_masked_L[masked_positions] = True
        self.logprobs_L = np.full(len(tokens_L), np.nan)
        self.step_map_L = np.zeros(len(tokens_L), dtype=np.int64)
        self.num_forwards = 0
        self.num_steps = 0
        """Of all blocks, those without a forward included."""
        self.step = 0
        """Of the current block."""
        self.cached_length = 0
        """Positions whose keys and values a cache has and the current block does not change."""
        self.needs_prefill = True
        """No forward has seen the current block yet."""
        self.stop: int | None = None
        """Place of the stop token in the answer."""
        self._candidate_positions = self._read = masked_positions[:0]
        self._selected_M: NDArray[np.bool_] | None = None

    @property
    def is_done(self) -> bool:
        return not self.blocks or self.stop is not None

    @property
    def read(self) -> NDArray[np.int64]:
        """Positions whose logits the next forward computes, [R], ascending."""
        return self._read

    def draw_uniforms(self, stream: RngStream, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """A number in [0, 1) for each position: a function of (seed, position, step) alone."""
        return keyed_rng(self.seed, stream, self.num_steps).random(len(self.tokens_L))[positions]

    def prepare_step(self, strategy: Strategy) -> None:
        """Say what the next forward must read. Steps of a blind policy that need no forward are taken here."""
        while not self.is_done:
            block = self.blocks[0]
            masked = block.positions[self.is_masked_L[block.positions]]
            self._candidate_positions = self._read = block.positions if strategy.can_remask else masked
            if not strategy.is_model_independent:
                return
            self._selected_M = strategy.select_positions(
                self._decode_state(strategy, np.zeros(len(self._candidate_positions)))
            )
            self._read = self._candidate_positions[self._selected_M & self.is_masked_L[self._candidate_positions]]
            if len(self._read):
                return
            self._finish_step(self._candidate_positions[:0], self._selected_M, strategy)

    def commit(self, predictions: Predictions, strategy: Strategy, deferred_token_ids: Collection[int]) -> None:
        """Make positions final as the policy says, or, where it remasks, open again."""
        self.num_forwards += 1
        if strategy.is_model_independent:
            assert self._selected_M is not None
            chosen_M, settled_N = self._selected_M, np.ones(len(self._read), dtype=np.bool_)
        else:
            confidence_M = round_if_uniform_canvas(predictions.confidence_N, self.tokens_L)
            if deferred_token_ids:
                confidence_M = np.where(np.isin(predictions.tokens_N, list(deferred_token_ids)), -np.inf, confidence_M)
            chosen_M = strategy.select_positions(self._decode_state(strategy, confidence_M))
            settled_N = chosen_M & self.is_masked_L[self._read]
        positions = self._read[settled_N]
        self.tokens_L[positions] = predictions.tokens_N[settled_N]
        self.logprobs_L[positions] = predictions.logprobs_N[settled_N]
        self.step_map_L[positions] = self.num_forwards
        self._finish_step(positions, chosen_M, strategy)

    def find_stop_token(self, strategy: Strategy, stop_ids: Collection[int]) -> None:
        """Look for a stop token behind which nothing matters any more."""
        # What a policy may still take back is not final; its block must be over.
        if stop_ids and not (strategy.can_remask and self.step > 0):
            self.stop = find_stop_token(self.tokens_L[self.new], self.is_masked_L[self.new], stop_ids)

    def _decode_state(self, strategy: Strategy, confidence_M: NDArray[np.float64]) -> DecodeState:
        unmasking_schedule = self.blocks[0].unmasking_schedule
        return DecodeState(
            confidence_M=confidence_M,
            is_masked_M=self.is_masked_L[self._candidate_positions],
            uniforms_M=self.draw_uniforms(RngStream.POSITION_ORDER, self._candidate_positions)
            if not strategy.is_deterministic
            else confidence_M,
            tokens_per_step=unmasking_schedule[self.step],
            step=self.step,
            num_steps=len(unmasking_schedule),
        )

    def _finish_step(
        self, committed_positions: NDArray[np.int64], chosen_M: NDArray[np.bool_], strategy: Strategy
    ) -> None:
        self.is_masked_L[committed_positions] = False
        if strategy.can_remask:
            taken_back = self._candidate_positions[~chosen_M & ~self.is_masked_L[self._candidate_positions]]
            self.tokens_L[taken_back] = self.placeholder_id
            self.is_masked_L[taken_back] = True
            self.logprobs_L[taken_back] = np.nan
        self.step += 1
        self.num_steps += 1
        block = self.blocks[0]
        is_full = not self.is_masked_L[block.positions].any()
        if self.step == len(block.unmasking_schedule) if strategy.can_remask else is_full:
            assert is_full, "the last step settles all"
            self.blocks.pop(0)
            self.step, self.needs_prefill = 0, True
