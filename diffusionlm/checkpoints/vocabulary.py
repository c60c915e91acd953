"""Whether a directory's tokenizer fits its model, from the JSON of its files alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.model import ModelConfig

OWN, TOKENIZER, SLOW = "special_tokens.json", "tokenizer.json", "vocab.json"
TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True)
class Vocabulary:
    """The ids of a tokenizer."""

    ordinary_tokens: dict[int, str]
    """Tokens that text becomes: their spelling in the file, by id."""
    size: int
    """Largest id + 1, special tokens included."""


def read_vocabulary(directory: Path) -> Vocabulary | None:
    """The ids of a directory's tokenizer. None: it has none, or files that only `load_tokenizer` can judge."""
    try:
        if (directory / OWN).is_file():
            special = set(_read_json_object(directory / OWN)["special_tokens"].items())
            return _build_vocabulary(_read_json_object(directory / SLOW), special)
        if not (directory / TOKENIZER).is_file() and not (directory / SLOW).is_file():
            return None
        config = _read_json_object(directory / TOKENIZER_CONFIG)
        contents = _read_json_object(directory / TOKENIZER)
        vocab = contents["model"]["vocab"] if contents else _read_json_object(directory / SLOW)
        if isinstance(vocab, list):  # of SentencePiece's unigrams: text and score, in the order of ids
            vocab = {piece[0]: token_id for token_id, piece in enumerate(vocab)}
        special = {(token["content"], token["id"]) for token in contents.get("added_tokens") or []}
        special |= {(token["content"], int(n)) for n, token in (config.get("added_tokens_decoder") or {}).items()}
        named = [
            *_read_role_tokens(config),
            *_read_role_tokens(_read_json_object(directory / "special_tokens_map.json")),
        ]
        special |= set(_read_json_object(directory / "added_tokens.json").items())
        special |= {(text, vocab[text]) for text in named if text in vocab}
        return _build_vocabulary(vocab, special)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None


def _read_json_object(path: Path) -> dict[str, Any]:
    contents = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not isinstance(contents, dict):
        raise TypeError(f"{path} holds no JSON object")
    return contents


def _read_role_tokens(config: dict[str, Any]) -> Iterator[str]:
    """Texts that a file gives a role: transformers makes them special, added tokens or not."""
    named = [value for key, value in config.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(key) or []
        named += more.values() if isinstance(more, dict) else more
    texts = [token.get("content") if isinstance(token, dict) else token for token in named]
    yield from (text for text in texts if isinstance(text, str))


def _build_vocabulary(vocab: dict[str, int], special: set[tuple[str, int]]) -> Vocabulary:
    special_ids = {token_id for _, token_id in special}
    ordinary_tokens = {token_id: text for text, token_id in vocab.items() if token_id not in special_ids}
    return Vocabulary(ordinary_tokens, max([*ordinary_tokens, *special_ids], default=-1) + 1)


def check_vocabulary(vocabulary: Vocabulary, config: ModelConfig, directory: Path) -> None:
    """Refuse the tokenizer of a directory if it is not the one that its model was made with.

    Raises:
        ValueError: it has more ids than the embedding has rows (fewer are usual), or the mask token is an ordinary one.
    """
    if vocabulary.size > config.vocab_size:
        raise ValueError(
            f"{directory}: its tokenizer has {vocabulary.size} ids, the last ones outside the model's vocabulary of "
            f"{config.vocab_size} tokens, which are the rows of its embedding: put the tokenizer there that the model "
            "was trained with, or, if only the mask token is outside, let diffusionlm-convert add a row with "
            "[diffusion]"
        )
    text = None if config.mask_token_id is None else vocabulary.ordinary_tokens.get(config.mask_token_id)
    if text is not None:
        raise ValueError(
            f"{directory}: mask_token_id = {config.mask_token_id} is the ordinary token {text!r} of its tokenizer: "
            "correct mask_token_id in config.json, or declare the token as an added one in the tokenizer's files"
        )
