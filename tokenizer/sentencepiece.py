"""SentencePiece tokenizers (Gemma, Llama 2, Mistral): BPE over characters with byte fallback.

A space is U+2581, merges may cross words, and a character without a token becomes its bytes (`<0xE2>`). The
`tokenizers` library encodes; this module decodes.
"""

import hashlib
import importlib
import json
import re
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

from tokenizer.bpe import Tokenizer, surrogate_error
from tokenizer.huggingface import (
    ROLES,
    WELL_KNOWN_TOKENS,
    check_model,
    read_added_tokens,
    read_bos,
    read_id,
    read_role_token,
    select_role_token,
)
from tokenizer.special_tokens import SpecialTokens, TokenOptions

SPACE = "\u2581"
"""The character for a space in such a vocabulary."""

_BYTE = re.compile(rb"<0x([0-9A-F]{2})>")
_FRAMING = ("truncation", "padding", "post_processor")


def is_sentencepiece(contents: Mapping[str, Any]) -> bool:
    """Check whether the contents of a tokenizer.json describe a SentencePiece tokenizer."""
    model = contents.get("model")
    is_byte_level = any(step.get("type") == "ByteLevel" for step in _steps(contents, "pre_tokenizer"))
    return isinstance(model, dict) and bool(model.get("byte_fallback")) and not is_byte_level


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece tokenizer with the interface of `Tokenizer`.

    `encode` returns the ids of the `tokenizers` library without the tokens of a post-processor. `special_tokens` are
    the added tokens that are marked special and those with a role in tokenizer_config.json; other added tokens (line
    breaks, for instance) are ordinary tokens. `vocab` contains the ordinary tokens as the file spells them, in UTF-8;
    `merges` is empty.

    Decoding restores the text exactly, except for U+2581 in it, which becomes a space as in the library. If the file
    adds a space before texts (Llama 2), `decode` removes it, as the library does; `decode_bytes`, which is meant for
    parts of a text, does not. If the file adds it only before texts that do not begin with a space (Metaspace of
    Mistral), the first space of a text is lost, as in the library.

    Args:
        contents: contents of tokenizer.json.
        config: contents of tokenizer_config.json.

    Raises:
        ValueError: something is unsupported or contradictory, or the library is not installed.
    """

    def __init__(self, contents: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        model = contents["model"]
        _check(contents, model)
        ids = {text: read_id(text, token_id) for text, token_id in model["vocab"].items()}
        added = dict(sorted(read_added_tokens(contents, config).items(), key=lambda item: int(item[1]["id"])))
        for text in added.keys() & {read_role_token(role, config) for role in ROLES}:
            added[text]["special"] = True  # as in transformers
        ids |= {text: token["id"] for text, token in added.items()}
        special = {text: ids[text] for text, token in added.items() if token["special"]}
        self._file = json.dumps({**contents, "added_tokens": list(added.values())}, ensure_ascii=False)
        self._config = dict(config)
        super().__init__(
            vocab={text.encode(): token_id for text, token_id in ids.items() if text not in special},
            merges=(),
            special_tokens=special,
            pattern="",
            normalization=None,
            **{role: select_role_token(role, special, config) for role in WELL_KNOWN_TOKENS},
        )
        bos_token, adds_bos = read_bos(contents, config, special)
        self.options = TokenOptions(bool(model.get("ignore_merges")), bos_token=bos_token, adds_bos=adds_bos)
        self.strips_first_space = _prepends_space(contents)

    def with_mask_token(self, text: str, token_id: int) -> Tokenizer:
        if self.special_tokens.get(text) != token_id:
            raise ValueError(
                f"{text!r} with the id {token_id} is not among the special tokens: add it to the files first"
            )
        masked = SentencePieceTokenizer(json.loads(self._file), {**self._config, "mask_token": text})
        return masked.with_chat_template(self.chat_template)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything that determines ids and text."""
        contents = {key: value for key, value in json.loads(self._file).items() if key not in _FRAMING}
        roles = [self.mask_token, self.eos_token, self.pad_token, self.bos_token, self.options.adds_bos]
        text = json.dumps([contents, sorted(self.special_tokens.items()), roles], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def files(self) -> tuple[str, dict[str, Any]]:
        """Return the text of tokenizer.json and the contents of tokenizer_config.json."""
        return self._file, dict(self._config)

    def _encode_words(self, text: str, adds_space: bool = True) -> list[int]:
        try:
            ids: list[int] = _build_library(self._file, adds_space).encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError):
            raise surrogate_error(text) from None
        return ids

    def _prepare(self) -> None:
        contents = json.loads(self._file)
        flagged = (
            {token["content"] for token in contents["added_tokens"] if token.get(flag)} & self.special_tokens.keys()
            for flag in ("lstrip", "rstrip", "single_word")
        )
        self._added = SpecialTokens(self.special_tokens, *flagged)
        self._control = SpecialTokens(self.special_tokens)
        self.hidden_ids = frozenset(self.special_tokens.values())
        self._decode_vocab()
        # Some files add a space before the first piece only, and the library treats every text as a first piece.
        schemes = [step.get("prepend_scheme") for step in _steps(contents, "pre_tokenizer")]
        self._adds_space_inside = "first" not in schemes

    def _check(self) -> None:
        token_ids = [*self.vocab.values(), *self.special_tokens.values()]
        if len(set(token_ids)) < len(token_ids):
            raise ValueError("two tokens have one id: make model.vocab and the added tokens agree")

    def _decode_token(self, token: bytes) -> bytes:
        byte = _BYTE.fullmatch(token)
        return token.replace(SPACE.encode(), b" ") if byte is None else bytes([int(byte[1], 16)])


def _check(contents: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    check_model(model, "dropout", "continuing_subword_prefix", "end_of_word_suffix")
    missing = [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in model["vocab"]]
    if missing:
        raise ValueError(f"model.vocab lacks the bytes {', '.join(missing[:4])}: text with them would be lost")
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        for step in _steps(contents, part):
            if not _is_known_step(part, step):
                raise ValueError(
                    f"{part}: {step!r} is unsupported: only steps that replace spaces by {SPACE!r} and back are"
                )


def _is_known_step(part: str, step: Mapping[str, Any]) -> bool:
    match part, step:
        case "pre_tokenizer", {"type": "Split", "behavior": "Removed"}:
            return False
        case (
            ("normalizer", {"type": "Prepend", "prepend": "\u2581"})
            | ("normalizer" | "decoder", {"type": "Replace", "pattern": {"String": " " | "\u2581"}})
            | ("pre_tokenizer", {"type": "Split", "pattern": {"String": " " | "\u2581"}})
            | ("pre_tokenizer" | "decoder", {"type": "Metaspace", "replacement": "\u2581"})
            | ("decoder", {"type": "ByteFallback" | "Fuse" | "Strip"})
        ):
            return step.get("content", " ") in (" ", SPACE)
    return False


def _prepends_space(contents: Mapping[str, Any]) -> bool:
    return any(step["type"] == "Prepend" for step in _steps(contents, "normalizer")) or any(
        step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never"
        for step in _steps(contents, "pre_tokenizer")
    )


def _remove_prepended_space(contents: dict[str, Any]) -> None:
    steps = [step for step in _steps(contents, "normalizer") if step["type"] != "Prepend"]
    contents["normalizer"] = {"type": "Sequence", "normalizers": steps} if steps else None
    for step in _steps(contents, "pre_tokenizer"):
        if step["type"] == "Metaspace":
            step["prepend_scheme"] = "never"


def _steps(contents: Mapping[str, Any], part: str) -> list[dict[str, Any]]:
    step = contents.get(part)
    if step is None:
        return []
    for key in ("normalizers", "pretokenizers", "decoders"):
        if key in step:
            return list(step[key])
    return [step]


@lru_cache(maxsize=4)
def _build_library(file: str, adds_space: bool) -> Any:
    """Build the library's tokenizer of a tokenizer.json, which encodes special tokens as text.

    Args:
        adds_space: whether it adds a space before texts, if the file says so.
    """
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ImportError:
        raise ValueError(
            "this tokenizer.json is a SentencePiece tokenizer, which needs the tokenizers library: "
            "pip install 'diffusionlm[sentencepiece]', or pip install tokenizers"
        ) from None
    contents = json.loads(file) | dict.fromkeys(_FRAMING)
    if not adds_space:
        _remove_prepended_space(contents)
    library = tokenizers.Tokenizer.from_str(json.dumps(contents))
    for token in contents["added_tokens"]:
        library_id = library.token_to_id(token["content"])
        if library_id != token["id"]:
            raise ValueError(
                f"added token {token['content']!r} has the id {token['id']}, but the tokenizers library gives it "
                f"{library_id}: list it in model.vocab of tokenizer.json"
            )
    library.encode_special_tokens = True
    return library
