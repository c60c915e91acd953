"""``[objective]`` with ``kind = "preference"``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import model_validator

from config.base import PositiveFloat, PositiveInt, Section


class BlockLengths:
    """The block lengths of an objective. None is one block for the whole row."""

    @property
    def block_lengths(self) -> Sequence[int | None]:
        """All block lengths, in order."""
        return (None,)

    @property
    def longest_block_length(self) -> int | None:
        """Longest block of all steps: what fills it also fills the shorter ones that divide it."""
        lengths = [length for length in self.block_lengths if length is not None]
        return max(lengths) if lengths else None

    @property
    def final_block_length(self) -> int | None:
        """Block length for decoding with the finished model."""
        return self.longest_block_length


class PreferenceConfig(BlockLengths, Section):
    """Prefer chosen to rejected answers: DPO (Rafailov et al. 2023) with evidence bounds in place of log-likelihoods,
    which is VRPO (LLaDA 1.5); exact DPO for blocks of one token. Needs a source of preferences and a model to start
    from, which is the reference."""

    kind: Literal["preference"] = "preference"
    beta: PositiveFloat = 0.1
    """Strength of the reference: a larger value keeps the model nearer to it."""
    block_length: PositiveInt | None = None
    """Tokens of a block, counted from the start of each conversation. None: the whole answer, with attention in both
    directions."""
    num_draws: PositiveInt = 8
    """Masked versions of each answer, in pairs of opposite noise levels and masks; 1 is used for blocks of one token,
    which leave nothing random. The model and its reference are compared on the same ones. The compute grows with it."""

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.num_draws > 1 and self.num_draws % 2:
            raise ValueError(f"num_draws = {self.num_draws} must be 1 or even, because draws come in opposite pairs")
        return self

    @property
    def block_lengths(self) -> tuple[int | None]:
        return (self.block_length,)
