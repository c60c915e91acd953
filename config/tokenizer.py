"""``[tokenizer]`` of a training config, and the whole config of ``diffusionlm-train-tokenizer``."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from config.base import ConfigPath, NonEmptyStr, NonNegativeInt, PositiveInt, Section, TupleOf, check_distinct
from config.data import TextSourceOrName

NUM_BYTES = 256
TRAINING_KEYS = ("vocab_size", "pattern", "special_tokens", "max_training_bytes")
"""Keys of `TokenizerConfig` that only matter when a tokenizer is trained."""

SplitPattern = Literal["gpt2", "gpt4", "qwen", "llama3"]
"""Regular expression that splits text into words; merges do not cross their borders."""


def _check_special_tokens(vocab_size: int, special_tokens: tuple[str, ...]) -> None:
    check_distinct({"special_tokens": special_tokens})
    min_size = NUM_BYTES + len(special_tokens)
    if vocab_size < min_size:
        raise ValueError(
            f"vocab_size = {vocab_size} is too small for {NUM_BYTES} bytes and {len(special_tokens)} special tokens: "
            f"set at least {min_size}"
        )


class TokenizerConfig(Section):
    """``[tokenizer]``: a tokenizer directory, or the options to train one on the training documents."""

    path: NonEmptyStr | None = None
    """Directory of a tokenizer. None: train one in the run directory."""
    vocab_size: Annotated[int, Field(ge=258)] = 4_096
    """Tokens, with end-of-text and mask."""
    pattern: SplitPattern = "qwen"
    """Pattern that splits text into words before merging."""
    special_tokens: TupleOf[NonEmptyStr] = ()
    """Special tokens beside end-of-text and mask, such as those of a chat template: `["<|im_start|>", "<|im_end|>"]`
    for chatml."""
    max_training_bytes: PositiveInt = 64_000_000
    """Learn merges on the first documents, up to this many bytes."""

    @model_validator(mode="after")
    def _check_path_or_training(self) -> Self:
        # Compared by value, because a resolved config also contains the defaults.
        defaults = {name: TokenizerConfig.model_fields[name].default for name in TRAINING_KEYS}
        changed = sorted(name for name, default in defaults.items() if getattr(self, name) != default)
        if self.path is not None and changed:
            raise ValueError(f"path = {self.path!r} is a trained tokenizer: remove {', '.join(changed)}, or path")
        _check_special_tokens(self.vocab_size, self.all_special_tokens)
        return self

    @property
    def all_special_tokens(self) -> tuple[str, ...]:
        """End-of-text, mask and `special_tokens`, in the order of their ids."""
        return ("<|endoftext|>", "<|mask|>", *self.special_tokens)


class TokenizerTrainingConfig(Section):
    """The table ``[tokenizer]`` of diffusionlm-train-tokenizer."""

    vocab_size: Annotated[int, Field(gt=NUM_BYTES)] = 4_096
    """Tokens: the 256 bytes, the merges and the special tokens. There are fewer if the text has fewer pairs to
    merge."""
    pattern: SplitPattern = "qwen"
    """Pattern that splits text into words before merging."""
    special_tokens: Annotated[TupleOf[NonEmptyStr], Field(min_length=1)] = ("<|endoftext|>", "<|mask|>")
    """Special tokens, which get the last ids in this order. Text that spells one is encoded as ordinary text."""
    mask_token: NonEmptyStr = "<|mask|>"
    """The mask token."""
    eos_token: NonEmptyStr = "<|endoftext|>"
    """The end-of-text token."""
    max_training_bytes: PositiveInt = 1_000_000_000
    """Learn merges on the first documents; the last one is that which reaches this many bytes."""

    @model_validator(mode="after")
    def _check_roles(self) -> Self:
        special = self.special_tokens
        _check_special_tokens(self.vocab_size, special)
        for role in ("mask_token", "eos_token"):
            token = getattr(self, role)
            if token not in special:
                raise ValueError(f"{role} = {token!r} is not among special_tokens = {list(special)}: add it there")
        if self.mask_token == self.eos_token:
            raise ValueError(f"mask_token and eos_token are both {self.mask_token!r}: choose different tokens")
        return self


class TrainTokenizerOutput(Section):
    """``[output]``: target directory and processes."""

    directory: ConfigPath
    """Directory of the tokenizer, written completely or not at all. It must not exist, or must be empty."""
    workers: NonNegativeInt | None = None
    """Worker processes that split text into words; 0: no workers. None: one per available core, if there are several.
    The tokenizer does not depend on it."""


class TrainTokenizerConfig(Section):
    """The whole config of ``diffusionlm-train-tokenizer``."""

    source: TextSourceOrName
    """A `kind`, or a table `[source]` with a `kind`, as `data.source` of a training run."""
    tokenizer: TokenizerTrainingConfig = TokenizerTrainingConfig()
    output: TrainTokenizerOutput
