"""make_data: the same files with any number of workers and after interruptions; other inputs and full disks."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from config.data import LocalFiles, Shards
from config.make_data import MakeDataConfig, MakeDataOutputConfig
from config.tokenizer import TokenizerConfig
from diffusionlm.data import make_data as module
from diffusionlm.data.make_data import make_data
from diffusionlm.data.reader import Split
from diffusionlm.data.shard_files import ShardWriter
from diffusionlm.data.shards import ShardDocuments
from diffusionlm.data.tokenization import WorkerPool
from tokenizer import Tokenizer, load_tokenizer, save_tokenizer, train_bpe

ROOT = Path(__file__).parents[3]
KILLED = Path(__file__).with_name("killed_make_data.py")
pytestmark = pytest.mark.usefixtures("small_chunks")
WORDS = ["the", "cat", "sat", "on", "a", "mat", "naïve", "日本", "<|mask|>", "<|endoftext|>", "🙂"]


def texts(seed: int, count: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=rng.integers(1, 30))) for _ in range(count)]


TRAIN, VALIDATION = texts(0, 200), texts(1, 30)


def jsonl(path: Path, rows: list[str]) -> Path:
    path.write_text("\n".join(json.dumps({"text": row}) for row in rows) + "\n", encoding="utf-8")
    return path


def config_of(folder: Path, directory: Path, tokenizer: str | None = "tokenizer", **output: Any) -> MakeDataConfig:
    return MakeDataConfig(
        source=LocalFiles(paths=(str(folder / "train.jsonl"),), validation_paths=(str(folder / "validation.jsonl"),)),
        tokenizer=TokenizerConfig(path=str(folder / tokenizer)) if tokenizer else TokenizerConfig(vocab_size=290),
        output=MakeDataOutputConfig(directory=directory, **{"workers": 0, "shard_tokens": 500, **output}),
    )


def source_of(folder: Path) -> dict[str, Any]:
    return {"source": config_of(folder, folder).source}


def ignore(message: str) -> None:
    """A log that drops messages."""


def digest(directory: Path) -> dict[str, str]:
    """Checksum of every file."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def read(directory: Path, split: Split) -> list[list[int]]:
    documents = ShardDocuments(Shards(path=directory), split, "data.source")
    return [tokens.tolist() for tokens in documents.documents(np.arange(len(documents)))]


def error_of(config: MakeDataConfig) -> str:
    with pytest.raises(ValueError) as caught:
        make_data(config, ignore)
    return str(caught.value)


class Stopped(BaseException):
    """Stands for the end of the process."""


def stop(*_: object) -> None:
    raise Stopped


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text files and a tokenizer."""
    folder = tmp_path_factory.mktemp("text")
    jsonl(folder / "train.jsonl", TRAIN)
    jsonl(folder / "validation.jsonl", VALIDATION)
    save_tokenizer(train_bpe(TRAIN, vocab_size=300), folder / "tokenizer")
    return folder


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the chunks so small that there are many."""
    monkeypatch.setattr(module, "CHUNK_DOCUMENTS", 9)


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


@pytest.mark.slow
def test_sigkill_at_every_step(tmp_path: Path) -> None:
    """Kill before each write, fsync, rename and removal; kill the continuation as well."""
    texts = tmp_path / "texts"
    texts.mkdir()
    jsonl(texts / "train.jsonl", TRAIN[:15])
    jsonl(texts / "validation.jsonl", VALIDATION[:3])
    config = config_of(texts, tmp_path / "made", None, shard_tokens=250)
    values = json.loads(config.model_dump_json(exclude_unset=True))
    values["source"]["kind"] = "files"
    result = subprocess.run(
        [sys.executable, KILLED, json.dumps(values), str(tmp_path / "reference")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[-1]) > 20


def test_skipped_records_are_counted_once_over_interruptions(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.jsonl"
    rows = [json.dumps({"text": text}) for text in TRAIN]
    for index in range(3, 200, 4):
        rows[index] = ["{broken", '{"text": ""}', '{"text": null}'][index // 4 % 3]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    source = LocalFiles(
        paths=(str(path),),
        validation_paths=(str(text_folder / "validation.jsonl"),),
        on_bad_row="skip",
        max_documents=120,
    )
    whole = config_of(text_folder, tmp_path / "whole").model_copy(update={"source": source})
    shard_index = make_data(whole, ignore)
    skipped = shard_index.splits["train"].skipped
    assert shard_index.splits["train"].documents == 120
    assert skipped["empty"] == 13
    assert sum(skipped.values()) == 39  # one in four of the first 159 records
    interrupted = whole.model_copy(
        update={"output": whole.output.model_copy(update={"directory": tmp_path / "interrupted"})}
    )
    save = module.save_progress

    def save_once(progress: Any, directory: Path) -> None:
        save(progress, directory)
        raise Stopped

    monkeypatch.setattr(module, "save_progress", save_once)
    for _ in range(100):
        try:
            make_data(interrupted, ignore)
            break
        except Stopped:
            continue
    assert digest(tmp_path / "interrupted") == digest(tmp_path / "whole")


def test_a_complete_directory_is_checked(text_folder: Path, tmp_path: Path) -> None:
    config = config_of(text_folder, tmp_path / "made")
    index = make_data(config, ignore)
    before = digest(tmp_path / "made")
    messages: list[str] = []
    other_workers = config.model_copy(update={"output": config.output.model_copy(update={"workers": 1})})
    assert make_data(other_workers, messages.append) == index
    assert messages == [f"{tmp_path / 'made'} is complete; comparing its files with their checksums ..."]
    assert digest(tmp_path / "made") == before
    # Killed between the index and the removal of the progress.
    (tmp_path / "made/progress.json").write_text("{}")
    make_data(config, ignore)
    assert digest(tmp_path / "made") == before
    # Made by a version with other formats.
    saved = json.loads((tmp_path / "made/index.json").read_text())
    saved["config"]["output"]["format"] = "bin"
    (tmp_path / "made/index.json").write_text(json.dumps(saved))
    make_data(config, ignore)
    path = tmp_path / "made/train-00001.bin"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    message = error_of(config)
    assert f"{path} is damaged" in message and "index.json" in message
    path.unlink()
    assert f"{path} is missing" in error_of(config)


@pytest.mark.parametrize("complete", [False, True])
def test_a_directory_from_other_inputs_is_rejected(
    text_folder: Path, tmp_path: Path, complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for name, rows in (("train", TRAIN), ("validation", VALIDATION)):
        jsonl(text / f"{name}.jsonl", rows)
    save_tokenizer(load_tokenizer(text_folder / "tokenizer"), text / "tokenizer")
    directory = tmp_path / "made"
    config = config_of(text, directory)
    if complete:
        make_data(config, ignore)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(module, "check_files", stop)  # before the index is written
            with pytest.raises(Stopped):
                make_data(config, ignore)
    before = digest(directory)

    def assert_difference(config: MakeDataConfig, line: str) -> None:
        message = error_of(config)
        assert message.startswith(f"output.directory = {directory} holds data from other inputs:\n  ")
        assert message.endswith("\nname another directory, or remove this one")
        assert f"\n  {line}" in message
        assert digest(directory) == before

    assert_difference(
        config_of(text, directory, tokenizer=None), f'tokenizer.path: "{text / "tokenizer"}" -> (not set)\n'
    )
    jsonl(text / "train.jsonl", [*TRAIN[:-1], "something else"])
    assert_difference(config, "the train documents: files/")
    jsonl(text / "train.jsonl", TRAIN)
    save_tokenizer(train_bpe(["other"], vocab_size=260), text / "tokenizer")
    assert_difference(config, f"the tokenizer in {text / 'tokenizer'}: it has another fingerprint now\n")
    save_tokenizer(load_tokenizer(text_folder / "tokenizer"), text / "tokenizer")
    make_data(config, ignore)
    assert read(directory, "validation")


def test_foreign_and_damaged_directories(text_folder: Path, tmp_path: Path) -> None:
    directory = tmp_path / "mine"
    directory.mkdir()
    (directory / "thesis.txt").write_text("my thesis")
    message = error_of(config_of(text_folder, directory))
    assert "thesis.txt" in message and "name another directory" in message
    assert (directory / "thesis.txt").read_text() == "my thesis"
    file = directory / "thesis.txt"
    assert f"output.directory = {file} cannot be written: File exists" in error_of(config_of(text_folder, file))
    (directory / "thesis.txt").unlink()
    (directory / "progress.json").write_text('{"version": 1, "config"')
    assert "progress.json is damaged" in error_of(config_of(text_folder, directory))


def test_one_process_at_a_time(text_folder: Path, tmp_path: Path) -> None:
    from files.lock import lock_directory

    with lock_directory(tmp_path / "made"):
        message = error_of(config_of(text_folder, tmp_path / "made"))
    assert "in use" in message and "wait for it or stop it" in message
    make_data(config_of(text_folder, tmp_path / "made"), ignore)


@pytest.mark.parametrize("free_bytes", [0, 1_500, 6_000])
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk(text_folder: Path, tmp_path: Path, free_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make_data(config_of(text_folder, tmp_path / "reference"), ignore)
    config = config_of(text_folder, tmp_path / "made")
    add_documents, num_left = ShardWriter.add_documents, [free_bytes]

    def write_on_small_disk(self: ShardWriter, documents: list[Any], text_bytes: list[int]) -> int:
        num_left[0] -= 2 * sum(map(len, documents))
        if num_left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return add_documents(self, documents, text_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "add_documents", write_on_small_disk)
        message = error_of(config)
    assert f"output.directory = {tmp_path / 'made'}" in message and "No space left on device" in message
    assert "repeat the command" in message
    progress = json.loads((tmp_path / "made/progress.json").read_text())
    shards = [shard for split in progress["splits"].values() for shard in split["index"]["shards"]]
    assert bool(shards) == (free_bytes > 0)
    assert not list((tmp_path / "made").glob("*-*.tmp"))
    make_data(config, ignore)
    assert digest(tmp_path / "made") == digest(tmp_path / "reference")
