"""Shards: tokens are read back; damaged files; an order that is a permutation, depends on its key, and resumes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from config.data import Shards
from diffusionlm.data import shards as shards_module
from diffusionlm.data.reader import Split, Tokens
from diffusionlm.data.shard_files import ShardIndex, ShardWriter, SplitIndex, check_files, read_index, select_dtype
from diffusionlm.data.shards import FEISTEL_ROUNDS, KeyedPermutation, ShardDocuments, ShardReader
from diffusionlm.diffusion.rng import RngStream, keyed_rng

EOS = 3
Drain = Callable[..., list[Any]]


def random_documents(seed: int, count: int, vocab_size: int, longest: int = 60) -> list[Tokens]:
    """Random documents without end-of-text; some are empty."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, longest, count)
    lengths[rng.random(count) < 0.1] = 0
    ids = [rng.integers(4, vocab_size, length, dtype=np.int32) for length in lengths]
    return [np.where(rng.random(len(tokens)) < 0.1, 1, tokens).astype(np.int32) for tokens in ids]


def write_shards(folder: Path, shards: list[list[Tokens]], vocab_size: int = 1_000, split: Split = "train") -> Path:
    """Write a complete directory with these documents in its shards."""
    dtype = select_dtype(vocab_size)
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    entries = []
    for number, documents in enumerate(shards):
        writer = ShardWriter(folder, split, number, dtype, 1 << 40)
        for first in range(0, len(documents), 7):
            part = documents[first : first + 7]
            writer.add_documents(part, [3 * len(tokens) for tokens in part])
        entries.append(writer.finish())
    split_index = SplitIndex(identity="source/1", provenance="7 files of 1,234 bytes", shards=tuple(entries))
    index = ShardIndex(
        dtype=dtype,
        vocab_size=vocab_size,
        eos_token_id=EOS,
        tokenizer_fingerprint="abc",
        config={},
        splits={split: split_index},
    )
    (folder / "index.json").write_text(index.model_dump_json(), encoding="utf-8")
    return folder


def open_shards(folder: Path, max_documents: int | None = None, split: Split = "train") -> ShardDocuments:
    return ShardDocuments(Shards(path=folder, max_documents=max_documents), split, "data.source")


def read_document(documents: ShardDocuments, index: int) -> Tokens:
    return documents.documents(np.array([index]))[0]


def same(actual: list[Tokens], expected: list[Tokens]) -> bool:
    return len(actual) == len(expected) and all(map(np.array_equal, actual, expected))


@pytest.fixture
def three(tmp_path: Path) -> tuple[Path, list[Tokens]]:
    """A directory of three shards, and its 100 documents."""
    documents = random_documents(1, 100, 1_000)
    return write_shards(tmp_path / "made", [documents[:40], documents[40:41], documents[41:]]), documents


@pytest.mark.parametrize("vocab_size", [1_000, 1 << 16, 200_000])
def test_tokens_are_read_back(tmp_path: Path, vocab_size: int) -> None:
    documents = random_documents(vocab_size, 300, vocab_size)
    documents[7] = np.random.default_rng(0).integers(4, vocab_size, 1_000_000, dtype=np.int32)
    documents[8] = np.array([vocab_size - 1, 0, 4], dtype=np.int32)
    documents[299] = np.array([], dtype=np.int32)
    cuts = [documents[:1], documents[1:7], documents[7:8], documents[8:250], documents[250:]]
    actual = open_shards(write_shards(tmp_path, cuts, vocab_size))
    assert len(actual) == 300
    assert actual.num_tokens == sum(map(len, documents))
    assert same(actual.documents(np.arange(300)), documents)
    order = np.random.default_rng(1).integers(0, 300, 1_000)
    assert same(actual.documents(order), [documents[index] for index in order])
    for index in (0, 1, 7, 8, 299):
        assert np.array_equal(read_document(actual, index), documents[index])
        assert read_document(actual, index).dtype == np.int32
    assert actual.documents(np.array([], dtype=np.int64)) == []


def test_the_documented_files(tmp_path: Path) -> None:
    documents = [np.array(ids, dtype=np.int32) for ids in ([5, 600], [], [7], [8, 9, 10])]
    folder = write_shards(tmp_path / "bin", [documents[:3], documents[3:]])
    assert (folder / "train-00000.bin").read_bytes() == bytes([5, 0, 600 % 256, 600 // 256, 7, 0])
    assert np.fromfile(folder / "train-00000.idx", "<i8").tolist() == [0, 2, 2, 3]
    assert np.fromfile(folder / "train-00001.bin", "<u2").tolist() == [8, 9, 10]
    wide = write_shards(tmp_path / "wide", [[np.array([70_000, 1], dtype=np.int32)]], vocab_size=70_001)
    assert np.fromfile(wide / "train-00000.bin", "<u4").tolist() == [70_000, 1]


def test_identity_and_provenance(tmp_path: Path, three: tuple[Path, list[Tokens]]) -> None:
    folder, documents = three
    actual = open_shards(folder)
    assert actual.identity == open_shards(folder).identity
    assert actual.identity.startswith("shards/train/")
    changed = [tokens.copy() for tokens in documents]
    next(tokens for tokens in changed if len(tokens))[0] += 1
    again = write_shards(tmp_path / "again", [documents[:40], documents[40:41], documents[41:]])
    other = write_shards(tmp_path / "other", [changed[:40], changed[40:41], changed[41:]])
    fewer = open_shards(folder, 41)
    assert (len(fewer), fewer.num_tokens) == (41, sum(map(len, documents[:41])))
    assert same(fewer.documents(np.arange(41)), documents[:41])
    held_out = write_shards(tmp_path / "validation", [documents], split="validation")
    assert len(open_shards(held_out, 5, "validation")) == 100, "it limits training documents only"
    assert open_shards(again).identity == actual.identity
    assert len({actual.identity, open_shards(other).identity, fewer.identity}) == 3
    text = (again / "index.json").read_text()
    (again / "index.json").write_text(text.replace('"abc"', '"abd"'))
    assert open_shards(again).identity != actual.identity
    assert (actual.tokenizer_directory, actual.tokenizer_fingerprint) == (folder / "tokenizer", "abc")
    tokens = sum(map(len, documents))
    size = sum(path.stat().st_size for path in folder.glob("train-*"))
    assert actual.provenance == (
        f"100 documents, {tokens:,} tokens, {size / 2**20:,.1f} MiB of bin in {folder.name}, "
        "made from 7 files of 1,234 bytes"
    )
    assert fewer.provenance.startswith("the first 41 of 100 documents")


@pytest.mark.parametrize("ahead", [1, 4, 1_000])
def test_an_epoch_is_a_permutation(
    three: tuple[Path, list[Tokens]], monkeypatch: pytest.MonkeyPatch, drain: Drain, ahead: int
) -> None:
    monkeypatch.setattr(shards_module, "LOOK_AHEAD_DOCUMENTS", ahead)
    folder, documents = three
    reader = ShardReader(open_shards(folder), 11, is_shuffled=True)
    orders = []
    for epoch in (0, 1, 0):
        order = KeyedPermutation(100, 11, RngStream.DOCUMENT_ORDER, epoch)(np.arange(100)).tolist()
        orders.append(order)
        assert same(drain(reader, (1, 7, 30), epoch), [documents[index] for index in order])
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == list(range(100))
    in_order = ShardReader(open_shards(folder), 11, is_shuffled=False)
    for epoch in (0, 1):
        assert same(drain(in_order, (13,), epoch), documents)


@pytest.mark.parametrize("ahead", [1, 8, 1_000])
def test_resuming_at_every_position(
    three: tuple[Path, list[Tokens]],
    monkeypatch: pytest.MonkeyPatch,
    drain: Drain,
    check_resuming: Drain,
    ahead: int,
) -> None:
    monkeypatch.setattr(shards_module, "LOOK_AHEAD_DOCUMENTS", ahead)
    documents = open_shards(three[0])
    whole = check_resuming(lambda: ShardReader(documents, 4, True), same, epoch=3)
    reader = ShardReader(documents, 4, True)
    for cut in range(1, 101):  # this reader was at another position before
        assert same(drain(reader, (11,), 3, cut), whole[cut:])
    assert reader.read(3, None, 101)[1] is None and reader.read(3, 100, 5) == ([], None)


def error_of(folder: Path, split: Split = "train") -> str:
    with pytest.raises(ValueError) as caught:
        open_shards(folder, split=split)
    return str(caught.value)


def test_invalid_directories(tmp_path: Path, three: tuple[Path, list[Tokens]]) -> None:
    folder, _ = three
    missing = tmp_path / "none"
    assert error_of(missing) == f"data.source.path = {missing} is not a directory; make one with diffusionlm-make-data"
    assert "has no index.json; name a directory that diffusionlm-make-data wrote" in error_of(tmp_path)
    (tmp_path / "progress.json").write_text("{}")
    assert "is incomplete; repeat the diffusionlm-make-data command" in error_of(tmp_path)
    assert f"data.source.path = {folder} has no validation documents" in error_of(folder, "validation")
    path = folder / "index.json"
    text = path.read_text()
    for broken, words in (
        (text[:-20], f"{path} is damaged, or of another version: "),
        (text.replace('"version":1', '"version":2'), "version: Input should be 1; make the data again, or with the"),
        (text.replace('"documents":40', '"documents":"x"'), "splits.train.shards.0.documents: Input should be a valid"),
    ):
        assert broken != text
        path.write_text(broken)
        assert words in error_of(folder)
    path.write_text(text)
    (folder / "tokenizer").rmdir()
    assert f"{folder / 'tokenizer'} is missing" in error_of(folder)


def test_missing_and_short_files(three: tuple[Path, list[Tokens]]) -> None:
    folder, _ = three
    for path in sorted(folder.glob("train*")):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        assert error_of(folder) == (
            f"{path} has {len(whole) - 1:,} bytes, not {len(whole):,}; copy it again, or make the data again"
        )
        path.write_bytes(whole + b"\0")
        assert f"{path} has {len(whole) + 1:,} bytes" in error_of(folder)
        path.unlink()
        assert error_of(folder).startswith(f"{path} is missing, though index.json names it")
        path.write_bytes(whole)
        assert len(open_shards(folder)) == 100


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0xFF
    path.write_bytes(data)


def test_damage_of_the_same_length(tmp_path: Path) -> None:
    documents = [np.full(5, 7, dtype=np.int32)] * 10
    for vocab_size, place, token_id in ((1_000, 11, 0xFF07), (70_000, 23, 0xFF000007)):
        folder = write_shards(tmp_path / str(vocab_size), [documents], vocab_size=vocab_size)
        flip(folder / "train-00000.bin", place)
        assert read_document(open_shards(folder), 0).tolist() == [7] * 5
        with pytest.raises(ValueError, match=f"has the token id {token_id}, and the vocabulary has {vocab_size};"):
            read_document(open_shards(folder), 1)
    for place in (0, 24, -8):
        folder = write_shards(tmp_path / str(place), [documents])
        path = folder / "train-00000.idx"
        flip(path, place)
        message = error_of(folder)
        assert message.startswith(f"{path} is damaged") and "does not split 50 tokens into 10 documents" in message
        with pytest.raises(ValueError, match=r"its checksum is not the one in index\.json"):
            check_files(folder, read_index(folder, "key").splits["train"], reads_contents=True)


STREAM = RngStream.DOCUMENT_ORDER


def order(n: int, seed: int = 0, *key: int) -> list[int]:
    return KeyedPermutation(n, seed, STREAM, *key)(np.arange(n)).tolist()


@pytest.mark.parametrize("key", [(0, 0), (7, 3)])
def test_every_item_once(key: tuple[int, int]) -> None:
    for n in [*range(1, 301), 1023, 1024, 1025, 65_536, 65_537, 1_000_003]:
        items = KeyedPermutation(n, key[0], STREAM, key[1])(np.arange(n))
        assert items.dtype == np.int64
        assert np.array_equal(np.sort(items), np.arange(n)), n


def permute_index(n: int, index: int, keys: list[int]) -> int:
    """Reference: Python integers, one index at a time."""
    mask = 2**64 - 1

    def below(size: int, value: int, key: int) -> int:
        bits = (value + key) * 0x9E3779B97F4A7C15 & mask
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & mask
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & mask
        return (bits >> 32) * size >> 32

    a = math.ceil(math.sqrt(n))
    b = math.ceil(n / a)
    while True:
        left, right = index % a, index // a
        sizes = (a, b)
        for key in keys:
            left, right = right, (left + below(sizes[0], right, key)) % sizes[0]
            sizes = sizes[::-1]
        index = left + a * right
        if index < n:
            return index


@pytest.mark.parametrize("n", [1, 2, 3, 5, 12, 30, 31, 257])
def test_it_equals_the_reference_network(n: int) -> None:
    keys = keyed_rng(5, STREAM, 2).bit_generator.random_raw(FEISTEL_ROUNDS).tolist()
    assert order(n, 5, 2) == [permute_index(n, index, keys) for index in range(n)]


def test_the_order_stays_the_same() -> None:
    """Checkpoints store positions in this order: another order would read other documents."""
    assert order(12, 0, 0) == [1, 8, 2, 9, 4, 10, 6, 3, 11, 5, 0, 7]


@pytest.mark.parametrize("n", [10**12, 1 << 62])
def test_more_items_than_fit_into_memory(n: int) -> None:
    permutation = KeyedPermutation(n, 3, STREAM, 1)
    indices = np.concatenate([np.arange(50_000), n - 1 - np.arange(50_000)])
    items = permutation(indices)
    assert len(set(items.tolist())) == 100_000
    assert 0 <= items.min() <= items.max() < n
    # Spread over all of them: the mean of 100,000 has a standard error of 0.0009.
    assert items.astype(np.float64).mean() / n == pytest.approx(0.5, abs=0.005)


def test_keys_matter() -> None:
    orders = [order(50, *key) for key in [(0, 0), (0, 1), (1, 0), (0,), (0, 0, 0), (0, 1, 0), (2**70, 0)]]
    assert len(set(map(tuple, orders))) == len(orders)
    assert order(50, 0, 1) == orders[1]
    other = KeyedPermutation(50, 0, RngStream.SEQUENCE_ORDER, 0)(np.arange(50)).tolist()
    assert other not in orders
