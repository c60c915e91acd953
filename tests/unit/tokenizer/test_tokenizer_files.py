import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenizer import CHAT_TEMPLATES, Tokenizer, load_tokenizer, save_tokenizer
from tokenizer.byte_alphabet import BYTE_ORDER, bytes_to_chars
from tokenizer.special_tokens import TokenOptions

FILES = ["tokenizer.json", "tokenizer_config.json"]
Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def saved(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    save_tokenizer(tokenizer, tmp_path)
    return tmp_path


def save_slow_files(tokenizer: Tokenizer, folder: Path) -> None:
    vocab = {bytes_to_chars(token): token_id for token, token_id in tokenizer.vocab.items()}
    merges = [f"{bytes_to_chars(left)} {bytes_to_chars(right)}" for left, right in tokenizer.merges]
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))


def edit(path: Path, change: Edit) -> None:
    contents = json.loads(path.read_text())
    change(contents)
    path.write_text(json.dumps(contents))


def test_round_trip(tokenizer: Tokenizer, tmp_path: Path) -> None:
    options = TokenOptions(True, frozenset({"<|endoftext|>"}), frozenset({"<|mask|>"}))
    variants = [tokenizer.with_chat_template(CHAT_TEMPLATES["chatml"]), tokenizer.with_options(options)]
    for normalization in (None, "NFC"):
        special = {**tokenizer.special_tokens, "é<p>": tokenizer.vocab_size + 7, "<|pad|>": tokenizer.vocab_size + 8}
        parts = (tokenizer.vocab, tokenizer.merges, special, r"\p{L}+| ?\d", normalization)
        variants.append(Tokenizer(*parts, mask_token="<|mask|>", eos_token="<|endoftext|>", pad_token="é<p>"))  # type: ignore[arg-type]
        variants.append(Tokenizer(*parts))  # type: ignore[arg-type]  # well-known tokens without a role
    for i, variant in enumerate(variants):
        folder = tmp_path / str(i)
        for _ in range(2):
            save_tokenizer(variant, folder)
        assert set(FILES) <= {path.name for path in folder.iterdir()} <= {*FILES, "chat_template.jinja"}
        loaded = load_tokenizer(str(folder))
        assert loaded.fingerprint == variant.fingerprint
        if variant.chat_template is not None:
            assert loaded.chat_template is not None and loaded.chat_template.source == variant.chat_template.source
        assert pickle.loads(pickle.dumps(loaded)).chat_template == loaded.chat_template


def test_tokenizer_json_precedes_files_of_another_tokenizer(saved: Path, tokenizer: Tokenizer) -> None:
    (saved / "vocab.json").write_text("{}")
    (saved / "merges.txt").write_text("a b")
    loaded = load_tokenizer(saved)
    assert loaded.fingerprint == tokenizer.fingerprint
    save_tokenizer(loaded, saved)
    assert sorted(path.name for path in saved.iterdir()) == FILES


def test_transformers_loads_it(saved: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    for name in ("PreTrainedTokenizerFast", "AutoTokenizer"):
        theirs = getattr(transformers, name).from_pretrained(str(saved))
        assert (theirs.mask_token_id, theirs.eos_token_id) == (tokenizer.mask_token_id, tokenizer.eos_token_id)
        text = "def f(a, b):\n    return 'é' <|mask|>"
        ids = tokenizer.encode(text, allow_special=True)
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        assert theirs.decode(ids) == text


def test_old_spellings_load(saved: Path, tokenizer: Tokenizer) -> None:
    def old(contents: dict[str, Any]) -> None:
        model = contents["model"]
        model["merges"] = [" ".join(merge) for merge in model["merges"]]
        del model["type"], model["ignore_merges"]
        # Qwen's way: special tokens are listed as added tokens only.
        for token in contents["added_tokens"]:
            del model["vocab"][token["content"]]
        contents["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}]}
        contents["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False}

    edit(saved / "tokenizer.json", old)
    (saved / "tokenizer_config.json").unlink()
    loaded = load_tokenizer(saved)
    assert loaded.vocab == tokenizer.vocab
    assert loaded.merges == tokenizer.merges
    assert (loaded.pattern, loaded.normalization) == ("gpt2", "NFC")
    assert (loaded.mask_token, loaded.eos_token) == ("<|mask|>", "<|endoftext|>")


def test_roles_come_from_the_config_first(saved: Path) -> None:
    edit(saved / "tokenizer_config.json", lambda c: c.update(eos_token={"content": "<|mask|>"}, mask_token=None))
    loaded = load_tokenizer(saved)
    assert (loaded.eos_token, loaded.mask_token) == ("<|mask|>", "<|mask|>")
    added = {"1500": {"content": "<|MASK|>", "special": True}, "1501": {"content": "<think>", "special": False}}
    edit(saved / "tokenizer_config.json", lambda c: c.update(added_tokens_decoder=added, mask_token="<|MASK|>"))
    loaded = load_tokenizer(saved)
    assert (loaded.mask_token_id, loaded.vocab_size) == (1500, 1502)
    assert loaded.options.visible_tokens == frozenset({"<think>"})
    edit(saved / "tokenizer_config.json", lambda c: c.update(mask_token="<gone>"))
    with pytest.raises(ValueError, match=r"tokenizer\.json: mask_token '<gone>' of tokenizer_config\.json"):
        load_tokenizer(saved)


def test_a_role_that_older_files_leave_out_is_none(saved: Path) -> None:
    (saved / "special_tokens.json").write_text('{"mask_token": "<|mask|>", "eos_token": null}')
    edit(saved / "tokenizer_config.json", lambda c: c.pop("eos_token"))
    loaded = load_tokenizer(saved)
    assert (loaded.mask_token, loaded.eos_token) == ("<|mask|>", None)


def test_hash_merges_survive(tmp_path: Path) -> None:
    """A line of merges.txt that starts with # is a merge, not a comment."""
    vocab = {bytes([byte]): i for i, byte in enumerate(BYTE_ORDER)}
    vocab.update({b"##": 256, b"#version:": 257, b"version:": 258})
    save_slow_files(Tokenizer(vocab, [(b"#", b"#"), (b"#", b"version:")], {}, "gpt2"), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    assert load_tokenizer(tmp_path).merges == ((b"#", b"#"), (b"#", b"version:"))


def add_token(contents: dict[str, Any], text: str, token_id: int | None = None) -> None:
    listed = contents["model"]["vocab"].get(text, token_id)
    contents["added_tokens"].append({"id": listed, "content": text, "special": False, "normalized": True})


UNSUPPORTED: list[tuple[str, Edit]] = [
    ("model.type 'WordPiece'", lambda c: c["model"].update(type="WordPiece")),
    ("model.dropout 0.1", lambda c: c["model"].update(dropout=0.1)),
    ("normalizer ['NFKC']", lambda c: c.update(normalizer={"type": "NFKC"})),
    ("pre_tokenizer [{'type': 'Metaspace'}]", lambda c: c.update(pre_tokenizer={"type": "Metaspace"})),
    ("'add_prefix_space': True", lambda c: c["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True)),
    ("or Split by a Regex", lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed")),
    ("'▁a' contains '▁'", lambda c: c["model"]["vocab"].update({"▁a": 9999})),
    ("expected an integer", lambda c: c["model"]["vocab"].update({"a": "1"})),
    ("has the id 3, but 999", lambda c: c["added_tokens"][1].update(id=3)),
    ("merge 'a' is not a pair", lambda c: c["model"].update(merges=["a"])),
    ("added token 'in'", lambda c: add_token(c, "in")),
    ("'<far>' has the id 99999999: ids start at 0 and end at", lambda c: add_token(c, "<far>", 99_999_999)),
    ("KeyError: 'model'", lambda c: c.pop("model")),
]


@pytest.mark.parametrize(("message", "change"), UNSUPPORTED, ids=[message for message, _ in UNSUPPORTED])
def test_unsupported_features_are_named(saved: Path, message: str, change: Edit) -> None:
    edit(saved / "tokenizer.json", change)
    with pytest.raises(ValueError) as caught:
        load_tokenizer(saved)
    assert "tokenizer.json: " in str(caught.value)
    assert message in str(caught.value)


def test_missing_and_corrupt_files_are_named(saved: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    def expect_error(message: str) -> None:
        with pytest.raises(ValueError) as caught:
            load_tokenizer(saved)
        assert message in str(caught.value)

    with pytest.raises(ValueError, match="nowhere"):
        load_tokenizer(tmp_path / "nowhere")
    (saved / "tokenizer.json").write_text('{"a": 1,')
    expect_error("tokenizer.json: is not valid JSON")
    (saved / "tokenizer.json").unlink()
    save_slow_files(tokenizer, saved)
    edit(saved / "tokenizer_config.json", lambda c: c.update(tokenizer_class="GPT2Tokenizer"))
    merges = saved / "merges.txt"
    with merges.open("a") as file:
        file.write("a b c\n")
    expect_error("merge 'a b c' is not a pair")
    merges.unlink()
    expect_error("merges.txt: ")
