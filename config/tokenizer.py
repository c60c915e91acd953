"""The whole config of ``diffusionlm-train-tokenizer``."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from config.base import ConfigPath, NonEmptyStr, NonNegativeInt, PositiveInt, Section, TupleOf
from config.data import TextSourceOrName

NUM_BYTES = 256


TRAINING_KEYS = ("vocab_size", "pattern", "max_training_bytes")
"""Keys that say how a tokenizer is trained."""


class TokenizerConfig(Section):
    """``[tokenizer]``: trained on the training documents, unless one is given."""

    path: NonEmptyStr | None = None
    """A directory with a tokenizer. None: the one of the run directory, trained there first."""
    vocab_size: Annotated[int, Field(ge=258)] = 4_096
    """Tokens, end-of-text and mask included."""
    pattern: Literal["gpt2", "gpt4", "qwen", "llama3"] = "qwen"
    """How text is cut into words before the merges."""
    max_training_bytes: PositiveInt = 64_000_000
    """Merges are learnt on the first documents, up to this many bytes."""

    @model_validator(mode="after")
    def _check_path_or_training(self) -> Self:
        # By value, not by what was written: a resolved config writes the defaults as well.
        fields = {name: TokenizerConfig.model_fields[name].default for name in TRAINING_KEYS}
        trained = {name for name, default in fields.items() if getattr(self, name) != default}
        if self.path is not None and trained:
            raise ValueError(f"path names a finished tokenizer, so {', '.join(sorted(trained))} cannot be set as well")
        return self


class TokenizerTrainingConfig(Section):
    """``[tokenizer]``: what is learnt."""

    vocab_size: Annotated[int, Field(gt=NUM_BYTES)] = 4_096
    """Tokens: the 256 bytes, those that are learnt, the special ones. Text with fewer pairs to merge gives fewer."""
    pattern: Literal["gpt2", "gpt4", "qwen", "llama3"] = "qwen"
    """How text is cut into words before the merges."""
    special_tokens: Annotated[TupleOf[NonEmptyStr], Field(min_length=1)] = ("<|endoftext|>", "<|mask|>")
    """They have the last ids, in this order. Text that spells one out is text all the same, here and in training."""
    mask_token: NonEmptyStr = "<|mask|>"
    """The one that stands for noise."""
    eos_token: NonEmptyStr = "<|endoftext|>"
    """The one that ends a document."""
    max_training_bytes: PositiveInt = 1_000_000_000
    """Merges are learnt on the first documents, up to and with the one that brings them to this many bytes."""

    @model_validator(mode="after")
    def _check_special_tokens(self) -> Self:
        special = self.special_tokens
        twice = next((token for token in special if special.count(token) > 1), None)
        if twice is not None:
            raise ValueError(f"special_tokens: {twice!r} is there twice; name each token once")
        for role in ("mask_token", "eos_token"):
            token = getattr(self, role)
            if token not in special:
                raise ValueError(f"{role} = {token!r} is not among special_tokens = {list(special)}: add it there")
        if self.mask_token == self.eos_token:
            raise ValueError(f"mask_token and eos_token are both {self.mask_token!r}; noise must not end documents")
        least = NUM_BYTES + len(special)
        if self.vocab_size < least:
            raise ValueError(
                f"vocab_size = {self.vocab_size} has no room for {NUM_BYTES} bytes and {len(special)} special tokens: "
                f"set at least {least}"
            )
        return self


class TrainTokenizerOutput(Section):
    """``[output]``: where it goes, and who works."""

    directory: ConfigPath
    """Gets the tokenizer's files, whole or not at all. It must not exist, or be empty."""
    workers: NonNegativeInt | None = None
    """Processes that cut text into words; 0: this one. None: one for each core that it may use, if there are several.
    The tokenizer does not depend on it."""


class TrainTokenizerConfig(Section):
    """One call of ``diffusionlm-train-tokenizer``."""

    source: TextSourceOrName
    """A `kind` alone, or a table `[source]` with its `kind`, as `data.source` of a training run."""
    tokenizer: TokenizerTrainingConfig = TokenizerTrainingConfig()
    output: TrainTokenizerOutput
