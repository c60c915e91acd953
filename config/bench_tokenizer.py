"""The config of the tokenizer benchmark."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from config.base import ConfigPath, IntTuple, PositiveInt, Section, TupleOf
from config.data import PythonStdlib, TextSourceOrName
from config.tokenizer import NUM_BYTES

TokenizerPeer = Literal["tokenizers", "tiktoken"]


class BenchTokenizerSection(Section):
    """``[bench]``: what is measured, and how."""

    vocab_sizes: Annotated[IntTuple, Field(min_length=1)] = (4_096, 16_384)
    """Tokens of each vocabulary, the 256 bytes included; there are no special tokens."""
    pattern: Literal["gpt2", "gpt4", "qwen", "llama3"] = "qwen"
    """How text is cut into words."""
    peers: TupleOf[TokenizerPeer] = ()
    """Other libraries that do the same, in turn with ours; they are in the group `bench`. tiktoken does not train."""
    max_bytes: PositiveInt = 12_000_000
    """The first training documents, up to and with the one that brings them to this many bytes."""
    rounds: Annotated[int, Field(ge=2)] = 5
    """Measured rounds of each task; in one, each contestant goes once through all documents."""
    warmup: Annotated[int, Field(ge=1)] = 1
    """Rounds before that which do not count; they fill the caches of words where they are meant to be warm."""

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        for key, values in (("vocab_sizes", self.vocab_sizes), ("peers", self.peers)):
            twice = next((value for value in values if values.count(value) > 1), None)
            if twice is not None:
                raise ValueError(f"{key}: {twice!r} is given twice")
        small = next((size for size in self.vocab_sizes if size <= NUM_BYTES), None)
        if small is not None:
            raise ValueError(f"vocab_sizes: {small} has no room for a merge beside {NUM_BYTES} bytes; set at least 257")
        return self


class BenchTokenizerOutput(Section):
    """``[output]``: where results are kept beside the terminal."""

    directory: ConfigPath | None = None
    """Gets tokenizer_speed.md and tokenizer_speed.jsonl, replaced where they are; None: nothing is written."""


class BenchTokenizerConfig(Section):
    """A benchmark of training, encoding and decoding."""

    source: TextSourceOrName = PythonStdlib()
    """The text: a `kind` alone, or a table `[source]` with its `kind`, as `data.source` of a training run."""
    bench: BenchTokenizerSection = BenchTokenizerSection()
    output: BenchTokenizerOutput = BenchTokenizerOutput()
