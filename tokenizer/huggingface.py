"""Conversion of byte-level BPE from and to Hugging Face's tokenizer.json and tokenizer_config.json."""

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

from tokenizer.bpe import Normalization, Tokenizer
from tokenizer.byte_alphabet import bytes_to_chars, chars_to_bytes
from tokenizer.patterns import pattern_name, pattern_regex
from tokenizer.special_tokens import TokenOptions

# Searched in this order if tokenizer_config.json names no token for a role.
WELL_KNOWN_TOKENS: dict[str, tuple[str, ...]] = {
    "mask_token": ("<|mask|>", "<|mdm_mask|>", "<|MASK|>", "[MASK]", "<mask>", "<MASK>"),
    "eos_token": ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<eos>"),
    "pad_token": ("<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>", "[PAD]", "<pad>"),
}

ROLES = ("bos_token", *WELL_KNOWN_TOKENS)
UNSET_ROLES = "unset_tokens"
"""Key of our tokenizer_config.json: roles that have no token, although the file has a well-known one."""

# Pattern and normalization of the tokenizer classes that are supported without a tokenizer.json.
_SLOW_CLASSES: dict[str, tuple[str, Normalization]] = {
    "Qwen2Tokenizer": ("qwen", "NFC"),
    "DreamTokenizer": ("qwen", "NFC"),
    "GPT2Tokenizer": ("gpt2", None),
}

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
"""Flags of an added token, of which each is a set of `TokenOptions`."""
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def to_huggingface(tokenizer: Tokenizer) -> dict[str, Any]:
    """Build the contents of a tokenizer.json that encodes to the same ids."""
    options = tokenizer.options
    vocab = {bytes_to_chars(token): token_id for token, token_id in tokenizer.vocab.items()}
    # Special tokens are included, because `tokenizers` reads the ids of added tokens from the vocab.
    vocab.update(tokenizer.special_tokens)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": text,
                **{flag: text in getattr(options, f"{flag}_tokens") for flag in _FLAGS},
                "special": text not in options.visible_tokens,
            }
            for text, token_id in sorted(tokenizer.special_tokens.items(), key=itemgetter(1))
        ],
        **_normalizer_and_pre_tokenizer(tokenizer.pattern, tokenizer.normalization),
        "post_processor": _bos_post_processor(tokenizer),
        "decoder": {**_BYTE_LEVEL, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": options.ignore_merges,
            "vocab": dict(sorted(vocab.items(), key=itemgetter(1))),
            "merges": [[bytes_to_chars(left), bytes_to_chars(right)] for left, right in tokenizer.merges],
        },
    }


def to_huggingface_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Build the contents of a tokenizer_config.json with which transformers loads the tokenizer.json."""
    roles = {role: getattr(tokenizer, role) for role in ROLES}
    unset = [
        role for role in WELL_KNOWN_TOKENS if select_role_token(role, tokenizer.special_tokens, roles) != roles[role]
    ]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **({"add_bos_token": True} if tokenizer.options.adds_bos else {}),
        **{role: token for role, token in roles.items() if token is not None},
        **({UNSET_ROLES: unset} if unset else {}),
    }


def from_huggingface(contents: Mapping[str, Any], config: Mapping[str, Any]) -> Tokenizer:
    """Build a tokenizer from the contents of tokenizer.json and tokenizer_config.json (which may be empty).

    Added tokens become special tokens, in whichever file they are declared. Truncation, padding and the end-of-text
    token of a `post_processor` are ignored, because `encode` adds nothing; its first token sets `adds_bos`.

    Raises:
        ValueError: something is unsupported or has an unexpected structure; names the key.
    """
    model = contents["model"]
    check_model(model, "byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix")
    added = read_added_tokens(contents, config)
    special = {text: token["id"] for text, token in added.items()}
    added_ids = {token["id"] for token in added.values()}
    # If tokenizer_config.json renames an added token, its old spelling is removed from the vocab as well.
    renamed = {token.get("content") for token in contents.get("added_tokens") or []} - special.keys()
    model_vocab = {
        text: token_id for text, token_id in model["vocab"].items() if text not in renamed or token_id not in added_ids
    }
    for text in special.keys() & model_vocab.keys():
        if special[text] != model_vocab[text]:
            raise ValueError(
                f"added token {text!r} has the id {special[text]}, but {model_vocab[text]!r} in model.vocab"
            )
    vocab = {read_token(text): read_id(text, token_id) for text, token_id in model_vocab.items() if text not in special}
    pairs = [read_merge(merge) for merge in model["merges"]]
    products = {bytes_to_chars(left + right) for left, right in pairs}
    for text in special.keys() & products:
        raise ValueError(f"added token {text!r} is also a product of model.merges: remove one of them")
    roles = {role: select_role_token(role, special, config) for role in WELL_KNOWN_TOKENS}
    bos_token, adds_bos = read_bos(contents, config, special)
    return Tokenizer(
        vocab=vocab,
        merges=pairs,
        special_tokens=special,
        pattern=_pattern(contents.get("pre_tokenizer")),
        normalization=_normalization(contents.get("normalizer")),
        **roles,
    ).with_options(
        TokenOptions(
            ignore_merges=bool(model.get("ignore_merges")),
            visible_tokens=frozenset(text for text, token in added.items() if not token["special"]),
            bos_token=bos_token,
            adds_bos=adds_bos,
            **{f"{flag}_tokens": frozenset(text for text, token in added.items() if token[flag]) for flag in _FLAGS},
        )
    )


def build_slow_tokenizer_json(
    vocab: Mapping[str, Any], merges: list[str], config: Mapping[str, Any], added: Mapping[str, Any]
) -> dict[str, Any]:
    """Build the contents of a tokenizer.json for a directory with vocab.json, merges.txt and tokenizer_config.json.

    In such directories (of Dream and early GPT-2) the tokenizer class defines pattern and normalization. ``added`` is
    the contents of added_tokens.json (text to id); a token is special if tokenizer_config.json uses it as one.

    Raises:
        ValueError: the class is unknown.
    """
    name = str(config.get("tokenizer_class"))
    family = _SLOW_CLASSES.get(name.removesuffix("Fast"))
    if family is None:
        raise ValueError(
            f"tokenizer_class {name!r} of tokenizer_config.json is unsupported without a tokenizer.json: "
            f"only {', '.join(_SLOW_CLASSES)} are; save the tokenizer with its fast class first"
        )
    roles = {read_role_token(key, config) for key in config if key.endswith("_token")}
    special = roles | {_token_text(token) for token in config.get("additional_special_tokens") or []}
    return {
        **_normalizer_and_pre_tokenizer(*family),
        "added_tokens": [
            {"id": token_id, "content": text, "special": text in special, "normalized": False}
            for text, token_id in added.items()
        ],
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def read_token(text: str) -> bytes:
    """Convert a token from its spelling in GPT-2's alphabet to bytes.

    Raises:
        ValueError: the spelling uses another character.
    """
    try:
        return chars_to_bytes(text)
    except KeyError as error:
        raise ValueError(
            f"token {text!r} contains {error.args[0]!r}, which is not in the byte-level alphabet: "
            "only byte-level BPE is supported"
        ) from None


def read_id(text: str, token_id: object) -> int:
    """Check that an id is an integer.

    Raises:
        ValueError: it is not; names the token.
    """
    if not isinstance(token_id, int) or isinstance(token_id, bool):
        raise ValueError(f"token {text!r} has the id {token_id!r}: expected an integer")
    return token_id


def read_merge(merge: object) -> tuple[bytes, bytes]:
    """Parse a merge, `"a b"` or `["a", "b"]`.

    Raises:
        ValueError: it has neither form, or is not in the byte-level alphabet.
    """
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) and part for part in parts):
        raise ValueError(f"merge {merge!r} is not a pair of tokens")
    return read_token(parts[0]), read_token(parts[1])


def _bos_post_processor(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Build the post_processor that adds `bos_token` before a text; None without `adds_bos`."""
    if not tokenizer.options.adds_bos or tokenizer.bos_token is None:
        return None
    bos, first = tokenizer.bos_token, {"SpecialToken": {"id": tokenizer.bos_token, "type_id": 0}}
    texts = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": [first, texts[0]],
        "pair": [first, texts[0], {"SpecialToken": {"id": bos, "type_id": 1}}, texts[1]],
        "special_tokens": {bos: {"id": bos, "ids": [tokenizer.bos_token_id], "tokens": [bos]}},
    }


def _normalizer_and_pre_tokenizer(pattern: str, normalization: Normalization) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern_regex(pattern)}, "behavior": "Isolated", "invert": False}
    return {
        "normalizer": None if normalization is None else {"type": normalization},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, _BYTE_LEVEL]},
    }


def check_model(model: Mapping[str, Any], *unsupported_keys: str) -> None:
    """Check that a model is BPE without these options.

    Raises:
        ValueError: it is not; names the key.
    """
    if model.get("type", "BPE") != "BPE":  # missing in files of early versions
        raise ValueError(f"model.type {model['type']!r} is unsupported: only BPE is")
    for key in unsupported_keys:
        if model.get(key):
            raise ValueError(f"model.{key} {model[key]!r} is unsupported: only BPE without it is")


def read_added_tokens(contents: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Read the added tokens by text, each with `id`, `special`, `normalized` and the flags of the files.

    Like transformers, this includes the tokens in added_tokens_decoder of tokenizer_config.json and those of the
    vocabulary that have a role there. If both files contain a token, tokenizer.json defines its flags; if they spell an
    id differently (SDAR's mask token), tokenizer_config.json defines the text.
    """
    plain = dict.fromkeys(_FLAGS, False)
    from_tokenizer = [*(contents.get("added_tokens") or [])]
    from_config = [{**token, "id": int(i)} for i, token in (config.get("added_tokens_decoder") or {}).items()]
    config_texts = {token["id"]: _token_text(token) for token in from_config}
    tokens: dict[str, dict[str, Any]] = {}
    for token in [*from_tokenizer, *from_config]:
        text = _token_text(token) if isinstance(token, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"added_tokens: {token!r} has no content")
        token_id = read_id(text, token.get("id"))
        if config_texts.get(token_id, text) != text and text not in config_texts.values():
            continue
        is_special = token.get("special", True)
        flags = {**plain, "special": is_special, "normalized": not is_special, **token, "id": token_id}
        merged = tokens.setdefault(text, flags)
        if merged["id"] != token_id:
            raise ValueError(
                f"added token {text!r} has the id {merged['id']} in tokenizer.json and {token_id} in "
                "added_tokens_decoder of tokenizer_config.json: make them agree"
            )
        if not is_special:
            merged["special"] = False
    vocab = contents["model"]["vocab"]
    for text in filter(None, [read_role_token(role, config) for role in ROLES]):
        if text in vocab:
            tokens.setdefault(text, {"id": read_id(text, vocab[text]), "content": text, **plain, "special": True})
    return tokens


def read_bos(
    contents: Mapping[str, Any], config: Mapping[str, Any], special: Mapping[str, int]
) -> tuple[str | None, bool]:
    """Read `bos_token` and `adds_bos`.

    bos_token and add_bos_token of tokenizer_config.json take precedence over the first token of the template of the
    post_processor.
    """
    processor = contents.get("post_processor") or {}
    steps = [step for step in processor.get("processors", [processor]) if step.get("type") == "TemplateProcessing"]
    single = steps[0].get("single", []) if steps else []
    first = single[0].get("SpecialToken", {}).get("id") if single else None
    config_bos = read_role_token("bos_token", config)
    bos = config_bos if config_bos in special else first if config_bos is None and first in special else None
    adds = config.get("add_bos_token")
    return bos, bos is not None and (first == bos if adds is None else bool(adds))


def _normalization(normalizer: Any) -> Normalization:
    if normalizer is None:
        return None
    steps = normalizer.get("normalizers", [normalizer])
    kinds = [step.get("type") for step in steps]
    if kinds not in ([], ["NFC"]):
        raise ValueError(f"normalizer {kinds} is unsupported: only NFC or no normalizer is")
    return "NFC" if kinds else None


def _pattern(pre_tokenizer: Any) -> str:
    """Read the regular expression of the pre-tokenizer."""
    steps = [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    match steps:
        case [{"type": "ByteLevel", "add_prefix_space": False, **byte_level}] if byte_level.get("use_regex", True):
            return "gpt2"
        case [
            {"type": "Split", "pattern": {"Regex": str(expression)}, "behavior": "Isolated" | "isolated", **split},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ] if not split.get("invert"):
            return pattern_name(expression)
    raise ValueError(
        f"pre_tokenizer {steps!r} is unsupported: only ByteLevel, or Split by a Regex (isolated, not inverted) and "
        "ByteLevel with use_regex = false, is, each with add_prefix_space = false"
    )


def read_role_token(role: str, config: Mapping[str, Any]) -> str | None:
    """Read the token of a role in tokenizer_config.json, which is a string or an object with its text."""
    text = _token_text(config.get(role))
    return None if text is None else str(text)


def _token_text(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def select_role_token(role: str, special: Iterable[str], config: Mapping[str, Any]) -> str | None:
    """Select the token of a role: the one in tokenizer_config.json, else a well-known one, else None.

    Raises:
        ValueError: the token in tokenizer_config.json is not among ``special``.
    """
    token = read_role_token(role, config)
    if token is None:
        well_known = () if role in config.get(UNSET_ROLES, ()) else WELL_KNOWN_TOKENS[role]
        return next((text for text in well_known if text in special), None)
    if token not in special:
        raise ValueError(
            f"{role} {token!r} of tokenizer_config.json is not among the added tokens: add it there, or correct it"
        )
    return token
