"""The files of a tokenizer, Hugging Face's: tokenizer.json, tokenizer_config.json and chat_template.jinja."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from files.atomic import write_text_atomic
from files.json_files import read_json_object, read_text
from tokenizer.bpe import Tokenizer
from tokenizer.chat_templates import ChatTemplate
from tokenizer.huggingface import (
    UNSET_ROLES,
    WELL_KNOWN_TOKENS,
    build_slow_tokenizer_json,
    from_huggingface,
    read_role_token,
    to_huggingface,
    to_huggingface_config,
)
from tokenizer.sentencepiece import SentencePieceTokenizer, is_sentencepiece

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
VOCAB_FILE, MERGES_FILE, ADDED_FILE = "vocab.json", "merges.txt", "added_tokens.json"
CHAT_TEMPLATE_FILE, CHAT_TEMPLATE_JSON_FILE = "chat_template.jinja", "chat_template.json"


def save_tokenizer(tokenizer: Tokenizer, directory: str | os.PathLike[str]) -> None:
    """Write a tokenizer and its chat template; existing files are replaced atomically."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer.chat_template is not None:
        save_chat_template(tokenizer.chat_template, folder)
    if isinstance(tokenizer, SentencePieceTokenizer):
        contents, config = tokenizer.files()
    else:
        contents = json.dumps(to_huggingface(tokenizer), ensure_ascii=False, indent=1) + "\n"
        config = to_huggingface_config(tokenizer)
    for name in (VOCAB_FILE, MERGES_FILE):
        (folder / name).unlink(missing_ok=True)  # of another tokenizer
    write_text_atomic(folder / TOKENIZER_FILE, contents)
    write_text_atomic(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """Load a tokenizer, with its chat template, from the tokenizer.json of a directory.

    Without it, vocab.json and merges.txt (and added_tokens.json) are enough if tokenizer_config.json names a class
    whose pattern is known. A tokenizer.json of the SentencePiece kind gives a `SentencePieceTokenizer`.

    Raises:
        ValueError: a file is missing, corrupt or unsupported; names the file and the key.
    """
    folder = Path(directory)
    config = _read_if_there(folder / CONFIG_FILE)
    if older := _read_if_there(folder / "special_tokens.json"):  # of older versions: the roles it does not set are none
        config = {UNSET_ROLES: [role for role in WELL_KNOWN_TOKENS if older.get(role) is None], **config}
    path, contents = folder / TOKENIZER_FILE, _read_if_there(folder / TOKENIZER_FILE)
    try:
        if not path.is_file():
            path = folder
            contents = _read_slow_files(folder, config)
        build = SentencePieceTokenizer if is_sentencepiece(contents) else from_huggingface
        tokenizer = build(contents, config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: has an unexpected structure ({type(error).__name__}: {error})") from error
    return tokenizer.with_chat_template(load_chat_template(folder))


def _read_slow_files(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    if not config or not (folder / VOCAB_FILE).is_file():
        raise ValueError(f"contains no tokenizer; expected {TOKENIZER_FILE}")
    vocab, merges = read_json_object(folder / VOCAB_FILE), read_text(folder / MERGES_FILE).splitlines()
    # Only the first line may be a comment: "#" is a token like any other.
    merges = [line for index, line in enumerate(merges) if line and (index or not line.startswith("#version"))]
    return build_slow_tokenizer_json(vocab, merges, config, _read_if_there(folder / ADDED_FILE))


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def load_chat_template(directory: str | os.PathLike[str]) -> ChatTemplate | None:
    """Load the chat template of a model directory; None if there is none.

    chat_template.jinja takes precedence over chat_template.json, and that over `chat_template` in
    tokenizer_config.json. Of templates by name, in the last two, it is the one called default.

    Raises:
        ValueError: a file cannot be read or has an unexpected structure.
    """
    folder = Path(directory)
    config, template = _read_if_there(folder / CONFIG_FILE), None
    for path in (folder / CONFIG_FILE, folder / CHAT_TEMPLATE_JSON_FILE):
        template = _find_default(path, _read_if_there(path).get("chat_template")) or template
    if (folder / CHAT_TEMPLATE_FILE).is_file():
        template = read_text(folder / CHAT_TEMPLATE_FILE, newline="")
    if template is None:
        return None
    named = {key: read_role_token(key, config) for key in config if key.endswith("_token") and "add_" not in key}
    return ChatTemplate(template, {key: text for key, text in named.items() if text is not None})


def _find_default(path: Path, value: Any) -> str | None:
    """Find the default template of a file, in which it may be one of several by name."""
    match value:
        case None | str():
            return value
        case [*entries] if all(isinstance(entry, dict) and isinstance(entry.get("template"), str) for entry in entries):
            return next((str(entry["template"]) for entry in entries if entry.get("name") == "default"), None)
    raise ValueError(f"{path}: chat_template is neither a string nor a list of objects with name and template")


def save_chat_template(template: ChatTemplate, directory: str | os.PathLike[str]) -> None:
    """Write chat_template.jinja. It begins with definitions of its special tokens, so that transformers and
    `load_chat_template` need no other file."""
    source = template.source
    for key, text in sorted(template.tokens.items()):
        if key in source and f"set {key} = " not in source:
            source = f"{{%- set {key} = {json.dumps(text, ensure_ascii=False)} %}}\n{source}"
    write_text_atomic(Path(directory) / CHAT_TEMPLATE_FILE, source)
