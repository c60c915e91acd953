"""make_data: the same files with any number of workers; nothing is lost silently."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from config.data import LocalFiles
from diffusionlm.data import make_data as module
from diffusionlm.data.make_data import make_data
from diffusionlm.data.reader import Split
from diffusionlm.data.tokenization import WorkerPool
from tests.unit.data.make_data_cases import (
    TRAIN,
    VALIDATION,
    config_of,
    digest,
    error_of,
    ignore,
    jsonl,
    read,
    source_of,
)
from tokenizer import Tokenizer, load_tokenizer, save_tokenizer, train_bpe

pytestmark = pytest.mark.usefixtures("small_chunks")


def test_every_document_in_order(text_folder: Path, tmp_path: Path) -> None:
    directory = tmp_path / "made"
    index = make_data(config_of(text_folder, directory), ignore)
    tokenizer = load_tokenizer(directory / "tokenizer")
    assert tokenizer.fingerprint == load_tokenizer(text_folder / "tokenizer").fingerprint == index.tokenizer_fingerprint
    splits: tuple[tuple[Split, list[str]], ...] = (("train", TRAIN), ("validation", VALIDATION))
    for split, expected in splits:
        ids = read(directory, split)
        assert ids == [tokenizer.encode(text) for text in expected]
        assert [tokenizer.decode(tokens) for tokens in ids] == expected
        split_index = index.splits[split]
        num_tokens = sum(map(len, ids))
        assert (split_index.documents, split_index.tokens, split_index.skipped) == (len(expected), num_tokens, {})
        assert split_index.text_bytes == sum(len(text.encode()) for text in expected)
        # A shard ends with the document that brings it to 500 tokens.
        shards = split_index.shards
        assert len(shards) > 1
        assert all(shard.tokens >= 500 for shard in shards[:-1])
        assert all(shard.tokens < 500 + max(map(len, ids)) for shard in shards)
    all_ids = {token for split, _ in splits for tokens in read(directory, split) for token in tokens}
    assert not all_ids & {tokenizer.mask_token_id, tokenizer.eos_token_id}  # special tokens that text spells are text
    assert not (directory / "progress.json").exists()
    assert not list(directory.rglob("*.tmp"))


def test_a_tokenizer_is_trained_if_no_path_is_set(text_folder: Path, tmp_path: Path) -> None:
    messages: list[str] = []
    make_data(config_of(text_folder, tmp_path / "made", tokenizer=None), messages.append)
    expected = train_bpe(TRAIN, vocab_size=290)
    assert load_tokenizer(tmp_path / "made/tokenizer").fingerprint == expected.fingerprint
    assert read(tmp_path / "made", "train") == [expected.encode(text) for text in TRAIN]
    assert "training a byte-level BPE tokenizer of 290 tokens ..." in messages
    # tokenizer.path may also be a directory of shards.
    make_data(
        config_of(tmp_path, tmp_path / "again", tokenizer="made").model_copy(update=source_of(text_folder)), ignore
    )
    assert read(tmp_path / "again", "train") == read(tmp_path / "made", "train")


def test_ids_that_need_more_than_16_bits(text_folder: Path, tmp_path: Path) -> None:
    """The same tokens with ids from 70,000 on."""
    plain = load_tokenizer(text_folder / "tokenizer")
    moved = Tokenizer(
        {token: number + 70_000 for token, number in plain.vocab.items()},
        plain.merges,
        {text: number for number, text in enumerate(plain.special_tokens)},
        plain.pattern,
        mask_token=plain.mask_token,
        eos_token=plain.eos_token,
    )
    save_tokenizer(moved, tmp_path / "tokenizer")
    config = config_of(tmp_path, tmp_path / "made").model_copy(update=source_of(text_folder))
    assert make_data(config, ignore).dtype == "uint32"
    assert read(tmp_path / "made", "train") == [[number + 70_000 for number in plain.encode(text)] for text in TRAIN]


def test_files_do_not_depend_on_workers_or_chunks(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests: list[Any] = []
    for num_documents in (9, 1, 1_000):
        monkeypatch.setattr(module, "CHUNK_DOCUMENTS", num_documents)
        directory = tmp_path / str(len(digests))
        num_workers = 2 if num_documents == 1 else 0
        make_data(config_of(text_folder, directory, workers=num_workers), ignore)
        digests.append(digest(directory))
    assert digests[0] == digests[1] == digests[2]
    assert len(digests[0]) > 6


@pytest.mark.parametrize("tokenizer", ["tokenizer", None])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_nothing_to_read(split: str, tokenizer: str | None, text_folder: Path, tmp_path: Path) -> None:
    nothing, some = jsonl(tmp_path / "nothing.jsonl", ["", ""]), text_folder / "train.jsonl"
    paths, held_out = (nothing, some) if split == "train" else (some, nothing)
    source = LocalFiles(paths=(str(paths),), validation_paths=(str(held_out),))
    message = error_of(config_of(text_folder, tmp_path / "made", tokenizer).model_copy(update={"source": source}))
    assert message.startswith(f"[source] has no {split} documents (") and "left out: 2 empty" in message


def test_a_tokenizer_without_end_of_text(text_folder: Path, tmp_path: Path) -> None:
    plain = load_tokenizer(text_folder / "tokenizer")
    save_tokenizer(Tokenizer(plain.vocab, plain.merges, {}, plain.pattern), tmp_path / "tokenizer")
    config = config_of(tmp_path, tmp_path / "made").model_copy(update=source_of(text_folder))
    assert "the tokenizer has no end-of-text token, which ends documents" in error_of(config)


def test_a_killed_tokenizer_process_is_an_error(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = WorkerPool.submit

    def kill_and_submit(self: WorkerPool, *arguments: Any) -> Any:
        future = submit(self, *arguments)
        for process in multiprocessing.active_children():
            process.kill()
        return future

    with monkeypatch.context() as patch:
        patch.setattr(WorkerPool, "submit", kill_and_submit)
        assert "use fewer workers" in error_of(config_of(text_folder, tmp_path / "made", workers=1))
    make_data(config_of(text_folder, tmp_path / "made", workers=1), ignore)
    assert len(read(tmp_path / "made", "train")) == len(TRAIN)
