"""Likelihoods: of answers given their context, and ``[data]`` and ``[likelihood]`` of texts."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from config.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section
from config.data import SourceOrName
from config.generation import GenerationConfig


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
    block length; if it has none, bidirectional; of token-causal text the exact next-token likelihood."""
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


class EvalDataConfig(Section):
    """``[data]``: the text, and how it is cut into rows."""

    source: SourceOrName | None = None
    """A `kind`, or a table `[data.source]` with a `kind`, as for training; required, here or as --data."""
    split: Literal["validation", "train", "all"] = "validation"
    """Documents of the source: those a training run validates on, or those it trains on. all: every document of a files
    source; --data sets it."""
    rows: Literal["packed", "padded"] = "packed"
    """packed: documents follow each other without padding and attend only to themselves; one that is cut by the end of
    a row continues in the next without its context. padded: one document per row, truncated to the row's length."""
    row_length: PositiveInt | None = None
    """Tokens per row. None: the model's context length, at most 1024."""
    begin_with_eos: bool | None = None
    """Start each document with the end-of-text token, which is not scored: shifted outputs predict the first token of
    the text from it. None: as the model was trained (begin_with_eos in its config.json)."""
    end_with_eos: bool = True
    """End each document with the end-of-text token, which is scored like any other and has no bytes."""
    max_rows: NonNegativeInt = 512
    """Number of rows that are evaluated; 0: all."""
    shuffle_window: NonNegativeInt = 10_000
    """Shuffle documents within windows of this many before rows are read; 0: keep their order."""
    seed: NonNegativeInt = 0
    """Seed of the shuffling."""

    @model_validator(mode="after")
    def _check_split(self) -> Self:
        if self.split == "all" and self.source is not None and self.source.kind != "files":
            raise ValueError(
                f'split = "all" needs a source of files, but source.kind = "{self.source.kind}": '
                'choose "validation" or "train"'
            )
        return self


class NelboConfig(Section):
    """``[likelihood]`` with ``kind = "nelbo"``: the bound of masked or block diffusion; exact for blocks of one token
    and for autoregressive models."""

    kind: Literal["nelbo"] = "nelbo"
    block_length: PositiveInt | None = None
    """Tokens per block, counted from each document's start; a block attends to those before it. None: the model's block
    length; if it has none, bidirectional."""
    next_token: bool = False
    """Exact next-token likelihood, of an autoregressive model or of token-causal text (clean_alignment)."""
    bidirectional: bool = False
    """Mask and attend to the whole document, also for a block diffusion model."""
    num_mc_samples: PositiveInt = 4
    """Masked versions of each row; 1 is used for blocks of one token, which leave nothing random."""
    batch_size: PositiveInt = 32
    """Rows per forward."""
    seed: NonNegativeInt = 0
    """Seed of the masks; two models with the same seed are compared on the same masks."""
    prompt_gap: bool = False
    """For conversations, with data.rows = "padded": score the answers a second time, each to the prompt of another
    conversation, and report the difference. It is positive if the model reads its prompts."""

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        if self.bidirectional and self.block_length is not None:
            raise ValueError(f"bidirectional = true contradicts block_length = {self.block_length}: remove one of them")
        if self.next_token and (self.bidirectional or self.block_length is not None):
            raise ValueError("next_token = true is causal: remove block_length and bidirectional")
        return self


class SamplerLikelihoodConfig(Section):
    """``[likelihood]`` with ``kind = "sampler"``: the exact likelihood of decoding in a deterministic order."""

    kind: Literal["sampler"] = "sampler"
    generation: GenerationConfig = GenerationConfig()
    """The sampler: blocks, steps, attention and a deterministic remasking_strategy. max_new_tokens and stop_token_ids
    are ignored; the temperature is 1."""
    batch_size: PositiveInt = 32
    """Documents per forward."""


LikelihoodConfig = Annotated[NelboConfig | SamplerLikelihoodConfig, Field(discriminator="kind")]


def check_prompt_gap(likelihood: LikelihoodConfig, data: EvalDataConfig) -> None:
    """Check that each row is a conversation, if the gap of prompts is asked for.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(likelihood, NelboConfig) or not likelihood.prompt_gap or data.source is None:
        return
    if getattr(data.source, "chat", None) is None:
        raise ValueError("likelihood.prompt_gap = true needs conversations: set data.source.chat, or remove it")
    if data.rows != "padded":
        raise ValueError(
            f'likelihood.prompt_gap = true needs rows of one conversation, and data.rows = "{data.rows}": set "padded"'
        )
