"""Check that a directory's tokenizer fits its model, by the JSON of its files, without building the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.model import ModelConfig
from files.json_files import read_json_object
from tokenizer import Tokenizer

VOCAB_FILE = "vocab.json"
"""Files that this project writes; transformers' slow tokenizers have the second one too."""
TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"


@dataclass(frozen=True)
class Vocabulary:
    """The ids of a tokenizer."""

    ordinary_tokens: dict[int, str]
    """Id -> token as spelled in the file, of the tokens that are not special."""
    size: int
    """Largest id + 1, with special tokens."""

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> Vocabulary:
        ordinary_tokens = {token_id: token.decode(errors="replace") for token, token_id in tokenizer.vocab.items()}
        return cls(ordinary_tokens, tokenizer.vocab_size)


def read_vocabulary(directory: Path) -> Vocabulary | None:
    """Read the ids of a directory's tokenizer. None: it has none, or `load_tokenizer` has to report what is wrong."""
    try:
        if not (directory / TOKENIZER_FILE).is_file() and not (directory / VOCAB_FILE).is_file():
            return None
        config = _read_json_or_empty(directory / TOKENIZER_CONFIG_FILE)
        contents = _read_json_or_empty(directory / TOKENIZER_FILE)
        vocab = contents["model"]["vocab"] if contents else _read_json_or_empty(directory / VOCAB_FILE)
        if isinstance(vocab, list):  # SentencePiece's unigrams: (text, score), in the order of ids
            vocab = {piece[0]: token_id for token_id, piece in enumerate(vocab)}
        special = {(token["content"], token["id"]) for token in contents.get("added_tokens") or []}
        special |= {(token["content"], int(n)) for n, token in (config.get("added_tokens_decoder") or {}).items()}
        special |= set(_read_json_or_empty(directory / "added_tokens.json").items())
        for file in (config, _read_json_or_empty(directory / "special_tokens_map.json")):
            special |= {(text, vocab[text]) for text in _read_role_tokens(file) if text in vocab}
        return _build_vocabulary(vocab, special)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None


def _read_json_or_empty(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _read_role_tokens(config: dict[str, Any]) -> Iterator[str]:
    """Read the tokens with a role, such as ``eos_token``. transformers makes all of them special tokens."""
    tokens = [value for key, value in config.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(key) or []
        tokens += extra.values() if isinstance(extra, dict) else extra
    texts = [token.get("content") if isinstance(token, dict) else token for token in tokens]
    yield from (text for text in texts if isinstance(text, str))


def _build_vocabulary(vocab: dict[str, int], special: set[tuple[str, int]]) -> Vocabulary:
    special_ids = {token_id for _, token_id in special}
    ordinary_tokens = {token_id: text for text, token_id in vocab.items() if token_id not in special_ids}
    return Vocabulary(ordinary_tokens, max([*ordinary_tokens, *special_ids], default=-1) + 1)


def check_vocabulary(vocabulary: Vocabulary, config: ModelConfig, directory: Path) -> None:
    """Reject a directory's tokenizer if it cannot be the one that its model was trained with.

    Raises:
        ValueError: it has more ids than the embedding has rows (fewer are usual), or the mask token is not special.
    """
    if vocabulary.size > config.vocab_size:
        raise ValueError(
            f"{directory}: the tokenizer has {vocabulary.size} ids, but the model has vocab_size = "
            f"{config.vocab_size}: use the tokenizer that the model was trained with, or, if only the mask token has "
            "no row in the embedding, add one with diffusionlm-convert and [diffusion]"
        )
    text = None if config.mask_token_id is None else vocabulary.ordinary_tokens.get(config.mask_token_id)
    if text is not None:
        raise ValueError(
            f"{directory}: mask_token_id = {config.mask_token_id} is the ordinary token {text!r} of the tokenizer: "
            "correct mask_token_id in config.json, or make the token special in the tokenizer's files"
        )
