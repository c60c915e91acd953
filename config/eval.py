"""The whole config of ``diffusionlm-eval``."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from config.base import NonNegativeInt, PositiveInt, Section
from config.data import SourceOrName
from config.generation import GenerationConfig
from config.infer import InferModelConfig


class EvalDataConfig(Section):
    """``[data]``: the text, and the rows that are made of it."""

    source: SourceOrName | None = None
    """A `kind` alone, or a table `[data.source]` with its `kind`, as for training; required, here or as --data."""
    split: Literal["validation", "train", "all"] = "validation"
    """Which documents of the source: those that a training run validates on, or those that it trains on. all: every
    document of a files source, which --data implies."""
    rows: Literal["packed", "padded"] = "packed"
    """packed: documents follow each other without gaps, and see only themselves; one that is cut by the end of a row
    goes on in the next without what came before. padded: one document a row, cut at the row's length."""
    row_length: PositiveInt | None = None
    """Tokens of a row. None: the model's context, at most 1024."""
    begin_with_eos: bool | None = None
    """Each document begins with the end-of-text token, which is context and not scored: shifted outputs predict the
    first token of a text from it. None: as the model was trained (begin_with_eos in its config.json)."""
    end_with_eos: bool = True
    """Each document ends in the end-of-text token, which is scored as any other, and has no bytes."""
    max_rows: NonNegativeInt = 512
    """Rows that are evaluated; 0: all."""
    shuffle_window: NonNegativeInt = 10_000
    """Documents are shuffled within windows of this many before the rows are taken; 0: the first ones."""
    seed: NonNegativeInt = 0
    """Of the shuffling."""

    @model_validator(mode="after")
    def _check_split(self) -> Self:
        if self.split == "all" and self.source is not None and self.source.kind != "files":
            raise ValueError(
                f'split = "all" is for a source of files; choose "validation" or "train" of "{self.source.kind}"'
            )
        return self


class NelboConfig(Section):
    """``[likelihood]`` with ``kind = "nelbo"``: the bound of masked or block diffusion; exact for blocks of one token,
    and so for autoregressive models."""

    kind: Literal["nelbo"] = "nelbo"
    block_length: PositiveInt | None = None
    """Tokens of a block, counted from each document's start; a block sees those before it. None: the model's; where it
    has none, the whole document at once."""
    bidirectional: bool = False
    """The whole document at once, also for a model of blocks."""
    num_mc_samples: PositiveInt = 4
    """Masked versions of each row; one is all there is for blocks of one token."""
    batch_size: PositiveInt = 32
    """Rows of one forward."""
    seed: NonNegativeInt = 0
    """Of the masks: two models are compared on the same ones."""

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        if self.bidirectional and self.block_length is not None:
            raise ValueError(
                f"bidirectional = true and block_length = {self.block_length} contradict each other: remove one"
            )
        return self


class SamplerLikelihoodConfig(Section):
    """``[likelihood]`` with ``kind = "sampler"``: the exact likelihood of decoding in a deterministic order."""

    kind: Literal["sampler"] = "sampler"
    generation: GenerationConfig = GenerationConfig()
    """The sampler: blocks, steps, attention, and a remasking_strategy without chance. max_new_tokens and
    stop_token_ids play no part, and the temperature is 1."""
    batch_size: PositiveInt = 32
    """Documents of one forward."""


LikelihoodConfig = Annotated[NelboConfig | SamplerLikelihoodConfig, Field(discriminator="kind")]


class EvalOutputConfig(Section):
    """``[output]``: what is printed."""

    format: Literal["text", "json"] = "text"
    """text: a table. json: one object on a line."""


class EvalConfig(Section):
    """One call of ``diffusionlm-eval``."""

    model: InferModelConfig = InferModelConfig()
    data: EvalDataConfig = EvalDataConfig()
    likelihood: LikelihoodConfig = NelboConfig()
    output: EvalOutputConfig = EvalOutputConfig()
