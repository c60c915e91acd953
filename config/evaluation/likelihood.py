"""Settings of the likelihood of answers given their context."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from config.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class AnswerLikelihoodConfig(Section):
    """How log-likelihoods of continuations and options are computed: exactly where it is cheaper, else sampled."""

    num_mc_samples: PositiveInt = 128
    """Masked copies of an answer, on average. Answers with at most this many masks are enumerated, without sampling
    error: up to 7 tokens for 128, blocks of 4 tokens for 15; an answer is one block if attention is bidirectional."""
    max_enumerated_forwards: PositiveInt | None = None
    """Enumerate answers of at most this many masks. None: num_mc_samples."""
    racing: bool = True
    """Compare the options of a document with few draws first, and double them until the best option leads every other
    by racing_standard_errors, by each rule that is reported. It changes the cost of sampled options only."""
    racing_first_draws: PositiveInt = 8
    """Least number of draws before the first comparison."""
    racing_standard_errors: PositiveFloat = 3.0
    """Lead that ends a comparison, in standard errors of the difference."""
    block_length: PositiveInt | None = None
    """Tokens per block, counted from the start of the context; a block attends to those before it. None: the model's
    block length; if it has none, bidirectional."""
    bidirectional: bool = False
    """Attend to the whole text, also for a block diffusion model."""
    cfg_scale: NonNegativeFloat = 0.0
    """Classifier-free guidance: logits u + (s + 1)(c - u), where u is computed with the context masked. The values then
    rank options; they are no likelihoods of the model."""
    end_of_text: Literal["none", "unscored", "scored"] = "none"
    """The end-of-text token after a continuation. none (LLaDA): there is none. unscored (Dream): read, but never masked
    or scored. scored: a part of the continuation."""
    batch_tokens: PositiveInt = 8192
    """Tokens of one forward, over all texts in it; at least one text. Texts follow each other without padding."""
    seed: NonNegativeInt = 0
    """Seed of the masks; two models with the same seed are compared on the same masks."""

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        if self.bidirectional and self.block_length is not None:
            raise ValueError(f"bidirectional = true contradicts block_length = {self.block_length}: remove one of them")
        return self
