"""Make a directory of tokens from the documents of a source: the work of ``diffusionlm-make-data``.

After each shard ``progress.json`` is replaced, so that a process that is killed loses at most one shard's work. The
files depend on the source, the tokenizer and ``[output]`` only: not on interruptions or the number of processes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from config.dump import list_differences, to_toml_values
from config.make_data import MakeDataConfig
from diffusionlm.data.reader import (
    DocumentSource,
    ItemsFuture,
    ReaderPosition,
    Split,
    Tokens,
    WindowedReader,
    read_first_documents,
)
from diffusionlm.data.shard_files import (
    INDEX_FILE,
    PROGRESS_FILE,
    TOKENIZER_DIRECTORY,
    ShardDtype,
    ShardIndex,
    ShardWriter,
    SplitIndex,
    StrictModel,
    check_files,
    partial_path,
    read_index,
    read_json_model,
    select_dtype,
)
from diffusionlm.data.sources import open_source
from diffusionlm.data.tokenization import TextEncoder, open_text_encoder, train_tokenizer
from files.atomic import remove_temporary_paths, sync_to_disk, write_text_atomic
from files.lock import LOCK_FILE, lock_directory
from profiling.cores import usable_cores
from tokenizer import Tokenizer, load_tokenizer, save_tokenizer

SPLITS: tuple[Split, ...] = ("validation", "train")
"""The small split first: its problems show at once."""

CHUNK_DOCUMENTS = 16
"""Documents that a process tokenizes at once."""

Log = Callable[[str], None]

OnProgress = Callable[[Split, int, int, int], None]
"""(split, documents, tokens, bytes of text): what this call has tokenized of a split so far."""


class SplitProgress(StrictModel):
    """The finished part of a split."""

    index: SplitIndex
    """The finished shards, and the records skipped so far."""
    position: ReaderPosition = None
    """Position in the tokenized documents after the finished shards."""
    skip_log: dict[str, Any] | None = None
    """The log of the source's skipped records, some of which may be after ``position``. None: nothing was written."""

    @property
    def is_done(self) -> bool:
        return self.position is None and bool(self.index.shards)

    @property
    def identity(self) -> str:
        return self.index.identity


class MakeDataProgress(StrictModel):
    """``progress.json``, replaced after each shard."""

    version: Literal[2] = 2
    config: dict[str, Any]
    tokenizer_fingerprint: str | None = None
    """None: there is no tokenizer yet."""
    splits: dict[Split, SplitProgress]


def make_data(config: MakeDataConfig, log: Log, on_progress: OnProgress | None = None) -> ShardIndex:
    """Make the directory, or continue it; check it if it is complete.

    Raises:
        ValueError: the source has no documents, the tokenizer has no end-of-text token, the directory holds something
            else or cannot be written, or a file is damaged.
    """
    directory = config.output.directory
    sources = {split: open_source(config.source, split, "source") for split in SPLITS}
    provided_tokenizer = None if config.tokenizer.path is None else _load_tokenizer(config.tokenizer.path)
    job = _MakeDataJob(config, sources, provided_tokenizer, log, on_progress or (lambda *_: None))
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock_directory(directory))
        except OSError as error:
            raise ValueError(f"output.directory = {directory} cannot be written: {error.strerror}") from error
        if (directory / INDEX_FILE).is_file():
            return job.check_complete()
        stack.enter_context(_explain_write_errors(directory))
        job.load_or_create_progress()
        try:
            return job.run()
        except KeyboardInterrupt:
            log(f"stopped; {job.num_shards} shards are complete. Repeat the command to continue")
            raise


@contextlib.contextmanager
def _explain_write_errors(directory: Path) -> Iterator[None]:
    """Name the directory and the free space in the errors of a disk; those of a network stay."""
    try:
        yield
    except ConnectionError:
        raise
    except OSError as error:
        folders = (directory, Path(tempfile.gettempdir()))  # results of processes pass through temporary files
        free = ", ".join(f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB in {folder}" for folder in folders)
        raise ValueError(
            f"output.directory = {directory} could not be written: {error} (free: {free}). Finished shards are "
            "kept: free some space, and repeat the command"
        ) from error


def save_progress(progress: MakeDataProgress, directory: Path) -> None:
    write_text_atomic(directory / PROGRESS_FILE, progress.model_dump_json(indent=1) + "\n")


def _content_config(config: MakeDataConfig) -> dict[str, Any]:
    """Return the config values that decide the contents: all but the directory and the number of workers."""
    values: dict[str, Any] = to_toml_values(config)
    output = {key: value for key, value in values["output"].items() if key not in ("directory", "workers")}
    return {**values, "output": output}


def _read_sized_tokens(source: DocumentSource, encoder: TextEncoder) -> WindowedReader[str, tuple[Tokens, int]]:

    def tokenize(_epoch: int, _index: int, texts: list[str]) -> ItemsFuture[tuple[Tokens, int]]:
        future = encoder.submit(texts)
        sizes = [len(text.encode("utf-8", "surrogatepass")) for text in texts]
        return lambda: list(zip(future(), sizes, strict=True))

    return WindowedReader(source, CHUNK_DOCUMENTS, tokenize, encoder.prefetch_depth)


@dataclass
class _MakeDataJob:
    """Tokenizes the documents of all splits into the shards of one directory."""

    config: MakeDataConfig
    sources: Mapping[Split, DocumentSource]
    provided_tokenizer: Tokenizer | None
    """None: the job trains one."""
    log: Log
    on_progress: OnProgress

    def __post_init__(self) -> None:
        self._directory = self.config.output.directory
        splits = {
            split: SplitProgress(index=SplitIndex(identity=source.identity, provenance=source.provenance))
            for split, source in self.sources.items()
        }
        self._progress = MakeDataProgress(config=_content_config(self.config), splits=splits)

    @property
    def num_shards(self) -> int:
        return sum(len(state.index.shards) for state in self._progress.splits.values())

    def check_complete(self) -> ShardIndex:
        """Check the inputs and the checksums of a complete directory, and return its index."""
        index = read_index(self._directory, "output.directory")
        self._check_same_inputs(index)
        self.log(f"{self._directory} is complete; comparing its files with their checksums ...")
        for split_index in index.splits.values():
            check_files(self._directory, split_index, reads_contents=True)
        (self._directory / PROGRESS_FILE).unlink(missing_ok=True)
        return index

    def load_or_create_progress(self) -> None:
        """Load the progress, and remove the partial files of a killed process.

        Raises:
            ValueError: the directory holds something else, data from other inputs, or damaged files.
        """
        path = self._directory / PROGRESS_FILE
        if not path.is_file():
            names = [entry.name for entry in self._directory.iterdir() if entry.name != LOCK_FILE]
            foreign = sorted(name for name in names if not name.startswith(f"{PROGRESS_FILE}.tmp-"))
            if foreign:
                raise ValueError(
                    f"output.directory = {self._directory} is not empty and has no {PROGRESS_FILE} (it holds "
                    f"{', '.join(foreign[:5])}); name another directory"
                )
            remove_temporary_paths(self._directory)
            self._save(self._progress)
            return
        remove_temporary_paths(self._directory)
        self._progress = read_json_model(
            MakeDataProgress, path, "if an older version began it, finish it with that one; or remove the directory"
        )
        self._check_same_inputs(self._progress)
        for state in self._progress.splits.values():
            check_files(self._directory, state.index)
        if self._progress.tokenizer_fingerprint is None:
            shutil.rmtree(self._directory / TOKENIZER_DIRECTORY, ignore_errors=True)

    def _check_same_inputs(self, saved: ShardIndex | MakeDataProgress) -> None:
        """Check that the directory was made from the same config, documents and tokenizer."""
        values = _content_config(self.config)
        saved_output = saved.config.get("output")
        if isinstance(saved_output, dict) and saved_output.get("format") == "bin":  # the key of older versions
            values["output"]["format"] = "bin"
        differences = list_differences(saved.config, values)
        for split, source in self.sources.items():
            identity = getattr(saved.splits.get(split), "identity", None)
            if identity != source.identity:
                differences.append(f"the {split} documents: {identity} -> {source.identity}")
        tokenizer, fingerprint = self.provided_tokenizer, saved.tokenizer_fingerprint
        if tokenizer is not None and fingerprint not in (None, tokenizer.fingerprint):
            differences.append(f"the tokenizer in {self.config.tokenizer.path}: it has another fingerprint now")
        if differences:
            lines = "\n  ".join(differences)
            raise ValueError(
                f"output.directory = {self._directory} holds data from other inputs:\n  {lines}\n"
                "name another directory, or remove this one"
            )

    def run(self) -> ShardIndex:
        """Make the shards that are left, and the index."""
        tokenizer = self._prepare_tokenizer()
        assert tokenizer.eos_token_id is not None, "_prepare_tokenizer rejects tokenizers without it"
        dtype = select_dtype(tokenizer.vocab_size)
        if self.num_shards:
            self.log(f"{self._directory}: continuing after {self.num_shards} complete shards")
        open_splits = [split for split in SPLITS if not self._progress.splits[split].is_done]
        num_processes = self.config.output.workers
        if num_processes is None:  # with one core, another process only adds overhead
            num_processes = usable_cores() if usable_cores() > 1 else 0
        with open_text_encoder(tokenizer, num_processes if open_splits else 0) as encoder:
            for split in open_splits:
                self._make_split(split, encoder, dtype)
        index = ShardIndex(
            dtype=dtype,
            vocab_size=tokenizer.vocab_size,
            eos_token_id=tokenizer.eos_token_id,
            tokenizer_fingerprint=tokenizer.fingerprint,
            config=self._progress.config,
            splits={split: state.index for split, state in self._progress.splits.items()},
        )
        for split_index in index.splits.values():
            check_files(self._directory, split_index)
        write_text_atomic(self._directory / INDEX_FILE, index.model_dump_json(indent=1) + "\n")
        (self._directory / PROGRESS_FILE).unlink()
        return index

    def _prepare_tokenizer(self) -> Tokenizer:
        """Return the directory's tokenizer; if there is none yet, save the provided or a trained one there."""
        folder, fingerprint = self._directory / TOKENIZER_DIRECTORY, self._progress.tokenizer_fingerprint
        if fingerprint is not None:
            tokenizer = load_tokenizer(folder)
            if tokenizer.fingerprint != fingerprint:
                raise ValueError(
                    f"{folder} is not the tokenizer that was used so far; remove the directory and start again"
                )
            return tokenizer
        tokenizer = self.provided_tokenizer or _train_tokenizer(self.config, self.log)
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"tokenizer.path = {self.config.tokenizer.path}: the tokenizer has no end-of-text token, which "
                "ends documents; name one in its tokenizer_config.json"
            )
        shutil.rmtree(partial_path(folder), ignore_errors=True)
        save_tokenizer(tokenizer, partial_path(folder))
        sync_to_disk(partial_path(folder))
        os.rename(partial_path(folder), folder)
        sync_to_disk(self._directory)
        self._save(self._progress.model_copy(update={"tokenizer_fingerprint": tokenizer.fingerprint}))
        return tokenizer

    def _make_split(self, split: Split, encoder: TextEncoder, dtype: ShardDtype) -> None:
        source, position = self.sources[split], self._progress.splits[split].position
        if saved := self._progress.splits[split].skip_log:
            vars(source.skip_log).update(saved)
        documents = _read_sized_tokens(source, encoder)
        shard: ShardWriter | None = None
        totals, is_done = (0, 0, 0), False
        self.on_progress(split, *totals)
        try:
            while not is_done:
                start = position
                chunk, position = documents.read(0, start, CHUNK_DOCUMENTS)
                if chunk:
                    index, size = len(self._progress.splits[split].index.shards), self.config.output.shard_tokens
                    shard = shard or ShardWriter(self._directory, split, index, dtype, size)
                    count = shard.add_documents([tokens for tokens, _ in chunk], [size for _, size in chunk])
                    if count < len(chunk):  # the others are for the next shard
                        chunk, position = documents.read(0, start, count)
                is_done = position is None
                if is_done or (shard is not None and shard.is_full):
                    self._commit_shard(split, shard, position)
                    shard = None
                num_tokens, num_bytes = sum(len(tokens) for tokens, _ in chunk), sum(size for _, size in chunk)
                totals = (totals[0] + len(chunk), totals[1] + num_tokens, totals[2] + num_bytes)
                self.on_progress(split, *totals)
        except BaseException:
            if shard is not None:
                shard.discard()
            raise

    def _commit_shard(self, split: Split, shard: ShardWriter | None, position: ReaderPosition) -> None:
        """Finish a shard (None: the last one was full) and record it and the new progress of its split."""
        source, state = self.sources[split], self._progress.splits[split]
        shards = (*state.index.shards, *([shard.finish()] if shard is not None else []))
        if not shards:
            raise _no_documents_error(split, source.provenance, source.skip_log.counts)
        index = state.index.model_copy(update={"shards": shards, "skipped": source.skip_log.counts})
        state = SplitProgress(index=index, position=position, skip_log=asdict(source.skip_log))
        splits = {**self._progress.splits, split: state}
        self._save(self._progress.model_copy(update={"splits": splits}))

    def _save(self, progress: MakeDataProgress) -> None:
        save_progress(progress, self._directory)
        self._progress = progress


def _train_tokenizer(config: MakeDataConfig, log: Log) -> Tokenizer:
    source = open_source(config.source, "train", "source")  # a second one, so that no skipped record is counted twice
    texts = read_first_documents(source, config.tokenizer.max_training_bytes)
    first = next(texts, None)
    if first is None:
        raise _no_documents_error("train", source.provenance, source.skip_log.counts)
    return train_tokenizer(chain([first], texts), config.tokenizer, log)


def _load_tokenizer(path: str) -> Tokenizer:
    """Load the tokenizer in a directory, or in the one of a run or of other shards."""
    inside = Path(path) / TOKENIZER_DIRECTORY
    return load_tokenizer(inside if inside.is_dir() else path)


def _no_documents_error(split: Split, provenance: str, skipped: dict[str, int]) -> ValueError:
    return ValueError(
        f"[source] has no {split} documents ({provenance}; left out: {format_skip_counts(skipped)}); add text for this "
        "split"
    )


def format_skip_counts(skipped: Mapping[str, int]) -> str:
    """Format the counts of a `SkipLog`, such as ``3 empty, 1 not UTF-8``."""
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items())) or "nothing"
