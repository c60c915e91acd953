"""The config of ``diffusionlm-make-data``."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from config.base import ConfigPath, NonNegativeInt, PositiveInt, Section
from config.data import TextSourceOrName
from config.tokenizer import TokenizerConfig


class MakeDataOutputConfig(Section):
    """``[output]``: directory, size of files, workers."""

    directory: ConfigPath
    """Output directory for the tokens, their tokenizer and an index. If it holds a part of the same data, the command
    continues."""
    shard_tokens: PositiveInt = 100_000_000
    """A shard, and so a file, ends with the document that reaches this many tokens. After an interruption the finished
    shards are kept."""
    workers: NonNegativeInt | None = None
    """Processes that tokenize; 0: this one. None: one per usable core, if there are several. The output does not depend
    on it."""


class MakeDataConfig(Section):
    """Source, tokenizer and output of ``diffusionlm-make-data``."""

    source: TextSourceOrName
    """A `kind` alone, or a table `[source]` with a `kind`, like `data.source` of a training run."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """A path, or options to train a tokenizer on the first training documents."""
    output: MakeDataOutputConfig

    @model_validator(mode="after")
    def _check_is_text(self) -> Self:
        if getattr(self.source, "chat", None) is not None:
            raise ValueError(
                "source.chat: shards hold tokens without prompts and answers, so they cannot hold conversations: train "
                "on the files themselves, with the same table as [data.source]"
            )
        return self
