"""The whole config of ``diffusionlm-make-data``."""

from __future__ import annotations

from typing import Literal

from config.base import ConfigPath, NonNegativeInt, PositiveInt, Section
from config.data import TextSourceOrName
from config.tokenizer import TokenizerConfig


class MakeDataOutputConfig(Section):
    """``[output]``: what is written, and how."""

    directory: ConfigPath
    """Where the tokens go, with their tokenizer and an index. If it holds a part of the same data, the rest is made."""
    format: Literal["bin", "parquet", "dat"] = "bin"
    """bin: flat files of ids with the documents' offsets beside them, for training. parquet: a column `input_ids`, for
    other programs; it is read into memory for training. dat: one flat file for each split, documents ended by
    end-of-text."""
    shard_tokens: PositiveInt = 100_000_000
    """A file ends with the document that brings it to this many tokens; what an interrupted command has done is kept
    up to the last one. (dat has one file; the same holds for its parts.)"""
    workers: NonNegativeInt | None = None
    """Processes that tokenise; 0: this one. None: one for each core that it may use, if there are several. What is
    written does not depend on it."""


class MakeDataConfig(Section):
    """One call of ``diffusionlm-make-data``."""

    source: TextSourceOrName
    """A `kind` alone, or a table `[source]` with its `kind`, as `data.source` of a training run."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Given, or trained on the first training documents."""
    output: MakeDataOutputConfig
