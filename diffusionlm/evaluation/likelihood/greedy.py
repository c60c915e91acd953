"""Whether greedy decoding yields a continuation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from config.evaluation.likelihood import AnswerLikelihoodConfig
from diffusionlm.evaluation.likelihood.answers import BlockedAnswer
from diffusionlm.evaluation.likelihood.copies import CopyTable
from diffusionlm.evaluation.likelihood.scoring import AnswerBuilder, ScoringRequest, split_into_groups
from diffusionlm.models.transformer import Transformer


def greedy_matches(
    model: Transformer, requests: Sequence[ScoringRequest], config: AnswerLikelihoodConfig | None = None
) -> list[bool]:
    """Decode each continuation greedily, and compare.

    All its tokens are masked. In each step the most probable token of the most confident masked position is committed,
    the first of equals: as LLaDA's published evaluation does (Nie et al. 2025), and as `generate` with
    ``low_confidence`` and one token per step. In block-causal attention each block is decoded so, after the blocks
    before it. Autoregressive models predict the tokens in order.

    Decoding of a continuation stops at the first wrong token. Until then all blocks are decoded at once, since those
    before them are the continuation's own; so a continuation takes at most as many forwards as its longest block has
    tokens.

    Raises:
        ValueError: as `score_continuations`.
    """
    config = AnswerLikelihoodConfig() if config is None else config
    builder = AnswerBuilder.from_model(model.config, config)
    results: list[bool] = []
    for group in split_into_groups(requests, lambda item: len(item.context) + len(item.continuation), config):
        states = [
            _GreedyState(builder.build(item.context, item.continuation, f"continuation {len(results) + index}"))
            for index, item in enumerate(group)
        ]
        while active := [state for state in states if state.is_matching and state.masked_positions]:
            table = CopyTable(builder.layout, cfg_scale=config.cfg_scale, reads_top=True)
            readers = [state.add_copies(table) for state in active]
            table.compute(model, config.batch_tokens)
            for reader in readers:
                reader()
        results += [state.is_matching for state in states]
    return results


class _GreedyState:
    """A continuation of which some tokens are decoded, all of them right until `is_matching` is False."""

    def __init__(self, answer: BlockedAnswer) -> None:
        self._answer = answer
        self.masked_positions = {number: block.positions for number, block in enumerate(answer.blocks)}
        """Number of each unfinished block -> its masked positions."""
        self.is_matching = True

    def add_copies(self, table: CopyTable) -> Callable[[], None]:
        """Add the unfinished blocks to a table. Returns a function that commits a token of each once it is computed."""
        answer = self._answer
        handles = {
            number: table.add(
                answer.clean_tokens,
                answer.mask_block(answer.blocks[number], positions),
                answer.tokens_T[positions],
                answer.num_context,
            )
            for number, positions in self.masked_positions.items()
        }

        def read() -> None:
            for number, handle in handles.items():
                self._commit(number, *handle.read_top())

        return read

    def _commit(self, number: int, tokens_M: NDArray[np.float64], log_probabilities_M: NDArray[np.float64]) -> None:
        positions = self.masked_positions.pop(number)
        is_right_M = tokens_M == self._answer.tokens_T[positions]
        if self._answer.layout.is_autoregressive:
            self.is_matching &= bool(is_right_M.all())
            return
        chosen = int(log_probabilities_M.argmax())
        self.is_matching &= bool(is_right_M[chosen])
        if len(positions) > 1:
            self.masked_positions[number] = np.delete(positions, chosen)
