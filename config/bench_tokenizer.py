"""The config of the tokenizer benchmark."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from config.base import IntTuple, PositiveInt, Section, TupleOf
from config.benchmark import BenchOutputSection, check_distinct
from config.data import PythonStdlib, TextSourceOrName
from config.tokenizer import NUM_BYTES

TokenizerPeer = Literal["tokenizers", "tiktoken"]


class BenchTokenizerSection(Section):
    """``[bench]``: the vocabularies, the peers, and how they are measured."""

    vocab_sizes: Annotated[IntTuple, Field(min_length=1)] = (4_096, 16_384)
    """Size of each vocabulary, including the 256 bytes; there are no special tokens."""
    pattern: Literal["gpt2", "gpt4", "qwen", "llama3"] = "qwen"
    """The pre-tokenization pattern, which splits text into words."""
    peers: TupleOf[TokenizerPeer] = ()
    """Libraries to compare with, from the dependency group `bench`. tiktoken cannot train."""
    max_bytes: PositiveInt = 12_000_000
    """The text: the first training documents that together have at least so many bytes."""
    rounds: Annotated[int, Field(ge=2)] = 5
    """Measured rounds of each task; in a round, each implementation processes all documents once."""
    warmup: Annotated[int, Field(ge=1)] = 1
    """Rounds before them that are not measured; they fill the word caches of the warm measurements."""

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        check_distinct({"vocab_sizes": self.vocab_sizes, "peers": self.peers})
        small = next((size for size in self.vocab_sizes if size <= NUM_BYTES), None)
        if small is not None:
            raise ValueError(f"vocab_sizes: {small} has no room for a merge beside {NUM_BYTES} bytes; set at least 257")
        return self


class BenchTokenizerConfig(Section):
    """A benchmark of training a tokenizer, encoding and decoding."""

    source: TextSourceOrName = PythonStdlib()
    """The text: a `kind` alone, or a table `[source]` with its `kind`, as `data.source` of a training run."""
    bench: BenchTokenizerSection = BenchTokenizerSection()
    output: BenchOutputSection = BenchOutputSection()
