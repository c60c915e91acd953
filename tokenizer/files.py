"""Tokenizer files: our own (vocab.json, merges.txt, special_tokens.json) and Hugging Face's (tokenizer.json)."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from files.atomic import write_text_atomic
from files.json_files import read_json_object, read_text
from tokenizer.bpe import Tokenizer
from tokenizer.byte_alphabet import bytes_to_chars
from tokenizer.chat_templates import load_chat_template, save_chat_template
from tokenizer.huggingface import (
    build_slow_tokenizer_json,
    from_huggingface,
    read_added_tokens,
    read_id,
    read_merge,
    read_token,
    to_huggingface,
    to_huggingface_config,
)
from tokenizer.options import TokenOptions
from tokenizer.sentencepiece import SentencePieceTokenizer, is_sentencepiece

VOCAB_FILE = "vocab.json"
MERGES_FILE = "merges.txt"
SPECIAL_FILE = "special_tokens.json"
HUGGINGFACE_FILE = "tokenizer.json"
HUGGINGFACE_CONFIG_FILE = "tokenizer_config.json"
ADDED_FILE = "added_tokens.json"

_MERGES_HEADER = "#version: 0.2"
_ROLES = ("mask_token", "eos_token", "pad_token")


def save_tokenizer(tokenizer: Tokenizer, directory: str | os.PathLike[str]) -> None:
    """Write a tokenizer in both formats, and its chat template; existing files are replaced atomically.

    A `SentencePieceTokenizer` is written in Hugging Face's format only, as it was read.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer.chat_template is not None:
        save_chat_template(tokenizer.chat_template, folder)
    if isinstance(tokenizer, SentencePieceTokenizer):
        contents, config = tokenizer.files()
        for name in (SPECIAL_FILE, VOCAB_FILE, MERGES_FILE):
            (folder / name).unlink(missing_ok=True)  # of another tokenizer, which would be loaded instead
        write_text_atomic(folder / HUGGINGFACE_FILE, contents)
        write_text_atomic(folder / HUGGINGFACE_CONFIG_FILE, json.dumps(config, indent=2) + "\n")
        return
    vocab = {bytes_to_chars(token): token_id for token, token_id in sorted(tokenizer.vocab.items(), key=itemgetter(1))}
    merges = [f"{bytes_to_chars(left)} {bytes_to_chars(right)}" for left, right in tokenizer.merges]
    own = {
        "special_tokens": dict(sorted(tokenizer.special_tokens.items(), key=itemgetter(1))),
        **{role: getattr(tokenizer, role) for role in _ROLES},
        "pattern": tokenizer.pattern,
        "normalization": tokenizer.normalization,
        **tokenizer.options.to_json(),
        "fingerprint": tokenizer.fingerprint,
    }
    write_text_atomic(folder / VOCAB_FILE, json.dumps(vocab, ensure_ascii=False))
    write_text_atomic(folder / MERGES_FILE, "\n".join([_MERGES_HEADER, *merges]) + "\n")
    write_text_atomic(folder / SPECIAL_FILE, json.dumps(own, ensure_ascii=False, indent=2) + "\n")
    write_text_atomic(
        folder / HUGGINGFACE_FILE, json.dumps(to_huggingface(tokenizer), ensure_ascii=False, indent=1) + "\n"
    )
    write_text_atomic(folder / HUGGINGFACE_CONFIG_FILE, json.dumps(to_huggingface_config(tokenizer), indent=2) + "\n")


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """Load a tokenizer, with its chat template, from a directory: our own files if special_tokens.json exists, else
    tokenizer.json.

    Without either, vocab.json and merges.txt (and added_tokens.json) are enough if tokenizer_config.json names a class
    whose pattern is known. A tokenizer.json of the SentencePiece kind gives a `SentencePieceTokenizer`.

    Raises:
        ValueError: a file is missing, corrupt or unsupported; names the file and the key.
    """
    folder = Path(directory)
    tokenizer = _load_own(folder) if (folder / SPECIAL_FILE).is_file() else _load_huggingface(folder)
    return tokenizer.with_chat_template(load_chat_template(folder))


def _load_huggingface(folder: Path) -> Tokenizer:
    config_path = folder / HUGGINGFACE_CONFIG_FILE
    config = read_json_object(config_path) if config_path.is_file() else {}
    path = folder / HUGGINGFACE_FILE
    if path.is_file():
        contents = read_json_object(path)
    elif config and (folder / VOCAB_FILE).is_file():
        path = folder
        merges = _split_merges(read_text(folder / MERGES_FILE))
        added = read_json_object(folder / ADDED_FILE) if (folder / ADDED_FILE).is_file() else {}
        with _errors_name_file(config_path):
            contents = build_slow_tokenizer_json(read_json_object(folder / VOCAB_FILE), merges, config, added)
    else:
        raise ValueError(
            f"{folder}: contains no tokenizer; expected {VOCAB_FILE}, {MERGES_FILE} and {SPECIAL_FILE}, "
            f"or {HUGGINGFACE_FILE}"
        )
    with _errors_name_file(path):
        if is_sentencepiece(contents):
            return SentencePieceTokenizer(contents, config)
        tokenizer = from_huggingface(contents, config)
    if path != folder:
        _check_agreement(folder, contents, config, None)
    return tokenizer


def _check_agreement(
    folder: Path, contents: Mapping[str, Any], config: Mapping[str, Any], special_tokens: Mapping[str, int] | None
) -> None:
    """Check that tokenizer.json has the tokens and merges of vocab.json and merges.txt beside it: another program may
    read the other ones. Added tokens may be in any of them.

    Args:
        special_tokens: of special_tokens.json, text to id; None: there is no such file.

    Raises:
        ValueError: they differ; names the files.
    """
    path = folder / HUGGINGFACE_FILE
    with _errors_name_file(path):
        added = {text: token["id"] for text, token in read_added_tokens(contents, config).items()}
        vocab = contents["model"]["vocab"]
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in contents["model"]["merges"]]
    added_ids = set(added.values())

    def drop_added(vocab: Mapping[str, Any]) -> dict[str, Any]:
        return {text: id_ for text, id_ in vocab.items() if id_ not in added_ids and text not in added}

    differing = []
    if (folder / VOCAB_FILE).is_file() and drop_added(read_json_object(folder / VOCAB_FILE)) != drop_added(vocab):
        differing.append(VOCAB_FILE)
    if (folder / MERGES_FILE).is_file() and _split_merges(read_text(folder / MERGES_FILE)) != merges:
        differing.append(MERGES_FILE)
    if special_tokens is not None and special_tokens != added:
        differing.append(SPECIAL_FILE)
    if differing:
        raise ValueError(
            f"{path} and {', '.join(differing)} beside it are of different tokenizers (edited, or of two downloads?): "
            f"correct one of them, or delete the wrong one: {HUGGINGFACE_FILE}, or all of {VOCAB_FILE}, {MERGES_FILE} "
            f"and {SPECIAL_FILE}"
        )


def _load_own(folder: Path) -> Tokenizer:
    special_path, vocab_path, merges_path = folder / SPECIAL_FILE, folder / VOCAB_FILE, folder / MERGES_FILE
    own, vocab = read_json_object(special_path), read_json_object(vocab_path)
    merge_lines = _split_merges(read_text(merges_path))
    with _errors_name_file(vocab_path):
        token_ids = {read_token(token): read_id(token, token_id) for token, token_id in vocab.items()}
    with _errors_name_file(merges_path):
        merges = [read_merge(line) for line in merge_lines]
    with _errors_name_file(special_path):
        special = {text: read_id(text, token_id) for text, token_id in own["special_tokens"].items()}
        pattern = own["pattern"]
    with _errors_name_file(folder):  # an error from here on may concern several files
        tokenizer = Tokenizer(
            token_ids,
            merges,
            special,
            pattern,
            own.get("normalization"),
            **{role: own.get(role) for role in _ROLES},
        ).with_options(TokenOptions.from_json(own))
        expected = own.get("fingerprint")
        if expected is not None and expected != tokenizer.fingerprint:
            raise ValueError(
                f"fingerprint {expected!r} in {SPECIAL_FILE} does not match the contents of {VOCAB_FILE}, "
                f"{MERGES_FILE} and itself: the files are of different tokenizers (an interrupted save?). If you "
                "edited them, remove fingerprint"
            )
    if (folder / HUGGINGFACE_FILE).is_file():
        config_path = folder / HUGGINGFACE_CONFIG_FILE
        config = read_json_object(config_path) if config_path.is_file() else {}
        _check_agreement(folder, read_json_object(folder / HUGGINGFACE_FILE), config, special)
    return tokenizer


def _split_merges(text: str) -> list[str]:
    lines = [line.rstrip("\r") for line in text.split("\n")]
    # Only the first line may be a comment: "#" is a token like any other.
    first = 1 if lines[0].startswith("#version") else 0
    return [line for line in lines[first:] if line]


@contextlib.contextmanager
def _errors_name_file(path: Path) -> Iterator[None]:
    """Prefix the message of a ValueError with the file; an error of an unexpected structure becomes a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: has an unexpected structure ({type(error).__name__}: {error})") from error
