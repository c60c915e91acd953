"""One request between two forwards: its canvas, its block, and what became final when.

Shapes: L positions of the canvas, N positions of the current block that a policy looks at, R those of them whose
logits the next forward computes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diffusionlm.diffusion.rng import Stream, generator
from diffusionlm.inference.blocks import Block, comparable
from diffusionlm.inference.stopping import find_stop
from diffusionlm.inference.strategies import Look, Policy


@dataclass(frozen=True)
class Proposal:
    """What a forward says of the positions that were read."""

    tokens_R: NDArray[np.int64]
    """A token each; of a settled position the one that it has."""
    confidence_R: NDArray[np.float64]
    logprobs_R: NDArray[np.float64]


class Request:
    """The state of one request."""

    def __init__(
        self, tokens_L: NDArray[np.int64], holes: NDArray[np.int64], seed: int, blocks: list[Block], length: int
    ) -> None:
        self.tokens_L = tokens_L
        """Placeholders where nothing is settled."""
        self.holes = holes
        """What is decoded, ascending."""
        self.seed = seed
        self.blocks = blocks
        """Still to be decoded, the current one first."""
        self.length = length
        """Positions of the text; a last block may be decoded beyond it."""
        self.new = holes[holes < length]
        """Those of the holes that are the answer."""
        self.placeholder = int(tokens_L[holes[0]]) if len(holes) else 0
        self.is_masked_L = np.zeros(len(tokens_L), dtype=np.bool_)
        self.is_masked_L[holes] = True
        self.logprobs_L = np.full(len(tokens_L), np.nan)
        self.step_map_L = np.zeros(len(tokens_L), dtype=np.int64)
        self.num_forwards = 0
        self.num_steps = 0
        """Of all blocks, those without a forward included."""
        self.step = 0
        """Of the current block."""
        self.kept = 0
        """Positions whose keys and values a cache has and the current block does not change."""
        self.is_fresh = True
        """No forward has seen the current block yet."""
        self.stop: int | None = None
        """Place of the stop token in the answer."""
        self._looked_at = self._read = holes[:0]
        self._chosen_N: NDArray[np.bool_] | None = None

    @property
    def is_done(self) -> bool:
        return not self.blocks or self.stop is not None

    @property
    def read(self) -> NDArray[np.int64]:
        """Positions whose logits the next forward computes, [R], ascending."""
        return self._read

    def uniforms(self, stream: Stream, positions: NDArray[np.int64]) -> NDArray[np.float64]:
        """A number in [0, 1) for each position: a function of (seed, position, step) alone."""
        return generator(self.seed, stream, self.num_steps).random(len(self.tokens_L))[positions]

    def prepare(self, policy: Policy) -> None:
        """Say what the next forward must read. Steps of a blind policy that need no forward are taken here."""
        while not self.is_done:
            block = self.blocks[0]
            masked = block.positions[self.is_masked_L[block.positions]]
            self._looked_at = self._read = block.positions if policy.remasks else masked
            if not policy.is_blind:
                return
            self._chosen_N = policy.choose(self._look(policy, np.zeros(len(self._looked_at))))
            self._read = self._looked_at[self._chosen_N & self.is_masked_L[self._looked_at]]
            if len(self._read):
                return
            self._end_step(self._looked_at[:0], self._chosen_N, policy)

    def settle(self, proposal: Proposal, policy: Policy, deferred: Collection[int]) -> None:
        """Make positions final as the policy says, or, where it remasks, open again."""
        self.num_forwards += 1
        if policy.is_blind:
            assert self._chosen_N is not None
            chosen_N, settled_R = self._chosen_N, np.ones(len(self._read), dtype=np.bool_)
        else:
            confidence_R = comparable(proposal.confidence_R, self.tokens_L)
            if deferred:
                confidence_R = np.where(np.isin(proposal.tokens_R, list(deferred)), -np.inf, confidence_R)
            chosen_N = policy.choose(self._look(policy, confidence_R))
            settled_R = chosen_N & self.is_masked_L[self._read]
        positions = self._read[settled_R]
        self.tokens_L[positions] = proposal.tokens_R[settled_R]
        self.logprobs_L[positions] = proposal.logprobs_R[settled_R]
        self.step_map_L[positions] = self.num_forwards
        self._end_step(positions, chosen_N, policy)

    def find_stop(self, policy: Policy, stop_ids: Collection[int]) -> None:
        """Look for a stop token behind which nothing matters any more."""
        # What a policy may still take back is not final; its block must be over.
        if stop_ids and not (policy.remasks and self.step > 0):
            self.stop = find_stop(self.tokens_L[self.new], self.is_masked_L[self.new], stop_ids)

    def _look(self, policy: Policy, confidence_N: NDArray[np.float64]) -> Look:
        plan = self.blocks[0].plan
        return Look(
            confidence_N=confidence_N,
            is_masked_N=self.is_masked_L[self._looked_at],
            uniforms_N=self.uniforms(Stream.ORDER, self._looked_at) if not policy.is_deterministic else confidence_N,
            quota=plan[self.step],
            step=self.step,
            num_steps=len(plan),
        )

    def _end_step(self, settled: NDArray[np.int64], chosen_N: NDArray[np.bool_], policy: Policy) -> None:
        self.is_masked_L[settled] = False
        if policy.remasks:
            taken_back = self._looked_at[~chosen_N & ~self.is_masked_L[self._looked_at]]
            self.tokens_L[taken_back] = self.placeholder
            self.is_masked_L[taken_back] = True
            self.logprobs_L[taken_back] = np.nan
        self.step += 1
        self.num_steps += 1
        block = self.blocks[0]
        is_full = not self.is_masked_L[block.positions].any()
        if self.step == len(block.plan) if policy.remasks else is_full:
            assert is_full, "the last step settles all"
            self.blocks.pop(0)
            self.step, self.is_fresh = 0, True
