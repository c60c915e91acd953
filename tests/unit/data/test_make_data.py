"""Making shards: the same files whatever happens on the way, and nothing lost silently."""

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
from config.make_data import MakeDataConfig, MakeDataOutputConfig
from config.tokenizer import TokenizerConfig
from diffusionlm.data import make_data as module
from diffusionlm.data import shard_writers
from diffusionlm.data.make_data import make_data
from diffusionlm.data.reader import Split
from diffusionlm.data.shard_index import ShardFormat
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
    """Text, and a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("text")
    jsonl(folder / "train.jsonl", TRAIN)
    jsonl(folder / "validation.jsonl", VALIDATION)
    save_tokenizer(train_bpe(TRAIN, vocab_size=300), folder / "given")
    return folder


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are many."""
    monkeypatch.setattr(module, "CHUNK_CHARACTERS", 700)
    monkeypatch.setattr(module, "CHUNK_READ_DOCUMENTS", 3)


def config_of(folder: Path, directory: Path, tokenizer: str | None = "given", **output: Any) -> MakeDataConfig:
    return MakeDataConfig(
        source=LocalFiles(paths=(str(folder / "train.jsonl"),), validation_paths=(str(folder / "validation.jsonl"),)),
        tokenizer=TokenizerConfig(path=str(folder / tokenizer)) if tokenizer else TokenizerConfig(vocab_size=290),
        output=MakeDataOutputConfig(directory=directory, **{"workers": 0, "shard_tokens": 500, **output}),
    )


def silent(text: str) -> None:
    """Nobody listens."""


def digest(directory: Path) -> dict[str, str]:
    """Checksum of every file."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def read(directory: Path, split: Split) -> list[list[int]]:
    documents = ShardDocuments.open(Shards(path=directory), split, "data.source")
    return [each.tolist() for each in documents.documents(np.arange(len(documents)))]


def failure(config: MakeDataConfig) -> str:
    with pytest.raises(ValueError) as caught:
        make_data(config, silent)
    return str(caught.value)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_document_in_order(folder: Path, tmp_path: Path, kind: ShardFormat) -> None:
    directory = tmp_path / "made"
    index = make_data(config_of(folder, directory, format=kind), silent)
    tokenizer = load_tokenizer(directory / "tokenizer")
    assert tokenizer.fingerprint == load_tokenizer(folder / "given").fingerprint == index.tokenizer_fingerprint
    splits: tuple[tuple[Split, list[str]], ...] = (("train", TRAIN), ("validation", VALIDATION))
    for split, expected in splits:
        ids = read(directory, split)
        assert ids == [tokenizer.encode(text) for text in expected]
        assert [tokenizer.decode(each) for each in ids] == expected
        held = index.splits[split]
        tokens = sum(map(len, ids))
        assert (held.documents, held.tokens, held.skipped) == (len(expected), tokens, {})
        assert held.text_bytes == sum(len(text.encode()) for text in expected)
        # A shard ends with the document that brings it to 500 tokens.
        for shard, last in zip(held.shards, [*[False] * (len(held.shards) - 1), True], strict=True):
            assert shard.tokens >= 500 or last
            assert shard.tokens < 500 + max(map(len, ids))
        assert len(held.shards) > 1
    everything = {special for split, _ in splits for ids in read(directory, split) for special in ids}
    assert not everything & {tokenizer.mask_token_id, tokenizer.eos_token_id}  # text that spells them is text
    assert not (directory / "progress.json").exists()
    assert not list(directory.rglob("*.tmp"))


def test_a_tokenizer_is_trained_where_none_is_given(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    make_data(config_of(folder, tmp_path / "made", tokenizer=None), said.append)
    expected = train_bpe(TRAIN, vocab_size=290)
    assert load_tokenizer(tmp_path / "made/tokenizer").fingerprint == expected.fingerprint
    assert read(tmp_path / "made", "train") == [expected.encode(text) for text in TRAIN]
    assert "training a byte-level BPE tokenizer of 290 tokens ..." in said
    # What it made serves others: as a directory of shards.
    make_data(config_of(tmp_path, tmp_path / "again", tokenizer="made").model_copy(update=_source_of(folder)), silent)
    assert read(tmp_path / "again", "train") == read(tmp_path / "made", "train")


def _source_of(folder: Path) -> dict[str, Any]:
    return {"source": config_of(folder, folder).source}


def test_ids_that_need_more_than_16_bits(folder: Path, tmp_path: Path) -> None:
    """The same tokens with ids from 70,000 on."""
    plain = load_tokenizer(folder / "given")
    moved = Tokenizer(
        {token: number + 70_000 for token, number in plain.vocab.items()},
        plain.merges,
        {text: number for number, text in enumerate(plain.special_tokens)},
        plain.pattern,
        mask_token=plain.mask_token,
        eos_token=plain.eos_token,
    )
    save_tokenizer(moved, tmp_path / "given")
    for kind in FORMATS:
        config = config_of(tmp_path, tmp_path / kind, format=kind).model_copy(update=_source_of(folder))
        index = make_data(config, silent)
        assert index.dtype == ("int32" if kind == "parquet" else "uint32")
        ids = read(tmp_path / kind, "train")
        assert ids == [[number + 70_000 for number in plain.encode(text)] for text in TRAIN]


@pytest.mark.parametrize("kind", FORMATS)
def test_files_do_not_depend_on_workers_or_chunks(
    folder: Path, tmp_path: Path, kind: ShardFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for workers, characters, documents in ((0, 700, 3), (1, 700, 3), (2, 90, 1), (0, 1 << 18, 16)):
        monkeypatch.setattr(module, "CHUNK_CHARACTERS", characters)
        monkeypatch.setattr(module, "CHUNK_READ_DOCUMENTS", documents)
        directory = tmp_path / str(len(made))
        make_data(config_of(folder, directory, format=kind, workers=workers), silent)
        made.append(digest(directory))
    assert made[0] == made[1] == made[2] == made[3]
    assert len(made[0]) > 6


class Stopped(BaseException):
    """Ends the process of making, as far as it can be within a test."""


@pytest.mark.parametrize("kind", FORMATS)
def test_an_interruption_after_any_chunk(
    folder: Path, tmp_path: Path, kind: ShardFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = tmp_path / "reference"
    make_data(config_of(folder, reference, format=kind), silent)
    in_order = module._tokenize_chunks

    def stopping_after(count: int) -> Callable[..., Any]:
        left = [count]

        def until(*arguments: Any) -> Any:
            for item in in_order(*arguments):
                if not left[0]:
                    raise Stopped
                left[0] -= 1
                yield item

        return until

    directory = tmp_path / "made"
    config = config_of(folder, directory, format=kind)
    interruptions = 0
    for count in range(1, 100):
        monkeypatch.setattr(module, "_tokenize_chunks", stopping_after(count))
        try:
            make_data(config, silent)
            break
        except Stopped:
            interruptions += 1
            assert not list(directory.glob("*-*.tmp"))  # half a shard is removed
        if count % 3 == 0:  # else it goes on where the last one stopped, which with few chunks is at the same place
            monkeypatch.setattr(module, "_tokenize_chunks", stopping_after(10))
            with pytest.raises(Stopped):
                make_data(config, silent)
    assert interruptions >= 5
    assert digest(directory) == digest(reference)


KILLED = Path(__file__).with_name("killed_make_data.py")


@pytest.mark.parametrize("kind", ["bin", "parquet", pytest.param("dat", marks=pytest.mark.slow)])
def test_sigkill_at_every_step(folder: Path, tmp_path: Path, kind: ShardFormat) -> None:
    """Before every write, fsync, rename and removal; what goes on is killed as well. One process, forked for each."""
    few = tmp_path / "few"
    few.mkdir()
    jsonl(few / "train.jsonl", TRAIN[:15])
    jsonl(few / "validation.jsonl", VALIDATION[:3])
    config = config_of(few, tmp_path / "made", tokenizer=None if kind == "bin" else "given", format=kind)
    if kind != "bin":
        save_tokenizer(load_tokenizer(folder / "given"), few / "given")
    config = config.model_copy(update={"output": config.output.model_copy(update={"shard_tokens": 250})})
    stride = "3" if kind == "parquet" else "1"  # which writes in small pieces
    values = json.loads(config.model_dump_json(exclude_unset=True))
    values["source"]["kind"] = "files"
    done = subprocess.run(
        [sys.executable, KILLED, json.dumps(values), str(tmp_path / "reference"), stride],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 20


def test_what_was_left_out_is_counted_once_whatever_happens(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.jsonl"
    rows = [json.dumps({"text": text}) for text in TRAIN]
    for place in range(3, 200, 4):
        rows[place] = ["{broken", '{"text": ""}', '{"text": null}'][place // 4 % 3]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    source = LocalFiles(
        paths=(str(path),), validation_paths=(str(folder / "validation.jsonl"),), on_bad_row="skip", max_documents=120
    )
    whole = config_of(folder, tmp_path / "whole").model_copy(update={"source": source})
    index = make_data(whole, silent)
    skipped = index.splits["train"].skipped
    assert index.splits["train"].documents == 120
    assert skipped["empty"] == 13
    assert sum(skipped.values()) == 39  # of the first 159 rows, one in four
    parts = whole.model_copy(update={"output": whole.output.model_copy(update={"directory": tmp_path / "parts"})})
    save = module.save_progress

    def save_once(progress: Any, directory: Path) -> None:
        save(progress, directory)
        raise Stopped

    monkeypatch.setattr(module, "save_progress", save_once)
    for _ in range(100):
        try:
            make_data(parts, silent)
            break
        except Stopped:
            continue
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")


def test_a_complete_directory_is_checked(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, tmp_path / "made")
    first = make_data(config, silent)
    before = digest(tmp_path / "made")
    said: list[str] = []
    other_workers = config.model_copy(update={"output": config.output.model_copy(update={"workers": 1})})
    assert make_data(other_workers, said.append) == first
    assert said == [f"{tmp_path / 'made'} is complete; comparing its files with their checksums ..."]
    assert digest(tmp_path / "made") == before
    # Killed between the index and the removal of the progress.
    (tmp_path / "made/progress.json").write_text("{}")
    make_data(config, silent)
    assert digest(tmp_path / "made") == before
    path = tmp_path / "made/train-00001.bin"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    assert f"{path} is damaged: its checksum is not the one in index.json" in failure(config)
    path.unlink()
    assert f"{path} is missing" in failure(config)


@pytest.mark.parametrize("complete", [False, True])
def test_what_was_made_otherwise_is_refused(
    folder: Path, tmp_path: Path, complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for name, rows in (("train", TRAIN), ("validation", VALIDATION)):
        jsonl(text / f"{name}.jsonl", rows)
    save_tokenizer(load_tokenizer(folder / "given"), text / "given")
    directory = tmp_path / "made"
    config = config_of(text, directory)
    if complete:
        make_data(config, silent)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(module, "rename_dat_file", stopping)  # before the index is written
            with pytest.raises(Stopped):
                make_data(config, silent)
    before = digest(directory)

    def differs(other: MakeDataConfig, line: str) -> None:
        message = failure(other)
        assert message.startswith(f"output.directory = {directory} holds data from other inputs:\n  ")
        assert message.endswith("\nname another directory, or remove this one")
        assert f"\n  {line}" in message
        assert digest(directory) == before

    differs(config_of(text, directory, format="dat"), 'output.format: "bin" -> "dat"\n')
    differs(config_of(text, directory, shard_tokens=501), "output.shard_tokens: 500 -> 501\n")
    differs(config_of(text, directory, tokenizer=None), f'tokenizer.path: "{text / "given"}" -> (not set)\n')
    files = config.model_copy(update={"source": MarkovChain(documents_per_epoch=9, validation_documents=9)})
    differs(files, 'source.kind: "files" -> "markov"\n')
    jsonl(text / "train.jsonl", [*TRAIN[:-1], "something else"])
    differs(config, "the train documents: files/")
    jsonl(text / "train.jsonl", TRAIN)
    save_tokenizer(train_bpe(["other"], vocab_size=260), text / "given")
    differs(config, f"the tokenizer in {text / 'given'}: it has another fingerprint now\n")
    save_tokenizer(load_tokenizer(folder / "given"), text / "given")
    make_data(config, silent)
    assert read(directory, "validation")


def stopping(*_: object) -> None:
    raise Stopped


def test_directories_that_are_not_ours(folder: Path, tmp_path: Path) -> None:
    directory = tmp_path / "mine"
    directory.mkdir()
    (directory / "thesis.txt").write_text("four years")
    message = failure(config_of(folder, directory))
    assert "is not empty and has no progress.json (it holds thesis.txt); name another directory" in message
    assert (directory / "thesis.txt").read_text() == "four years"
    file = directory / "thesis.txt"
    assert f"output.directory = {file} cannot be written: File exists" in failure(config_of(folder, file))
    (directory / "thesis.txt").unlink()
    (directory / "progress.json").write_text('{"version": 1, "config"')
    assert "progress.json is damaged" in failure(config_of(folder, directory))


def test_one_process_at_a_time(folder: Path, tmp_path: Path) -> None:
    from files.lock import lock_directory

    with lock_directory(tmp_path / "made"):
        message = failure(config_of(folder, tmp_path / "made"))
    assert "is in use by another process; wait for it or stop it" in message
    make_data(config_of(folder, tmp_path / "made"), silent)


def test_a_shard_or_tokenizer_that_went_missing_meanwhile(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, name in (("bin", "train-00000.idx"), ("parquet", "train-00000.parquet"), ("dat", "train.dat.tmp")):
        config = config_of(folder, tmp_path / kind, format=kind)
        with monkeypatch.context() as patch:
            patch.setattr(module, "rename_dat_file", stopping)
            with pytest.raises(Stopped):
                make_data(config, silent)
        (tmp_path / kind / name).unlink()
        assert f"{tmp_path / kind / name.removesuffix('.tmp')} is missing, though index.json names it" in failure(
            config
        )
    with monkeypatch.context() as patch:
        patch.setattr(module, "rename_dat_file", stopping)
        with pytest.raises(Stopped):
            make_data(config_of(folder, tmp_path / "made"), silent)
    save_tokenizer(train_bpe(["other"], vocab_size=260), tmp_path / "made/tokenizer")
    assert "is not the tokenizer that was used so far" in failure(config_of(folder, tmp_path / "made"))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("room", [0, 1_500, 3_000, 6_000])
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk(
    folder: Path, tmp_path: Path, kind: ShardFormat, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_data(config_of(folder, tmp_path / "reference", format=kind), silent)
    config = config_of(folder, tmp_path / "made", format=kind)
    write, left = shard_writers.HashedFile.write, [room]

    def limited(self: shard_writers.HashedFile, data: Any) -> int:
        left[0] -= memoryview(data).nbytes
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(shard_writers.HashedFile, "write", limited)
        message = failure(config)
    assert message.startswith(f"output.directory = {tmp_path / 'made'} could not be written: No space left on device (")
    assert message.endswith("MiB are free there). Finished shards are kept: free some space, and repeat the command")
    progress = json.loads((tmp_path / "made/progress.json").read_text())
    done = [shard for split in progress["splits"].values() for shard in split["index"]["shards"]]
    assert bool(done) == (room > 0)
    assert not list((tmp_path / "made").glob("*-*.tmp"))
    make_data(config, silent)
    assert digest(tmp_path / "made") == digest(tmp_path / "reference")


def test_a_full_disk_when_the_progress_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_data(config_of(folder, tmp_path / "reference"), silent)
    config = config_of(folder, tmp_path / "made")
    save, num_left = module.save_progress, [4]

    def save_on_small_disk(progress: Any, directory: Path) -> None:
        num_left[0] -= 1
        if num_left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(progress, directory)

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_progress", save_on_small_disk)
        assert "No space left on device" in failure(config)
    make_data(config, silent)
    assert digest(tmp_path / "made") == digest(tmp_path / "reference")


def test_nothing_to_read(folder: Path, tmp_path: Path) -> None:
    nothing = jsonl(tmp_path / "nothing.jsonl", ["", ""])
    for paths, validation, split in (("nothing", "some", "train"), ("some", "nothing", "validation")):
        files = {"some": folder / "train.jsonl", "nothing": nothing}
        source = LocalFiles(paths=(str(files[paths]),), validation_paths=(str(files[validation]),))
        for tokenizer in ("given", None):
            config = config_of(folder, tmp_path / f"{split}{tokenizer}", tokenizer).model_copy(
                update={"source": source}
            )
            message = failure(config)
            assert message.startswith(f"[source] has no {split} documents (")
            assert "left out: 2 empty" in message
    missing = config_of(folder, tmp_path / "made").model_copy(
        update={"source": LocalFiles(paths=(str(tmp_path / "*.none"),))}
    )
    assert failure(missing).startswith("source.paths: ")
    assert not (tmp_path / "made").exists()


def test_bad_rows_are_named_by_the_keys_of_this_config(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "one"}\n{broken\n', encoding="utf-8")
    source = LocalFiles(paths=(str(path),), validation_paths=(str(folder / "validation.jsonl"),))
    message = failure(config_of(folder, tmp_path / "made").model_copy(update={"source": source}))
    assert "train.jsonl" in message
    assert 'set source.on_bad_row = "skip"' in message
    assert "data.source" not in message


def test_tokenizers_that_do_not_do(folder: Path, tmp_path: Path) -> None:
    plain = load_tokenizer(folder / "given")
    save_tokenizer(Tokenizer(plain.vocab, plain.merges, {}, plain.pattern), tmp_path / "given")
    config = config_of(tmp_path, tmp_path / "made").model_copy(update=_source_of(folder))
    assert "the tokenizer has no end-of-text token, which ends documents" in failure(config)
    config = config_of(tmp_path, tmp_path / "made", tokenizer="none").model_copy(update=_source_of(folder))
    assert f"{tmp_path / 'none'}: holds no tokenizer" in failure(config)


def test_a_process_that_is_killed_is_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusionlm.data.tokenization import TokenizerPool

    submit = TokenizerPool.submit

    def killing(self: TokenizerPool, chunk: list[str]) -> Any:
        self._workers[0][0].kill()
        return submit(self, chunk)

    with monkeypatch.context() as patch:
        patch.setattr(TokenizerPool, "submit", killing)
        message = failure(config_of(folder, tmp_path / "made", workers=1))
    assert "a tokenizer process ended (exit code -9); if the system ran out of memory, use fewer workers" in message
    make_data(config_of(folder, tmp_path / "made", workers=1), silent)
    assert len(read(tmp_path / "made", "train")) == len(TRAIN)
