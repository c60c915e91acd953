"""Our tokenizer beside `tokenizers` and `tiktoken`, on text from all planes of Unicode and text made to break it.

The oracles cut by Unicode 16, and `tokenizers` normalises by Unicode 9: what came later is left out here, since a newer
table treats it otherwise.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarking.bench_tokenizer import OURS, check_equal_outputs, train_tokenizers
from tokenizer import PATTERNS, IncrementalDecoder, Tokenizer, load_tokenizer, save_tokenizer, train_bpe
from tokenizer.byte_alphabet import BYTE_ORDER, bytes_to_chars

tokenizers: Any = pytest.importorskip("tokenizers")
tiktoken: Any = pytest.importorskip("tiktoken")

ASSIGNED = [
    chr(code)
    for code in range(0x110000)
    if (kind := unicodedata.category(chr(code))) not in ("Cn", "Cs")
    if kind != "Co" or code % 37 == 0
]
"""All characters, but of the private ones, which no pattern tells apart, one in 37."""
NONCHARACTERS = [chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF)]
BYTES = {bytes([byte]): token_id for token_id, byte in enumerate(BYTE_ORDER)}

ALPHABETS = [
    "ab '\n\r\t 1",
    "aA'sStTlLrReEvVmMdD\u017f\u212a' ",
    " \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u200b\u2028\u2029\u3000x",
    "0123456789\u0660\u0661\xb2\xbd\u2167\u4e00a ",
    "<|>endoftxmask \n",
    "e\u0301\u0323\u0327\u0308\u1100\u1161\u11a8\u0958\ufb01\u2126\uac00a ",
    "\U0001f469\u200d\ufe0f\U0001f3fd\U0001f1e9\U0001f1ea 1\u20e3\U0001f468",
    "\0\x01\x7f\ue000\uf8ff\U000f0000\U0010ffff\uffff\ufffe a1",
    '!"#$%&/()=-_ .,\n\r;ab',
]
"""What the patterns tell apart, and what other programs have stumbled over."""


def random_texts(seed: int, number: int) -> Iterator[str]:
    rng = np.random.default_rng(seed)
    for _ in range(number):
        kind = rng.integers(4)
        if kind == 0:
            symbols = ALPHABETS[rng.integers(len(ALPHABETS))]
        elif kind == 1:
            symbols = "".join(rng.choice(ALPHABETS, 3, replace=False))
        else:
            symbols = "".join(ASSIGNED[index] for index in rng.integers(len(ASSIGNED), size=200)) + " \n a" * (kind - 2)
        length = int(rng.choice([0, 1, 2, 3, 5, 10, 30, 200, 1000]))
        yield "".join(symbols[index] for index in rng.integers(len(symbols), size=length))


def sources() -> list[str]:
    folder = Path(os.__file__).parent
    return [(folder / name).read_text(encoding="utf-8") for name in ("argparse.py", "typing.py", "textwrap.py")]


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    return [*sources(), *random_texts(0, 200), "a" * 5000, "-" * 3000, " " * 2000, "\n" * 500, "é" * 999]


Family = tuple[Tokenizer, Any, Any]


@pytest.fixture(scope="module")
def family(corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """Ours, and both oracles with the same vocabulary, by pattern."""
    made: dict[str, Family] = {}

    def make(pattern: str) -> Family:
        if pattern not in made:
            ours = train_bpe(corpus, vocab_size=1500, pattern=pattern)
            made[pattern] = (ours, as_tokenizers(ours, tmp_path_factory.mktemp(pattern)), as_tiktoken(ours))
        return made[pattern]

    return make


def as_tokenizers(ours: Tokenizer, folder: Path) -> Any:
    save_tokenizer(ours, folder)
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def as_tiktoken(ours: Tokenizer) -> Any:
    ranks, special = dict(ours.vocab), dict(ours.special_tokens)
    return tiktoken.Encoding("ours", pat_str=PATTERNS[ours.pattern], mergeable_ranks=ranks, special_tokens=special)


def ids_of(theirs: Any, text: str) -> list[int]:
    ids: list[int] = theirs.encode(text, add_special_tokens=False).ids
    return ids


def assert_same(family: Family, text: str) -> None:
    ours, by_tokenizers, by_tiktoken = family
    ids = ours.encode(text)
    assert ids == by_tiktoken.encode_ordinary(text), ascii(text[:200])
    assert ours.encode(text, allow_special=True) == ids_of(by_tokenizers, text), ascii(text[:200])
    assert ours.decode(ids) == text and ours.decode_bytes(ids) == text.encode()


@pytest.mark.parametrize("num_slices", [24, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_all_planes(pattern: str, num_slices: int, family: Callable[[str], Family]) -> None:
    """The fast test takes one of 24 random slices of Unicode, another one for each pattern."""
    order = np.random.default_rng(1).permutation(len(ASSIGNED))
    first = list(PATTERNS).index(pattern) % num_slices
    shuffled = [ASSIGNED[index] for index in order[first::num_slices]] + NONCHARACTERS
    assert {ord(char) >> 16 for char in shuffled} >= {0, 1, 2, 3, 14, 15, 16}
    for start in range(0, len(shuffled), 20_000):
        assert_same(family(pattern), "".join(shuffled[start : start + 20_000]))
    for joint in (" ", "\n", "a", "'", "1"):
        assert_same(family(pattern), joint.join(shuffled[:5_000]))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_random_texts(pattern: str, family: Callable[[str], Family]) -> None:
    for text in ["", "\0", "\r\n", "\ufeffx", *random_texts(2, 200)]:
        assert_same(family(pattern), text)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_special_tokens_in_the_text(pattern: str, family: Callable[[str], Family]) -> None:
    ours, by_tokenizers, by_tiktoken = family(pattern)
    rng = np.random.default_rng(3)
    pieces = ["<|endoftext|>", "<|mask|>", "<|mask|", "|>", "<", " ", "\n", "mask", "e\u0301", "'s"]
    for _ in range(300):
        text = "".join(rng.choice(pieces, int(rng.integers(1, 12))))
        ids = ours.encode(text, allow_special=True)
        assert ids == ids_of(by_tokenizers, text) == by_tiktoken.encode(text, allowed_special="all")
        assert ours.decode(ids) == text
        assert set(ours.encode(text)).isdisjoint(ours.special_tokens.values())


@pytest.mark.parametrize(
    "text",
    [
        "a" * 60_000,
        pytest.param("a" * 1_000_000, marks=pytest.mark.slow),
        " " * 60_000 + "x",
        "é" * 30_000,
        "a" + "\u0301" * 30_000,
        "".join(chr(97 + code) for code in np.random.default_rng(4).integers(20, size=60_000)),
    ],
    ids=lambda text: f"{text[:2]!a}*{len(text)}",
)
def test_words_of_up_to_a_megabyte(text: str, family: Callable[[str], Family]) -> None:
    ours, by_tokenizers, _ = family("qwen")  # tiktoken gives up on some of them
    ids = ours.encode(text)
    assert ids == ids_of(by_tokenizers, text)
    assert ours.decode(ids) == text


@pytest.mark.parametrize("pattern", ["qwen", "gpt2"])
def test_nfc(pattern: str, family: Callable[[str], Family], tmp_path: Path) -> None:
    plain = family(pattern)[0]
    ours = Tokenizer(plain.vocab, plain.merges, plain.special_tokens, pattern, "NFC")
    theirs = as_tokenizers(ours, tmp_path)
    old = unicodedata.ucd_3_2_0
    single = [old.normalize("NFD", char) for char in ASSIGNED if old.normalize("NFD", char) != char]
    assert len(single) > 12_000
    for text in [" ".join(single), "\u1100\u1161\u11a8" * 100, "a\u0323\u0301 a\u0301\u0323", *random_texts(6, 300)]:
        if any(unicodedata.combining(char) and old.category(char) == "Cn" for char in text):
            continue  # a mark that their table lacks
        ids = ours.encode(text, allow_special=True)
        assert ids == ids_of(theirs, text), ascii(text[:200])
        assert ours.decode(ours.encode(text)) == unicodedata.normalize("NFC", text)


def test_added_tokens_that_are_marked_normalized(tmp_path: Path) -> None:
    """`tokenizers` writes the file, and searches those after normalization; ours, before, finds the same tokens."""
    theirs = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={bytes_to_chars(b): i for b, i in BYTES.items()}, merges=[])
    )
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.normalizer = tokenizers.normalizers.NFC()
    early, late = ["<b>", "ab", "abc"], ["<a>", "q1", "  "]
    theirs.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in early])
    theirs.add_tokens([tokenizers.AddedToken(text, normalized=True) for text in late])
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    assert ours.options.normalized_tokens == set(late)
    rng = np.random.default_rng(7)
    pieces = [*early, *late, "e\u0301", "1", "<", "c", " ", "x"]
    texts = ["abc", "x<b>", "   "]
    for text in [*texts, *("".join(rng.choice(pieces, int(rng.integers(1, 9)))) for _ in range(2000))]:
        assert ours.encode(text, allow_special=True) == ids_of(theirs, text), ascii(text)
    save_tokenizer(ours, tmp_path / "again")
    again = load_tokenizer(tmp_path / "again")
    assert again.fingerprint == ours.fingerprint and again.options.normalized_tokens == set(late)
    written = tokenizers.Tokenizer.from_file(str(tmp_path / "again" / "tokenizer.json"))
    assert all(ids_of(written, text) == ids_of(theirs, text) for text in texts)


@pytest.mark.parametrize("length", [12, 60, 600])
def test_merges_in_an_order_that_no_training_gives(length: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    for number in range(15):
        tokens, merges = [b"a", b"b", b"c"], dict[tuple[bytes, bytes], None]()
        while len(merges) < 14:
            pair = (tokens[rng.integers(len(tokens))], tokens[rng.integers(len(tokens))])
            merges[pair] = None
            tokens.append(b"".join(pair))
        vocab = BYTES | {token: 256 + i for i, token in enumerate(dict.fromkeys(tokens[3:]))}
        order = rng.permutation(len(merges))
        ours = Tokenizer(vocab, [list(merges)[index] for index in order], {}, r"[\s\S]+")
        theirs = as_tokenizers(ours, tmp_path / str(number))
        for _ in range(10):
            text = "".join("abc"[index] for index in rng.integers(3, size=length))
            assert ours.encode(text) == ids_of(theirs, text)


def test_decoding_any_ids(family: Callable[[str], Family]) -> None:
    ours, by_tokenizers, _ = family("qwen")
    rng = np.random.default_rng(9)
    for _ in range(500):
        ids = rng.integers(ours.vocab_size, size=rng.integers(15)).tolist()
        for skip in (False, True):
            assert ours.decode(ids, skip_special=skip) == by_tokenizers.decode(ids, skip_special_tokens=skip)
        decoder = IncrementalDecoder(ours)
        assert "".join(map(decoder.push, ids)) + decoder.finish() == ours.decode(ids)


@pytest.mark.parametrize(
    "pattern", [pytest.param(name, marks=[] if name == "qwen" else pytest.mark.slow) for name in PATTERNS]
)
def test_training_on_nasty_text(pattern: str, corpus: list[str]) -> None:
    order = np.random.default_rng(10).permutation(len(ASSIGNED))[:8_000]
    special = ["<|endoftext|><|mask|>" * 50, "<|mask|>\n<|endoftext|>"]
    texts = [*corpus, "".join(ASSIGNED[index] for index in order), *special, *corpus[:2], "", "\0" * 50]
    ours = train_bpe(texts, vocab_size=2002, pattern=pattern)
    check_equal_outputs("training", {OURS: ours, "tokenizers": train_tokenizers(texts, 2000, pattern)})


@pytest.mark.parametrize(("kind", "size"), [("ties", 2000), ("long words", 400)])
def test_training_on_few_letters(kind: str, size: int) -> None:
    """Ties: every text is there as often as any other, so that most counts are equal; the merges run out."""
    for seed in range(10 if kind == "ties" else 1):
        rng = np.random.default_rng(seed)
        if kind == "ties":
            texts = ["".join("ab\u00e9-"[index] for index in rng.integers(4, size=7)) for _ in range(80)] * 2
        else:
            texts = ["".join("acgt"[index] for index in rng.integers(4, size=20_000)), "a" * 10_001]
        ours = train_bpe(texts, vocab_size=size + 2, pattern="llama3")
        check_equal_outputs("training", {OURS: ours, "tokenizers": train_tokenizers(texts, size, "llama3")})
