"""make_data: the same files after interruptions and with any number of workers; nothing is lost silently."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from config.data import LocalFiles, MarkovChain, Shards
from config.make_data import MakeDataConfig, MakeDataOutputConfig, ShardFormat
from config.tokenizer import TokenizerConfig
from diffusionlm.data import make_data as module
from diffusionlm.data import shard_writers
from diffusionlm.data.make_data import make_data
from diffusionlm.data.reader import Split
from diffusionlm.data.shards import ShardDocuments
from tokenizer import Tokenizer, load_tokenizer, save_tokenizer, train_bpe

ROOT = Path(__file__).parents[3]
FORMATS: tuple[ShardFormat, ...] = ("bin", "parquet", "dat")
WORDS = ["the", "cat", "sat", "on", "a", "mat", "naïve", "日本", "<|mask|>", "<|endoftext|>", "🙂"]


def texts(seed: int, count: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=rng.integers(1, 30))) for _ in range(count)]


TRAIN, VALIDATION = texts(0, 200), texts(1, 30)


def jsonl(path: Path, rows: list[str]) -> Path:
    path.write_text("\n".join(json.dumps({"text": row}) for row in rows) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text files and a tokenizer."""
    folder = tmp_path_factory.mktemp("text")
    jsonl(folder / "train.jsonl", TRAIN)
    jsonl(folder / "validation.jsonl", VALIDATION)
    save_tokenizer(train_bpe(TRAIN, vocab_size=300), folder / "tokenizer")
    return folder


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the chunks so small that there are many."""
    monkeypatch.setattr(module, "CHUNK_CHARACTERS", 700)
    monkeypatch.setattr(module, "CHUNK_READ_DOCUMENTS", 3)


def config_of(folder: Path, directory: Path, tokenizer: str | None = "tokenizer", **output: Any) -> MakeDataConfig:
    return MakeDataConfig(
        source=LocalFiles(paths=(str(folder / "train.jsonl"),), validation_paths=(str(folder / "validation.jsonl"),)),
        tokenizer=TokenizerConfig(path=str(folder / tokenizer)) if tokenizer else TokenizerConfig(vocab_size=290),
        output=MakeDataOutputConfig(directory=directory, **{"workers": 0, "shard_tokens": 500, **output}),
    )


def ignore(message: str) -> None:
    """A log that drops messages."""


def digest(directory: Path) -> dict[str, str]:
    """Checksum of every file."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def read(directory: Path, split: Split) -> list[list[int]]:
    documents = ShardDocuments.open(Shards(path=directory), split, "data.source")
    return [tokens.tolist() for tokens in documents.documents(np.arange(len(documents)))]


def error_of(config: MakeDataConfig) -> str:
    with pytest.raises(ValueError) as caught:
        make_data(config, ignore)
    return str(caught.value)


@pytest.mark.parametrize("shard_format", FORMATS)
def test_every_document_in_order(folder: Path, tmp_path: Path, shard_format: ShardFormat) -> None:
    directory = tmp_path / "made"
    index = make_data(config_of(folder, directory, format=shard_format), ignore)
    tokenizer = load_tokenizer(directory / "tokenizer")
    assert tokenizer.fingerprint == load_tokenizer(folder / "tokenizer").fingerprint == index.tokenizer_fingerprint
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


def test_a_tokenizer_is_trained_if_no_path_is_set(folder: Path, tmp_path: Path) -> None:
    messages: list[str] = []
    make_data(config_of(folder, tmp_path / "made", tokenizer=None), messages.append)
    expected = train_bpe(TRAIN, vocab_size=290)
    assert load_tokenizer(tmp_path / "made/tokenizer").fingerprint == expected.fingerprint
    assert read(tmp_path / "made", "train") == [expected.encode(text) for text in TRAIN]
    assert "training a byte-level BPE tokenizer of 290 tokens ..." in messages
    # tokenizer.path may also be a directory of shards.
    make_data(config_of(tmp_path, tmp_path / "again", tokenizer="made").model_copy(update=_source_of(folder)), ignore)
    assert read(tmp_path / "again", "train") == read(tmp_path / "made", "train")


def _source_of(folder: Path) -> dict[str, Any]:
    return {"source": config_of(folder, folder).source}


def test_ids_that_need_more_than_16_bits(folder: Path, tmp_path: Path) -> None:
    """The same tokens with ids from 70,000 on."""
    plain = load_tokenizer(folder / "tokenizer")
    moved = Tokenizer(
        {token: number + 70_000 for token, number in plain.vocab.items()},
        plain.merges,
        {text: number for number, text in enumerate(plain.special_tokens)},
        plain.pattern,
        mask_token=plain.mask_token,
        eos_token=plain.eos_token,
    )
    save_tokenizer(moved, tmp_path / "tokenizer")
    for shard_format in FORMATS:
        config = config_of(tmp_path, tmp_path / shard_format, format=shard_format).model_copy(update=_source_of(folder))
        index = make_data(config, ignore)
        assert index.dtype == ("int32" if shard_format == "parquet" else "uint32")
        ids = read(tmp_path / shard_format, "train")
        assert ids == [[number + 70_000 for number in plain.encode(text)] for text in TRAIN]


@pytest.mark.parametrize(("shard_format", "workers"), [("bin", 2), ("parquet", 0), ("dat", 0)])
def test_files_do_not_depend_on_workers_or_chunks(
    folder: Path, tmp_path: Path, shard_format: ShardFormat, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers give the same tokens, whatever the format; so one format with workers is enough."""
    digests: list[Any] = []
    for characters, documents in ((700, 3), (90, 1), (1 << 18, 16)):
        monkeypatch.setattr(module, "CHUNK_CHARACTERS", characters)
        monkeypatch.setattr(module, "CHUNK_READ_DOCUMENTS", documents)
        directory = tmp_path / str(len(digests))
        num_workers = workers if characters == 90 else 0
        make_data(config_of(folder, directory, format=shard_format, workers=num_workers), ignore)
        digests.append(digest(directory))
    assert digests[0] == digests[1] == digests[2]
    assert len(digests[0]) > 6


class Stopped(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("shard_format", FORMATS)
def test_an_interruption_after_any_chunk(
    folder: Path, tmp_path: Path, shard_format: ShardFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = tmp_path / "reference"
    make_data(config_of(folder, reference, format=shard_format), ignore)
    tokenize_chunks = module._tokenize_chunks

    def stop_after(count: int) -> Callable[..., Any]:
        num_left = [count]

        def generate(*arguments: Any) -> Any:
            for item in tokenize_chunks(*arguments):
                if not num_left[0]:
                    raise Stopped
                num_left[0] -= 1
                yield item

        return generate

    directory = tmp_path / "made"
    config = config_of(folder, directory, format=shard_format)
    interruptions = 0
    for count in range(1, 100):
        monkeypatch.setattr(module, "_tokenize_chunks", stop_after(count))
        try:
            make_data(config, ignore)
            break
        except Stopped:
            interruptions += 1
            assert not list(directory.glob("*-*.tmp"))  # an unfinished shard is removed
        if count % 3 == 0:  # one more interruption, so that positions differ
            monkeypatch.setattr(module, "_tokenize_chunks", stop_after(10))
            with pytest.raises(Stopped):
                make_data(config, ignore)
    assert interruptions >= 5
    assert digest(directory) == digest(reference)


KILLED = Path(__file__).with_name("killed_make_data.py")


@pytest.mark.parametrize(
    ("shard_format", "stride"),
    [
        ("bin", 3),
        pytest.param("bin", 1, marks=pytest.mark.slow),
        pytest.param("parquet", 3, marks=pytest.mark.slow),  # it writes in small pieces
        pytest.param("dat", 1, marks=pytest.mark.slow),
    ],
)
def test_sigkill_at_every_step(folder: Path, tmp_path: Path, shard_format: ShardFormat, stride: int) -> None:
    """Kill before each write, fsync, rename and removal (or each third one); kill the continuation as well."""
    texts = tmp_path / "texts"
    texts.mkdir()
    jsonl(texts / "train.jsonl", TRAIN[:15])
    jsonl(texts / "validation.jsonl", VALIDATION[:3])
    tokenizer = None if shard_format == "bin" else "tokenizer"
    if tokenizer is not None:
        save_tokenizer(load_tokenizer(folder / tokenizer), texts / tokenizer)
    config = config_of(texts, tmp_path / "made", tokenizer, format=shard_format, shard_tokens=250)
    values = json.loads(config.model_dump_json(exclude_unset=True))
    values["source"]["kind"] = "files"
    result = subprocess.run(
        [sys.executable, KILLED, json.dumps(values), str(tmp_path / "reference"), str(stride)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[-1]) > 20


def test_skipped_records_are_counted_once_over_interruptions(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.jsonl"
    rows = [json.dumps({"text": text}) for text in TRAIN]
    for index in range(3, 200, 4):
        rows[index] = ["{broken", '{"text": ""}', '{"text": null}'][index // 4 % 3]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    source = LocalFiles(
        paths=(str(path),), validation_paths=(str(folder / "validation.jsonl"),), on_bad_row="skip", max_documents=120
    )
    whole = config_of(folder, tmp_path / "whole").model_copy(update={"source": source})
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


def test_a_complete_directory_is_checked(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, tmp_path / "made")
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
    path = tmp_path / "made/train-00001.bin"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    assert f"{path} is damaged: its checksum is not the one in index.json" in error_of(config)
    path.unlink()
    assert f"{path} is missing" in error_of(config)


@pytest.mark.parametrize("complete", [False, True])
def test_a_directory_from_other_inputs_is_rejected(
    folder: Path, tmp_path: Path, complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for name, rows in (("train", TRAIN), ("validation", VALIDATION)):
        jsonl(text / f"{name}.jsonl", rows)
    save_tokenizer(load_tokenizer(folder / "tokenizer"), text / "tokenizer")
    directory = tmp_path / "made"
    config = config_of(text, directory)
    if complete:
        make_data(config, ignore)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(module, "rename_dat_file", stop)  # before the index is written
            with pytest.raises(Stopped):
                make_data(config, ignore)
    before = digest(directory)

    def assert_difference(config: MakeDataConfig, line: str) -> None:
        message = error_of(config)
        assert message.startswith(f"output.directory = {directory} holds data from other inputs:\n  ")
        assert message.endswith("\nname another directory, or remove this one")
        assert f"\n  {line}" in message
        assert digest(directory) == before

    assert_difference(config_of(text, directory, format="dat"), 'output.format: "bin" -> "dat"\n')
    assert_difference(config_of(text, directory, shard_tokens=501), "output.shard_tokens: 500 -> 501\n")
    assert_difference(
        config_of(text, directory, tokenizer=None), f'tokenizer.path: "{text / "tokenizer"}" -> (not set)\n'
    )
    files = config.model_copy(update={"source": MarkovChain(documents_per_epoch=9, validation_documents=9)})
    assert_difference(files, 'source.kind: "files" -> "markov"\n')
    jsonl(text / "train.jsonl", [*TRAIN[:-1], "something else"])
    assert_difference(config, "the train documents: files/")
    jsonl(text / "train.jsonl", TRAIN)
    save_tokenizer(train_bpe(["other"], vocab_size=260), text / "tokenizer")
    assert_difference(config, f"the tokenizer in {text / 'tokenizer'}: it has another fingerprint now\n")
    save_tokenizer(load_tokenizer(folder / "tokenizer"), text / "tokenizer")
    make_data(config, ignore)
    assert read(directory, "validation")


def stop(*_: object) -> None:
    raise Stopped


def test_foreign_and_damaged_directories(folder: Path, tmp_path: Path) -> None:
    directory = tmp_path / "mine"
    directory.mkdir()
    (directory / "thesis.txt").write_text("my thesis")
    message = error_of(config_of(folder, directory))
    assert "is not empty and has no progress.json (it holds thesis.txt); name another directory" in message
    assert (directory / "thesis.txt").read_text() == "my thesis"
    file = directory / "thesis.txt"
    assert f"output.directory = {file} cannot be written: File exists" in error_of(config_of(folder, file))
    (directory / "thesis.txt").unlink()
    (directory / "progress.json").write_text('{"version": 1, "config"')
    assert "progress.json is damaged" in error_of(config_of(folder, directory))


def test_one_process_at_a_time(folder: Path, tmp_path: Path) -> None:
    from files.lock import lock_directory

    with lock_directory(tmp_path / "made"):
        message = error_of(config_of(folder, tmp_path / "made"))
    assert "is in use by another process; wait for it or stop it" in message
    make_data(config_of(folder, tmp_path / "made"), ignore)


def test_a_missing_shard_and_a_replaced_tokenizer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shard_format, name in (
        ("bin", "train-00000.idx"),
        ("parquet", "train-00000.parquet"),
        ("dat", "train.dat.tmp"),
    ):
        config = config_of(folder, tmp_path / shard_format, format=shard_format)
        with monkeypatch.context() as patch:
            patch.setattr(module, "rename_dat_file", stop)
            with pytest.raises(Stopped):
                make_data(config, ignore)
        (tmp_path / shard_format / name).unlink()
        assert (
            f"{tmp_path / shard_format / name.removesuffix('.tmp')} is missing, though index.json names it"
            in error_of(config)
        )
    with monkeypatch.context() as patch:
        patch.setattr(module, "rename_dat_file", stop)
        with pytest.raises(Stopped):
            make_data(config_of(folder, tmp_path / "made"), ignore)
    save_tokenizer(train_bpe(["other"], vocab_size=260), tmp_path / "made/tokenizer")
    assert "is not the tokenizer that was used so far" in error_of(config_of(folder, tmp_path / "made"))


@pytest.mark.parametrize("shard_format", FORMATS)
@pytest.mark.parametrize("free_bytes", [0, 1_500, 6_000])
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk(
    folder: Path, tmp_path: Path, shard_format: ShardFormat, free_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_data(config_of(folder, tmp_path / "reference", format=shard_format), ignore)
    config = config_of(folder, tmp_path / "made", format=shard_format)
    write, num_left = shard_writers.HashedFile.write, [free_bytes]

    def write_on_small_disk(self: shard_writers.HashedFile, data: Any) -> int:
        num_left[0] -= memoryview(data).nbytes
        if num_left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(shard_writers.HashedFile, "write", write_on_small_disk)
        message = error_of(config)
    assert message.startswith(f"output.directory = {tmp_path / 'made'} could not be written: No space left on device (")
    assert message.endswith("MiB are free there). Finished shards are kept: free some space, and repeat the command")
    progress = json.loads((tmp_path / "made/progress.json").read_text())
    shards = [shard for split in progress["splits"].values() for shard in split["index"]["shards"]]
    assert bool(shards) == (free_bytes > 0)
    assert not list((tmp_path / "made").glob("*-*.tmp"))
    make_data(config, ignore)
    assert digest(tmp_path / "made") == digest(tmp_path / "reference")


def test_a_full_disk_when_the_progress_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_data(config_of(folder, tmp_path / "reference"), ignore)
    config = config_of(folder, tmp_path / "made")
    save, num_left = module.save_progress, [4]

    def save_on_small_disk(progress: Any, directory: Path) -> None:
        num_left[0] -= 1
        if num_left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(progress, directory)

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_progress", save_on_small_disk)
        assert "No space left on device" in error_of(config)
    make_data(config, ignore)
    assert digest(tmp_path / "made") == digest(tmp_path / "reference")


def test_nothing_to_read(folder: Path, tmp_path: Path) -> None:
    nothing = jsonl(tmp_path / "nothing.jsonl", ["", ""])
    for paths, validation, split in (("nothing", "some", "train"), ("some", "nothing", "validation")):
        files = {"some": folder / "train.jsonl", "nothing": nothing}
        source = LocalFiles(paths=(str(files[paths]),), validation_paths=(str(files[validation]),))
        for tokenizer in ("tokenizer", None):
            config = config_of(folder, tmp_path / f"{split}{tokenizer}", tokenizer).model_copy(
                update={"source": source}
            )
            message = error_of(config)
            assert message.startswith(f"[source] has no {split} documents (")
            assert "left out: 2 empty" in message
    missing = config_of(folder, tmp_path / "made").model_copy(
        update={"source": LocalFiles(paths=(str(tmp_path / "*.none"),))}
    )
    assert error_of(missing).startswith("source.paths: ")
    assert not (tmp_path / "made").exists()


def test_errors_name_the_keys_of_this_config(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "one"}\n{broken\n', encoding="utf-8")
    source = LocalFiles(paths=(str(path),), validation_paths=(str(folder / "validation.jsonl"),))
    message = error_of(config_of(folder, tmp_path / "made").model_copy(update={"source": source}))
    assert "train.jsonl" in message
    assert 'set source.on_bad_row = "skip"' in message
    assert "data.source" not in message


def test_invalid_tokenizers(folder: Path, tmp_path: Path) -> None:
    plain = load_tokenizer(folder / "tokenizer")
    save_tokenizer(Tokenizer(plain.vocab, plain.merges, {}, plain.pattern), tmp_path / "tokenizer")
    config = config_of(tmp_path, tmp_path / "made").model_copy(update=_source_of(folder))
    assert "the tokenizer has no end-of-text token, which ends documents" in error_of(config)
    config = config_of(tmp_path, tmp_path / "made", tokenizer="none").model_copy(update=_source_of(folder))
    assert f"{tmp_path / 'none'}: " in error_of(config)


def test_a_killed_tokenizer_process_is_an_error(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusionlm.data.tokenization import TokenizerPool

    submit = TokenizerPool.submit

    def kill_and_submit(self: TokenizerPool, chunk: list[str]) -> Any:
        self._workers[0][0].kill()
        return submit(self, chunk)

    with monkeypatch.context() as patch:
        patch.setattr(TokenizerPool, "submit", kill_and_submit)
        message = error_of(config_of(folder, tmp_path / "made", workers=1))
    assert "a tokenizer process ended (exit code -9); if the system ran out of memory, use fewer workers" in message
    make_data(config_of(folder, tmp_path / "made", workers=1), ignore)
    assert len(read(tmp_path / "made", "train")) == len(TRAIN)
