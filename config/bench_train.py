"""The config of the training benchmark."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from config.base import ConfigPath, NonEmptyStr, NonNegativeInt, PositiveInt, Section, TupleOf
from config.model import Architecture, ModelConfig

Precision = Literal["float32", "bfloat16"]
Peer = Literal["transformers"]


class Shape(Architecture):
    """``[[shapes]]``: a model and its batch. Rows are as long as the context, max_position_embeddings."""

    name: NonEmptyStr
    """What the shape is called in the results."""
    vocab_size: Annotated[int, Field(ge=2)]
    """Rows of the embedding; the last one is the mask token."""
    batch_size: PositiveInt
    """Rows of one optimizer step, in one forward."""

    @model_validator(mode="after")
    def _as_qwen3(self) -> Self:
        if not self.qk_norm or self.attention_bias:
            raise ValueError("the peer is a Qwen3, so shapes need qk_norm = true and attention_bias = false")
        return self

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.batch_size * self.max_position_embeddings

    @property
    def mask_token(self) -> int:
        """The last token of the vocabulary."""
        return self.vocab_size - 1

    def complete(self) -> ModelConfig:
        """What the model is built from."""
        return ModelConfig(**self.model_dump(exclude={"name", "batch_size"}), mask_token_id=self.mask_token)


class BenchSection(Section):
    """``[bench]``: what is measured, and how."""

    precisions: Annotated[TupleOf[Precision], Field(min_length=1)] = ("float32", "bfloat16")
    """Of matrix products (autocast); weights are float32."""
    peers: TupleOf[Peer] = ()
    """Other libraries that train the same shapes, step by step in turn with ours; they are in the group `bench`."""
    rounds: Annotated[int, Field(ge=2)] = 12
    """Measured steps of each contestant in each case."""
    warmup: NonNegativeInt = 2
    """Rounds before that which do not count."""
    threads: PositiveInt | None = None
    """CPU threads of torch. None: one for each core that the process may use."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one."""
    seed: NonNegativeInt = 0
    """Of weights, tokens and noise."""


class OutputSection(Section):
    """``[output]``: where results are kept beside the terminal."""

    directory: ConfigPath | None = None
    """Gets training_speed.md and training_speed.jsonl, replaced where they are; None: nothing is written."""


class BenchTrainConfig(Section):
    """A training benchmark: every shape in every precision."""

    shapes: Annotated[TupleOf[Shape], Field(min_length=1)]
    bench: BenchSection = BenchSection()
    output: OutputSection = OutputSection()

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        lists = {"shapes.name": [shape.name for shape in self.shapes]}
        lists |= {"bench.precisions": list(self.bench.precisions), "bench.peers": list(self.bench.peers)}
        for key, values in lists.items():
            twice = next((value for value in values if values.count(value) > 1), None)
            if twice is not None:
                raise ValueError(f"{key}: {twice!r} is given twice")
        return self
