"""``[data]`` and ``[likelihood]`` of ``diffusionlm-eval``: the text, and how it is scored."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from config.base import NonNegativeInt, PositiveInt, Section
from config.data import SourceOrName
from config.generation import GenerationConfig


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
