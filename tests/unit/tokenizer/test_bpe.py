import pickle
from pathlib import Path

import pytest
import tokenizers

from tokenizer import PATTERNS, Tokenizer, save_tokenizer
from tokenizer.byte_alphabet import BYTE_ORDER
from tokenizer.special_tokens import TokenOptions

BYTES = {bytes([byte]): i for i, byte in enumerate(BYTE_ORDER)}


def tiny(merges: list[tuple[bytes, bytes]], pattern: str = r"[\s\S]+", **options: str) -> Tokenizer:
    vocab = dict(BYTES)
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    return Tokenizer(vocab, merges, {"<|mask|>": len(vocab), "<|mask|>>": len(vocab) + 1}, pattern, **options)  # type: ignore[arg-type]


def test_variants_equal_tokenizers_library(tokenizer: Tokenizer, nasty: list[str], tmp_path: Path) -> None:
    # No merge gives a token of three bytes, so ignore_merges has something to do.
    merges = [pair for pair in tokenizer.merges if len(pair[0] + pair[1]) != 3]
    special = {"<|mask|>": 5000, "<|mask|>m": 7000}
    whole = Tokenizer(tokenizer.vocab, merges, special, "llama3", "NFC").with_options(TokenOptions(ignore_merges=True))
    save_tokenizer(whole, tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in [*nasty, " the for def"]:
        assert whole.encode(text, allow_special=True) == theirs.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("pattern", [r"\w+", r"(\w)(\d)?", r"^a|b$", r"[^\n]+$"])
def test_any_pattern_equals_tokenizers_library(pattern: str, nasty: list[str], tmp_path: Path) -> None:
    ours = tiny([(b"a", b"b"), (b"b", b"\n"), (b",", b" "), (b"1", b" ")], pattern)
    save_tokenizer(ours, tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ["ab, cd!", "xxaxx\nb\nab", "ab\nab\n", "a1b2 1 ?", *nasty[-4:]]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids) == text


def test_decoding_of_special_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("héllo<|mask|> wörld<|endoftext|>", allow_special=True)
    assert tokenizer.decode(ids) == "héllo<|mask|> wörld<|endoftext|>"
    assert tokenizer.decode(ids, skip_special=True) == "héllo wörld"
    assert tokenizer.byte_lengths()[ids].sum() == len("héllo wörld".encode())
    lengths = tokenizer.byte_lengths()
    assert lengths.shape == (tokenizer.vocab_size,)
    assert lengths[tokenizer.mask_token_id] == 0
    assert [lengths[i] for i in range(500)] == [len(tokenizer.token_bytes(i)) for i in range(500)]
    visible = tokenizer.with_options(TokenOptions(visible_tokens=frozenset({"<|mask|>"})))
    assert visible.decode(ids, skip_special=True) == "héllo<|mask|> wörld"
    assert visible.fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize("unit", ["ab", "é"])
def test_long_words_are_encoded_in_parts(unit: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    merge_long = Tokenizer._merge_long

    def record(self: Tokenizer, ids: list[int]) -> tuple[int, ...]:
        lengths.append(len(ids))
        return merge_long(self, ids)

    monkeypatch.setattr(Tokenizer, "_merge_long", record)
    monkeypatch.setattr("tokenizer.bpe._LONGEST_WORD", 1 << 12)
    text = unit * (15_000 // len(unit))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(lengths) <= 2 << 12


def test_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenizer.bpe._CACHED_WORDS", 10)
    tok = tiny([], "qwen")
    text = " ".join(f"word{i}" for i in range(100))
    assert tok.decode(tok.encode(text)) == text
    assert len(tok._cache) <= 10


def test_pickle_keeps_everything(tokenizer: Tokenizer) -> None:
    other = pickle.loads(pickle.dumps(tokenizer.with_options(TokenOptions(ignore_merges=True))))
    assert other.fingerprint == tokenizer.with_options(TokenOptions(ignore_merges=True)).fingerprint
    assert other.encode("def f(x):") == tokenizer.encode("def f(x):")
    assert len(pickle.dumps(tokenizer)) < 200_000, "the cache must not travel"


def test_fingerprint_sees_contents_not_representation() -> None:
    merges = [(b"a", b"b")]
    assert tiny(merges, "qwen").fingerprint == tiny(merges, PATTERNS["qwen"]).fingerprint
    fingerprints = {tiny(m, p).fingerprint for m in ([], merges) for p in PATTERNS}
    fingerprints.add(tiny(merges, "qwen", mask_token="<|mask|>").fingerprint)
    fingerprints.add(tiny(merges, "qwen", normalization="NFC").fingerprint)
    assert len(fingerprints) == 10


def test_what_has_no_ids_or_text_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"lone surrogate \(U\+D83D at character 3\)"):
        tokenizer.encode("ok \ud83d")
    for bad in (-1, 10**6):
        with pytest.raises(ValueError, match=f"token id {bad} is not in the vocabulary"):
            tokenizer.decode([0, bad])


def test_contradictions_are_refused() -> None:
    def refused(match: str, **changes: object) -> None:
        arguments: dict[str, object] = {"vocab": BYTES, "merges": [], "special_tokens": {}, "pattern": "qwen"}
        with pytest.raises(ValueError, match=match):
            Tokenizer(**{**arguments, **changes})  # type: ignore[arg-type]

    refused("lacks 1 single-byte tokens, first byte 0x41", vocab={k: v for k, v in BYTES.items() if k != b"A"})
    refused(r"merge 0 \('a', 'b'\) needs the token 'ab'", merges=[(b"a", b"b")])
    refused("id 0 belongs to two tokens", special_tokens={"<s>": 0})
    refused("empty token", special_tokens={"": 300})
    refused("'Ġ' is spelled like an ordinary token", special_tokens={"Ġ": 300})
    refused("mask_token '<m>' is not among", mask_token="<m>")
    refused("normalization 'NFKC' is unknown", normalization="NFKC")
    refused(r"pattern: '\(' is no regular expression", pattern="(")
    refused("'<s>' has the id 16777216: ids start at 0 and end at 16777215", special_tokens={"<s>": 1 << 24})
    for options in (TokenOptions(visible_tokens=frozenset({"<x>"})), TokenOptions(bos_token="<x>")):
        with pytest.raises(ValueError, match=r"'<x>' is not among the special tokens"):
            tiny([]).with_options(options)
    with pytest.raises(ValueError, match="bos_token None"):
        tiny([]).with_options(TokenOptions(adds_bos=True))


def test_holes_in_the_ids_are_allowed() -> None:
    tok = Tokenizer(BYTES, [], {"<|mask|>": 1000}, "gpt2", mask_token="<|mask|>")
    assert tok.vocab_size == 1001
    assert tok.byte_lengths()[300] == 0
    with pytest.raises(ValueError, match="token id 300"):
        tok.decode([300])
