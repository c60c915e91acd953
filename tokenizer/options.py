"""Options of a tokenizer that Hugging Face files set, beside vocabulary, merges and pattern."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self


@dataclass(frozen=True)
class TokenOptions:
    """Options for the encoding of words and special tokens. The sets contain special tokens by their text."""

    ignore_merges: bool = False
    """A word that is a token becomes that token without applying merges (Llama 3)."""
    visible_tokens: frozenset[str] = frozenset()
    """Tokens that `decode(skip_special=True)` keeps: added tokens that are not marked special, such as `<think>` of
    Qwen3."""
    normalized_tokens: frozenset[str] = frozenset()
    """Tokens that `encode(allow_special=True)` searches after normalization, in the text between the others: added
    tokens that are marked normalized."""
    lstrip_tokens: frozenset[str] = frozenset()
    """Tokens that absorb whitespace before them; `decode` does not restore it."""
    rstrip_tokens: frozenset[str] = frozenset()
    """Tokens that absorb whitespace after them; `decode` does not restore it."""
    single_word_tokens: frozenset[str] = frozenset()
    """Tokens that are recognized only as whole words."""
    bos_token: str | None = None
    """The token at the beginning of texts."""
    adds_bos: bool = False
    """Whether the model expects `bos_token` before a text that is not a chat. `encode` never adds it, see
    `Tokenizer.prefix_ids`."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read the options among ``values``; a missing one has its default."""
        options: dict[str, Any] = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        return cls(**options | {name: frozenset(options[name]) for name in TOKEN_SETS if name in options})

    def to_json(self) -> dict[str, Any]:
        return {name: sorted(value) if name in TOKEN_SETS else value for name, value in asdict(self).items()}

    def check(self, special_tokens: Collection[str]) -> None:
        """Check that all tokens are special tokens.

        Raises:
            ValueError: one is not; names it and its option.
        """
        for name in TOKEN_SETS:
            for text in sorted(getattr(self, name) - set(special_tokens)):
                raise ValueError(f"{name}: {text!r} is not among the special tokens {sorted(special_tokens)}")
        if (self.bos_token is not None or self.adds_bos) and self.bos_token not in special_tokens:
            raise ValueError(f"bos_token {self.bos_token!r} is not among the special tokens {sorted(special_tokens)}")


TOKEN_SETS = ("visible_tokens", "normalized_tokens", "lstrip_tokens", "rstrip_tokens", "single_word_tokens")
"""The options that are sets of special tokens."""
