"""Directories shaped like those of Qwen3, Llama 3, LLaDA, SDAR and Dream; the library says what their ids are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from tokenizer import PATTERNS, Tokenizer, load_tokenizer, save_tokenizer
from tokenizer.byte_alphabet import BYTE_ORDER, bytes_to_chars
from tokenizer.special_tokens import TokenOptions

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
MERGES = [["t", "h"], ["th", "e"], ["Ġ", "the"], ["i", "n"], ["Ċ", "Ċ"], ["Ã", "©"], ["1", "2"]]
TEXTS = ["the thin\n\n the é e\u0301 1234", "  x  ", "<|im_start|>user\nin<|im_end|>", "<think>\n\n</think> the", ""]


def token(text: str, token_id: int, **flags: Any) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {"id": token_id, "content": text, "special": True, **plain, **flags}


def vocab() -> dict[str, int]:
    spellings = [*(bytes_to_chars(bytes([byte])) for byte in BYTE_ORDER), *("".join(merge) for merge in MERGES)]
    return {text: token_id for token_id, text in enumerate(spellings)}


FIRST = len(vocab())


def contents_of(pattern: str, added: list[dict[str, Any]], **parts: Any) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": PATTERNS[pattern]}, "behavior": "Isolated", "invert": False}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "fuse_unk": False}
    rest = {"end_of_word_suffix": "", "byte_fallback": False, "ignore_merges": pattern == "llama3"}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pattern == "qwen" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL]},
        "post_processor": {**BYTE_LEVEL, "trim_offsets": False},
        "decoder": BYTE_LEVEL,
        "model": {**model, **rest, "vocab": vocab(), "merges": MERGES},
        **parts,
    }


def write(folder: Path, contents: dict[str, Any], config: dict[str, Any]) -> tuple[Tokenizer, Any]:
    (folder / "tokenizer.json").write_text(json.dumps(contents))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def assert_same_ids(ours: Tokenizer, theirs: Any, texts: list[str]) -> None:
    for text in texts:
        assert ours.encode(text, allow_special=True) == theirs.encode(text, add_special_tokens=False).ids, text


def qwen_tokens() -> list[dict[str, Any]]:
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    control = [token(text, FIRST + i) for i, text in enumerate(names)]
    return [*control, *(token(text, FIRST + 3 + i, special=False) for i, text in enumerate(["<think>", "</think>"]))]


def decoder_of(added: list[dict[str, Any]]) -> dict[str, Any]:
    return {str(entry["id"]): {key: value for key, value in entry.items() if key != "id"} for entry in added}


def test_qwen3(tmp_path: Path) -> None:
    added = qwen_tokens()
    config = {
        "add_bos_token": False,
        "added_tokens_decoder": decoder_of(added),
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    ours, theirs = write(tmp_path, contents_of("qwen", added), config)
    assert (ours.pattern, ours.normalization) == ("qwen", "NFC")
    assert (ours.eos_token_id, ours.pad_token_id, ours.mask_token_id) == (FIRST + 2, FIRST, None)
    assert (ours.bos_token, ours.prefix_ids) == (None, [])
    assert ours.options.visible_tokens == {"<think>", "</think>"}
    assert_same_ids(ours, theirs, TEXTS)
    ids = ours.encode(TEXTS[3] + "<|im_end|>", allow_special=True)
    assert ours.decode(ids, skip_special=True) == theirs.decode(ids) == TEXTS[3]


def template(bos: str, token_id: int) -> dict[str, Any]:
    first, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    special = {bos: {"id": bos, "ids": [token_id], "tokens": [bos]}}
    step = {"type": "TemplateProcessing", "single": [first, text], "pair": [first, text, text]}
    return {"type": "Sequence", "processors": [{**BYTE_LEVEL}, {**step, "special_tokens": special}]}


LLAMA_TOKENS = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|eot_id|>"]


def test_llama3_texts_begin_with_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added = [token(text, FIRST + i) for i, text in enumerate(LLAMA_TOKENS)]
    config = {"bos_token": LLAMA_TOKENS[0], "eos_token": "<|eot_id|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    contents = contents_of("llama3", added, post_processor=template(LLAMA_TOKENS[0], FIRST))
    ours, theirs = write(tmp_path, contents, config)
    assert ours.options.ignore_merges
    assert (ours.bos_token_id, ours.options.adds_bos, ours.prefix_ids) == (FIRST, True, [FIRST])
    assert_same_ids(ours, theirs, [*TEXTS, "<|begin_of_text|>the<|eot_id|>\n"])
    for text in TEXTS:
        assert ours.prefix_ids + ours.encode(text) == theirs.encode(text).ids

    again = tmp_path / "again"
    save_tokenizer(ours, again)
    loaded = load_tokenizer(again)
    assert (loaded.fingerprint, loaded.prefix_ids) == (ours.fingerprint, [FIRST])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    auto = transformers.AutoTokenizer.from_pretrained(str(again))
    assert (auto.bos_token, auto(TEXTS[0])["input_ids"]) == (LLAMA_TOKENS[0], theirs.encode(TEXTS[0]).ids)


def test_whether_texts_begin_with_a_token_is_the_configs_word(tmp_path: Path) -> None:
    added = [token(text, FIRST + i) for i, text in enumerate(LLAMA_TOKENS)]
    contents = contents_of("llama3", added, post_processor=template(LLAMA_TOKENS[0], FIRST))
    plain = contents_of("llama3", added)
    bos = {"bos_token": {"content": LLAMA_TOKENS[0]}}
    cases: list[tuple[dict[str, Any], dict[str, Any], tuple[str | None, bool]]] = [
        (contents, {}, (LLAMA_TOKENS[0], True)),
        (contents, {**bos, "add_bos_token": False}, (LLAMA_TOKENS[0], False)),
        (contents, {"bos_token": LLAMA_TOKENS[1]}, (LLAMA_TOKENS[1], False)),
        (plain, bos, (LLAMA_TOKENS[0], False)),
        (plain, {**bos, "add_bos_token": True}, (LLAMA_TOKENS[0], True)),
        (plain, {"add_bos_token": True}, (None, False)),
    ]
    prints = set()
    for file, config, expected in cases:
        ours, _ = write(tmp_path, file, config)
        assert (ours.bos_token, ours.options.adds_bos) == expected
        prints.add(ours.fingerprint)
    assert len(prints) == 4


@pytest.mark.parametrize("in_vocab", [False, True])
def test_sdar_calls_its_mask_token_twice(tmp_path: Path, in_vocab: bool) -> None:
    """tokenizer.json says <MASK>, tokenizer_config.json <|MASK|>, of one id: the config's word counts."""
    added = [*qwen_tokens(), token("<MASK>", FIRST + 5)]
    decoder = decoder_of([*qwen_tokens(), token("<|MASK|>", FIRST + 5)])
    contents = contents_of("qwen", added)
    if in_vocab:
        contents["model"]["vocab"]["<MASK>"] = FIRST + 5
    ours, _ = write(tmp_path, contents, {"mask_token": "<|MASK|>", "added_tokens_decoder": decoder})
    assert (ours.mask_token, ours.mask_token_id, ours.vocab_size) == ("<|MASK|>", FIRST + 5, FIRST + 6)
    assert "<MASK>" not in ours.special_tokens
    assert ours.encode("<|MASK|>", allow_special=True) == [FIRST + 5]
    with pytest.raises(ValueError, match=r"mask_token '<\|MASK\|>' of tokenizer_config\.json is not among"):
        write(tmp_path, contents, {"mask_token": "<|MASK|>"})


def test_dream_has_slow_files_only(tmp_path: Path) -> None:
    added = [*qwen_tokens()[:3], token("<|beginoftext|>", FIRST + 4), token("<|mask|>", FIRST + 5)]
    (tmp_path / "vocab.json").write_text(json.dumps(vocab()))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(merge) for merge in MERGES) + "\n")
    config: dict[str, Any] = {
        "added_tokens_decoder": decoder_of(added),
        "additional_special_tokens": ["<|beginoftext|>", "<|mask|>"],
        "bos_token": "<|beginoftext|>",
        "eos_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "DreamTokenizer",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load_tokenizer(tmp_path)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(contents_of("qwen", qwen_tokens()[:3])))
    assert_same_ids(ours, theirs, TEXTS)
    assert (ours.mask_token_id, ours.bos_token_id, ours.prefix_ids) == (FIRST + 5, FIRST + 4, [])

    del config["added_tokens_decoder"]  # older directories have the ids in a file of their own
    listed = {entry["content"]: entry["id"] for entry in [*added, token("<think>", FIRST + 3)]}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**config, "additional_special_tokens": ["<|im_start|>"]})
    )
    (tmp_path / "added_tokens.json").write_text(json.dumps(listed))
    older = load_tokenizer(tmp_path)
    assert older.special_tokens == listed
    assert older.options.visible_tokens == {"<think>", "<|im_end|>"}
    assert_same_ids(older, theirs, TEXTS[:3])
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    with pytest.raises(ValueError, match=r": tokenizer_class 'BertTokenizer' of tokenizer_config\.json is unsupported"):
        load_tokenizer(tmp_path)


def test_tokens_that_absorb_whitespace_or_are_single_words(tmp_path: Path) -> None:
    flagged: list[tuple[str, dict[str, bool]]] = [
        ("<mask>", {"lstrip": True}),
        ("<r>", {"rstrip": True}),
        ("<b>", {"lstrip": True, "rstrip": True}),
        ("word", {"single_word": True}),
        ("<late>", {"lstrip": True, "normalized": True}),
        ("<plain>", {}),
    ]
    added = [token(text, FIRST + i, **flags) for i, (text, flags) in enumerate(flagged)]
    ours, theirs = write(tmp_path, contents_of("qwen", added), {"mask_token": "<mask>"})
    assert ours.options.lstrip_tokens == {"<mask>", "<b>", "<late>"}
    assert ours.options.single_word_tokens == {"word"}
    rng = np.random.default_rng(0)
    spaces = [" ", "  ", "\n", "\t", "\u3000", "\x1c"]
    pieces = [*(text for text, _ in flagged), *spaces, "x", "_", "é", "\u0301", "-", "the"]
    texts = ["".join(rng.choice(pieces, int(rng.integers(1, 9)))) for _ in range(3000)]
    assert_same_ids(ours, theirs, texts)
    assert ours.encode("x  <mask> y", allow_special=True) == [*ours.encode("x"), FIRST, *ours.encode(" y")]
    assert ours.decode(ours.encode("x  <mask> y")) == "x  <mask> y"
    save_tokenizer(ours, tmp_path / "ours")
    loaded = load_tokenizer(tmp_path / "ours")
    assert loaded.fingerprint == ours.fingerprint
    assert all(loaded.encode(text, allow_special=True) == theirs.encode(text).ids for text in texts[:200])
    assert ours.fingerprint != ours.with_options(TokenOptions()).fingerprint
