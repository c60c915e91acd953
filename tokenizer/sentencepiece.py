"""Tokenizers of the SentencePiece kind (Gemma, Llama 2, Mistral): BPE over characters, with bytes to fall back on.

Spaces are written as U+2581, there are no words that merges stop at, and a character that has no token becomes its
bytes (`<0xE2>`). Encoding is done by the `tokenizers` library; decoding is ours.
"""

import copy
import hashlib
import importlib
import json
import re
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizer.bpe import Tokenizer, surrogate_error
from tokenizer.huggingface import (
    WELL_KNOWN_TOKENS,
    read_added_tokens,
    read_bos,
    read_id,
    read_role_token,
    select_role_token,
)
from tokenizer.special_tokens import SpecialTokens

SPACE = "\u2581"
"""What stands for a space in such a vocabulary."""

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_FRAMING = ("truncation", "padding", "post_processor")
_KNOWN_STEPS: dict[str, tuple[str, ...]] = {
    "normalizer": ("Prepend", "Replace"),
    "pre_tokenizer": ("Metaspace", "Split"),
    "decoder": ("Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"),
}


def is_sentencepiece(contents: Mapping[str, Any]) -> bool:
    """Whether the contents of a tokenizer.json are of this kind."""
    model = contents.get("model")
    is_byte_level = any(step.get("type") == "ByteLevel" for step in _steps(contents, "pre_tokenizer"))
    return isinstance(model, dict) and bool(model.get("byte_fallback")) and not is_byte_level


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer of the SentencePiece kind, with what `Tokenizer` offers.

    `encode` gives the ids of the `tokenizers` library without the tokens that frame a text. Added tokens that are not
    marked special are ordinary tokens here (runs of line breaks, for instance); `special_tokens` are those that are,
    and those that tokenizer_config.json gives a role.
    `vocab` has the other tokens as the file spells them, in UTF-8, and there are no `merges` to be had.

    Decoding gives the text back exactly, but for U+2581 in it, which becomes a space as in the library. Where the file
    puts a space before texts (Llama 2), `decode` takes it away again, as the library does; `decode_bytes`, which suits
    the middle of a text better, does not. Files that put it only before what does not begin with one (Mistral's
    Metaspace) lose a space that a text begins with, there and here.

    Args:
        contents, config: of tokenizer.json and tokenizer_config.json.

    Raises:
        ValueError: something is unsupported, contradictory, or the library is not there.
    """

    def __init__(self, contents: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        model = contents["model"]
        _check(contents, model)
        known = {text: read_id(text, token_id) for text, token_id in model["vocab"].items()}
        added = _added_tokens(contents, config, known)
        known |= {text: token["id"] for text, token in added.items()}
        special = {text for text, token in added.items() if token["special"]}
        self._file = json.dumps({**contents, "added_tokens": list(added.values())}, ensure_ascii=False)
        self._config = dict(config)
        self._vocab = {text.encode(): token_id for text, token_id in known.items() if text not in special}
        self._merges = ()
        self._special = {text: known[text] for text in special}
        self._bytes_of = {token_id: _bytes_of(text) for text, token_id in known.items() if text not in special}
        if len(self._bytes_of) + len(special) != len({*known.values()}) or len(known) != len({*known.values()}):
            raise ValueError("two tokens have one id: make model.vocab and the added tokens agree")
        self._bytes_of.update((token_id, text.encode()) for text, token_id in self._special.items())
        roles = {role: select_role_token(role, self._special, config) for role in WELL_KNOWN_TOKENS}
        self.mask_token, self.eos_token, self.pad_token = (roles[f"{name}_token"] for name in ("mask", "eos", "pad"))
        self.bos_token, self.adds_bos = read_bos(contents, config, self._special)
        self.pattern, self.normalization, self.ignore_merges = "", None, bool(model.get("ignore_merges"))
        self.visible_tokens = self.normalized_tokens = frozenset()
        self.lstrip_tokens = self.rstrip_tokens = self.single_word_tokens = frozenset()
        self.strips_first_space = _prepends_space(contents)
        self._fingerprint = None
        self._prepare()

    def with_options(self, **options: Any) -> Tokenizer:
        raise ValueError(
            f"{', '.join(options)}: a tokenizer of the SentencePiece kind is as its file has it: edit that"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key not in ("_libraries", "_lock")}

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything that decides ids and text."""
        if self._fingerprint is None:
            contents = {key: value for key, value in json.loads(self._file).items() if key not in _FRAMING}
            roles = [self.mask_token, self.eos_token, self.pad_token, self.bos_token, self.adds_bos]
            text = json.dumps([contents, sorted(self._special.items()), roles], sort_keys=True)
            self._fingerprint = hashlib.sha256(text.encode()).hexdigest()
        return self._fingerprint

    def files(self) -> tuple[str, dict[str, Any]]:
        """The text of tokenizer.json, and the contents of tokenizer_config.json."""
        return self._file, copy.deepcopy(self._config)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of a text; special tokens written in it are ordinary text, unless `allow_special`.

        Raises:
            ValueError: the text contains a lone surrogate, which has no UTF-8 form.
        """
        return self._encode_with_library("special" if allow_special else "plain", text)

    def encode_batch(self, texts: Iterable[str], *, allow_special: bool = False) -> list[list[int]]:
        """`encode` of each text."""
        return [self.encode(text, allow_special=allow_special) for text in texts]

    def encode_marked(self, text: str, marker: str) -> list[int]:
        """`encode(allow_special=True)` of a text in which `mark_control_tokens` has marked what stays text."""
        ids: list[int] = []
        for piece, special in self._early.split_text(text):
            # Some files put a space before the first piece only, and the library takes every text for a first one.
            if piece:
                ids += self._encode_with_library("inner" if ids else "plain", piece.replace(marker, ""))
            ids += special
        return ids

    def _encode_with_library(self, kind: str, text: str) -> list[int]:
        try:
            found: list[int] = self._get_library_tokenizer(kind).encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError):
            raise surrogate_error(text) from None
        return found

    def _get_library_tokenizer(self, kind: str) -> Any:
        """The library's tokenizer that takes special tokens for text (`plain`), the same for a piece inside of a text
        (`inner`), or the one that makes them ids (`special`). Made when first used."""
        with self._lock:
            if kind not in self._libraries:
                contents = json.loads(self._file)
                if kind == "inner":
                    for step in _steps(contents, "pre_tokenizer"):
                        if step.get("prepend_scheme") == "first":
                            step["prepend_scheme"] = "never"
                library = _import_tokenizers().Tokenizer.from_str(json.dumps({**contents, **dict.fromkeys(_FRAMING)}))
                for token in contents["added_tokens"]:
                    found = library.token_to_id(token["content"])
                    if found != token["id"]:
                        raise ValueError(
                            f"added token {token['content']!r} has the id {token['id']}, but the tokenizers library "
                            f"gives it {found}: list it in model.vocab of tokenizer.json"
                        )
                library.encode_special_tokens = kind != "special"
                self._libraries[kind] = library
            return self._libraries[kind]

    def _prepare(self) -> None:
        self._libraries: dict[str, Any] = {}
        self._lock = threading.Lock()
        contents = json.loads(self._file)
        added = contents.get("added_tokens") or []
        flagged = {
            flag: {token["content"] for token in added if token.get(flag) and token["content"] in self._special}
            for flag in ("lstrip", "rstrip", "single_word")
        }
        self._early = SpecialTokens(self._special, *flagged.values())
        self._control = SpecialTokens(self._special)
        self._hidden_ids = frozenset(self._special.values())
        self._lengths = self._compute_byte_lengths(self._vocab.values())


def _added_tokens(
    contents: Mapping[str, Any], config: Mapping[str, Any], vocab: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """The added tokens of both files with all flags, by id; those that have a role are special, as in transformers."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    added = {text: {**flags, **token} for text, token in read_added_tokens(contents, config).items()}
    for role in ("bos_token", *WELL_KNOWN_TOKENS):
        named = read_role_token(role, config)
        if named is not None and named in added:
            added[named]["special"] = True
        elif named is not None and named in vocab:
            added[named] = {"id": vocab[named], "content": named, **flags, "normalized": False, "special": True}
    return dict(sorted(added.items(), key=lambda item: int(item[1]["id"])))


def _check(contents: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    if model.get("type", "BPE") != "BPE":
        raise ValueError(f"model.type {model['type']!r} is unsupported: only BPE is")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise ValueError(f"model.{key} = {model[key]!r} is unsupported: only files without it are")
    missing = [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in model["vocab"]]
    if missing:
        raise ValueError(f"model.vocab lacks the bytes {', '.join(missing[:4])}: text with them would be lost")
    for part, known in _KNOWN_STEPS.items():
        for step in _steps(contents, part):
            if step.get("type") not in known or not _is_space_step(step):
                raise ValueError(f"{part}: {step!r} is unsupported: only what turns spaces into {SPACE!r} and back is")


def _is_space_step(step: Mapping[str, Any]) -> bool:
    kind = step["type"]
    if kind in ("Replace", "Split"):
        pattern = step.get("pattern", {})
        is_known = pattern in ({"String": " "}, {"String": SPACE}) and step.get("behavior") != "Removed"
        return is_known and step.get("content", SPACE) in (SPACE, " ")
    return {"Prepend": step.get("prepend"), "Metaspace": step.get("replacement")}.get(kind, SPACE) == SPACE


def _prepends_space(contents: Mapping[str, Any]) -> bool:
    schemes = [step.get("prepend_scheme", "always") for step in _steps(contents, "pre_tokenizer")]
    metaspaces = [step["type"] == "Metaspace" for step in _steps(contents, "pre_tokenizer")]
    prepended = any(step["type"] == "Prepend" for step in _steps(contents, "normalizer"))
    return prepended or any(is_one and scheme != "never" for is_one, scheme in zip(metaspaces, schemes, strict=True))


def _steps(contents: Mapping[str, Any], part: str) -> list[dict[str, Any]]:
    step = contents.get(part)
    if step is None:
        return []
    for key in ("normalizers", "pretokenizers", "decoders"):
        if key in step:
            return list(step[key])
    return [step]


def _bytes_of(text: str) -> bytes:
    byte = _BYTE.fullmatch(text)
    return text.replace(SPACE, " ").encode() if byte is None else bytes([int(byte[1], 16)])


def _import_tokenizers() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError:
        raise ValueError(
            "this tokenizer.json is of the SentencePiece kind, which is read by the tokenizers library: "
            "pip install 'diffusionlm[sentencepiece]', or pip install tokenizers"
        ) from None
