"""Make a directory of tokens from the documents of a source: what ``diffusionlm-make-data`` does.

After each shard ``progress.json`` is replaced, so that a process that is killed loses at most a shard's work. The files
depend on the source, the tokenizer and ``[output]`` alone: not on interruptions or the number of processes.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from config.dump import format_value, to_toml_values
from config.make_data import MakeDataConfig
from diffusionlm.data.reader import DocumentSource, ItemsFuture, ReaderPosition, Split, Tokens, first_documents
from diffusionlm.data.shard_index import (
    INDEX_FILE,
    PROGRESS_FILE,
    TOKENIZER_DIRECTORY,
    ShardDtype,
    ShardEntry,
    ShardIndex,
    SplitIndex,
    check_checksums,
    check_sizes,
    read_index,
    read_json_model,
)
from diffusionlm.data.shard_writers import (
    SHARD_FILE_PATTERN,
    MakeDataProgress,
    ShardWriter,
    SplitProgress,
    lock_output_directory,
    open_writer,
    partial_path,
    protect_write,
    rename_dat_file,
)
from diffusionlm.data.sources import open_source
from diffusionlm.data.tokenization import TokenizerPool
from files.atomic import remove_temporary_paths, sync_to_disk, write_text_atomic
from files.lock import LOCK_FILE
from logger.progress import ProgressMeter
from profiling.cores import usable_cores
from tokenizer import Tokenizer, load_tokenizer, save_tokenizer, train_bpe


def content_config(config: MakeDataConfig) -> dict[str, Any]:
    """What of a config decides the contents: all but the directory and the number of workers."""
    values: dict[str, Any] = to_toml_values(config, "config")
    output = {key: value for key, value in values["output"].items() if key not in ("directory", "workers")}
    return {**values, "output": output}


def load_or_create_progress(
    config: MakeDataConfig, sources: Mapping[Split, DocumentSource], provided_tokenizer: Tokenizer | None
) -> MakeDataProgress:
    """What is done so far; what a killed process left half done is removed.

    Raises:
        ValueError: the directory holds something else, data that is made otherwise, or not what it should.
    """
    directory = config.output.directory
    path = directory / PROGRESS_FILE
    if not path.is_file():
        names = (entry.name for entry in directory.iterdir())
        foreign = sorted(name for name in names if name != LOCK_FILE and not name.startswith(f"{PROGRESS_FILE}.tmp-"))
        if foreign:
            raise ValueError(
                f"output.directory = {directory} is not empty and has no {PROGRESS_FILE} (it holds "
                f"{', '.join(foreign[:5])}); name another directory"
            )
        remove_temporary_paths(directory)
        splits = {
            split: SplitProgress(index=SplitIndex(identity=source.identity, provenance=source.provenance))
            for split, source in sources.items()
        }
        progress = MakeDataProgress(config=content_config(config), splits=splits)
        progress.save(directory)
        return progress
    remove_temporary_paths(directory)
    progress = read_json_model(MakeDataProgress, path, "remove the directory and begin again")
    identities = {split: state.index.identity for split, state in progress.splits.items()}
    check_same_inputs(config, sources, provided_tokenizer, progress.config, identities, progress.tokenizer_fingerprint)
    listed = {name for state in progress.splits.values() for name in state.index.sizes}
    for each in directory.iterdir():
        if SHARD_FILE_PATTERN.fullmatch(each.name) and not {each.name, each.name.removesuffix(".tmp")} & listed:
            each.unlink()
    if config.output.format != "dat":  # whose file is checked when it is written on
        for state in progress.splits.values():
            check_sizes(directory, state.index)
    if progress.tokenizer_fingerprint is None:
        shutil.rmtree(directory / TOKENIZER_DIRECTORY, ignore_errors=True)
    return progress


def check_same_inputs(
    config: MakeDataConfig,
    sources: Mapping[Split, DocumentSource],
    provided_tokenizer: Tokenizer | None,
    saved_config: dict[str, Any],
    saved_identities: Mapping[Split, str],
    saved_fingerprint: str | None,
) -> None:
    """See that what a directory holds was made from the same.

    Raises:
        ValueError: it was not; lists what differs.
    """
    before, now = _flatten_config(saved_config), _flatten_config(content_config(config))
    changes = [
        f"{key}: {_format_value(before, key)} -> {_format_value(now, key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    for split, source in sources.items():
        if saved_identities.get(split) != source.identity:
            changes.append(f"the {split} documents: {saved_identities.get(split)} -> {source.identity}")
    if provided_tokenizer is not None and saved_fingerprint not in (None, provided_tokenizer.fingerprint):
        changes.append(f"the tokenizer in {config.tokenizer.path}: its fingerprint is another one now")
    if changes:
        listed = "\n  ".join(changes)
        raise ValueError(
            f"output.directory = {config.output.directory} holds data that was made otherwise:\n  {listed}\n"
            "name another directory, or remove this one"
        )


def _flatten_config(value: Any, path: str = "") -> dict[str, Any]:
    """Every value that is no table, by its dotted path."""
    if not isinstance(value, dict):
        return {path: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= _flatten_config(item, f"{path}.{key}" if path else key)
    return found


def _format_value(leaves: dict[str, Any], key: str) -> str:
    return format_value(leaves[key], limit=200) if key in leaves else "(not set)"


SPLITS: tuple[Split, ...] = ("validation", "train")
"""The small one first: what is wrong with it shows at once."""


CHUNK_CHARACTERS = 1 << 18
"""Text that is handed to a process at once: a tenth of a second's work."""

DOCUMENTS_AT_ONCE = 16
"""Are read before their length is looked at."""


def make_data(config: MakeDataConfig, log: Callable[[str], None], terminal: TextIO | None = None) -> ShardIndex:
    """Make the directory, or the rest of it; check it if it is complete already.

    ``log`` gets messages and, unless ``terminal`` is a terminal and shows a bar, progress.

    Raises:
        ValueError: nothing to read, a tokenizer that does not do, a directory that holds something else or cannot be
            written, or a damaged file.
    """
    directory, meter = config.output.directory, ProgressMeter(terminal, log)
    with _keys_of_this_config():
        sources = {split: open_source(config.source, split) for split in SPLITS}
    provided_tokenizer = None if config.tokenizer.path is None else _load_tokenizer(config.tokenizer.path)
    with lock_output_directory(directory):
        if (directory / INDEX_FILE).is_file():
            return _check_complete(config, sources, provided_tokenizer, meter)
        with protect_write(directory):
            progress = load_or_create_progress(config, sources, provided_tokenizer)
        job = _MakeDataJob(config, sources, meter, progress)
        try:
            return job.run(provided_tokenizer)
        except KeyboardInterrupt:
            meter.log(f"stopped; {job.num_shards_done} shards are complete. The same command goes on from there")
            raise
        finally:
            meter.close()


def report(index: ShardIndex, directory: Path) -> str:
    """A table of what there is, and the command that trains on it."""
    rows = [["", "documents", "tokens", "bytes of text", "bytes/token", "files", "MiB"]]
    skipped = []
    for split, held in sorted(index.splits.items()):
        ratio = f"{held.text_bytes / held.tokens:.2f}" if held.tokens else "-"
        counts = (f"{count:,}" for count in (held.documents, held.tokens, held.text_bytes))
        rows.append([split, *counts, ratio, str(len(held.sizes)), f"{held.bytes_on_disk / 2**20:,.1f}"])
        skipped.append(f"left out or mended, {split}: {_format_counts(held.skipped)}")
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    return "\n".join(
        [
            *table,
            *skipped,
            f"written to {directory}: {index.format}, {index.dtype}, {index.vocab_size:,} ids; {INDEX_FILE} lists the files",
            "next: uv run diffusionlm-train --config config/resources/train.toml --set data.source.kind=shards \\",
            f"    --set {shlex.quote(f'data.source.path={directory}')} "
            f"--set {shlex.quote(f'run.directory=runs/{directory.name}')}",
        ]
    )


@dataclass(frozen=True)
class _DocumentChunk:
    """Documents that are tokenised together."""

    texts: list[str]
    position: ReaderPosition
    """Where they were read."""
    past: int
    """Documents from there on that are not among them, as they are done."""
    skipped: dict[str, int]
    """What the source had left out before them."""


class _ShardBuilder:
    """A shard that is being written."""

    def __init__(self, writer: ShardWriter, target_tokens: int) -> None:
        self.writer = writer
        self._target_tokens = target_tokens
        self.documents = self.tokens = self.text_bytes = 0

    @property
    def is_full(self) -> bool:
        return self.tokens >= self._target_tokens

    def add_documents(self, documents: list[Tokens], text_bytes: list[int]) -> int:
        """Write the first documents, up to the one that fills the shard; how many these were."""
        count = 0
        for document in documents:
            count += 1
            self.tokens += len(document)
            if self.is_full:
                break
        self.documents += count
        self.text_bytes += sum(text_bytes[:count])
        self.writer.add(documents[:count])
        return count

    def finish(self) -> ShardEntry:
        parts = self.writer.finish()
        return ShardEntry(documents=self.documents, tokens=self.tokens, text_bytes=self.text_bytes, parts=parts)


class _MakeDataJob:
    """The making of one directory."""

    def __init__(
        self,
        config: MakeDataConfig,
        sources: Mapping[Split, DocumentSource],
        meter: ProgressMeter,
        progress: MakeDataProgress,
    ) -> None:
        self._config, self._sources, self._meter, self._progress = config, sources, meter, progress
        self._directory = config.output.directory

    @property
    def num_shards_done(self) -> int:
        return sum(len(state.index.shards) for state in self._progress.splits.values())

    def run(self, provided_tokenizer: Tokenizer | None) -> ShardIndex:
        tokenizer = self._prepare_tokenizer(provided_tokenizer)
        eos_token_id = tokenizer.eos_token_id
        assert eos_token_id is not None, "a tokenizer without it was refused"
        dtype: ShardDtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        if self._config.output.format == "parquet":
            dtype = "int32"
        if self.num_shards_done:
            self._meter.log(f"{self._directory}: going on behind {self.num_shards_done} complete shards")
        left = [split for split in SPLITS if not self._progress.splits[split].done]
        processes = _choose_num_processes(self._config.output.workers) if left else 0
        with TokenizerPool(tokenizer, processes) as tokenizer_pool, _keys_of_this_config():
            for split in left:
                self._make_split(split, tokenizer_pool, dtype, eos_token_id)
        index = ShardIndex(
            format=self._config.output.format,
            dtype=dtype,
            vocab_size=tokenizer.vocab_size,
            eos_token_id=eos_token_id,
            tokenizer_fingerprint=tokenizer.fingerprint,
            config=self._progress.config,
            splits={split: state.index for split, state in self._progress.splits.items()},
        )
        with protect_write(self._directory):
            for split, split_index in index.splits.items():
                rename_dat_file(self._directory, split, index.format)
                check_sizes(self._directory, split_index)
            write_text_atomic(self._directory / INDEX_FILE, index.model_dump_json(indent=1) + "\n")
            (self._directory / PROGRESS_FILE).unlink()
        return index

    def _prepare_tokenizer(self, provided_tokenizer: Tokenizer | None) -> Tokenizer:
        """The tokenizer of the directory; put there if there is none yet."""
        folder, fingerprint = self._directory / TOKENIZER_DIRECTORY, self._progress.tokenizer_fingerprint
        if fingerprint is not None:
            tokenizer = load_tokenizer(folder)
            if tokenizer.fingerprint != fingerprint:
                raise ValueError(
                    f"{folder} is not the tokenizer that was used so far: remove the directory, begin again"
                )
            return tokenizer
        tokenizer = provided_tokenizer or _train_tokenizer(self._config, self._meter)
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"tokenizer.path = {self._config.tokenizer.path}: the tokenizer has no end-of-text token, which "
                "documents end in; name one in its special_tokens.json or tokenizer_config.json"
            )
        with protect_write(self._directory):
            shutil.rmtree(partial_path(folder), ignore_errors=True)
            save_tokenizer(tokenizer, partial_path(folder))
            sync_to_disk(partial_path(folder))
            os.rename(partial_path(folder), folder)
            sync_to_disk(self._directory)
            self._save_progress(self._progress.model_copy(update={"tokenizer_fingerprint": tokenizer.fingerprint}))
        return tokenizer

    def _make_split(self, split: Split, tokenizer_pool: TokenizerPool, dtype: ShardDtype, eos_token_id: int) -> None:
        """The rest of a split."""
        state = self._progress.splits[split]
        self._meter.begin(split, "bytes")
        num_documents = num_tokens = 0
        source = _ResumedSource(self._sources[split], state)
        shard: _ShardBuilder | None = None
        try:
            for chunk, documents in _in_order(source.chunks(), tokenizer_pool):
                text_bytes = [len(text.encode()) for text in chunk.texts]
                taken = 0
                while taken < len(documents):
                    with protect_write(self._directory):
                        shard = shard or self._open_shard(split, dtype, eos_token_id)
                        taken += shard.add_documents(documents[taken:], text_bytes[taken:])
                        if shard.is_full:
                            behind = {"position": chunk.position, "past": chunk.past + taken}
                            self._commit_shard(split, shard, chunk.skipped, behind)
                            shard = None
                num_documents, num_tokens = num_documents + len(documents), num_tokens + sum(map(len, documents))
                self._meter.set_postfix(f"{num_documents:,} documents, {num_tokens:,} tokens")
                self._meter.advance(sum(text_bytes))
            with protect_write(self._directory):
                self._commit_shard(split, shard, source.skipped(), {"done": True})
        except BaseException:
            if shard is not None:
                shard.writer.discard()
            raise

    def _open_shard(self, split: Split, dtype: ShardDtype, eos_token_id: int) -> _ShardBuilder:
        shards = self._progress.splits[split].index.shards
        output = self._config.output
        start = sum(part.bytes for shard in shards for part in shard.parts)
        writer = open_writer(output.format, self._directory, split, len(shards), start, dtype, eos_token_id)
        return _ShardBuilder(writer, output.shard_tokens)

    def _commit_shard(
        self, split: Split, shard: _ShardBuilder | None, skipped: dict[str, int], update: dict[str, object]
    ) -> None:
        """Make a shard count."""
        state = self._progress.splits[split]
        shards = (*state.index.shards, *([shard.finish()] if shard is not None else []))
        if not shards:
            raise _no_documents_error(split, state.index.provenance, skipped)
        index = state.index.model_copy(update={"shards": shards, "skipped": skipped})
        splits = {**self._progress.splits, split: state.model_copy(update={"index": index, **update})}
        self._save_progress(self._progress.model_copy(update={"splits": splits}))

    def _save_progress(self, progress: MakeDataProgress) -> None:
        progress.save(self._directory)
        self._progress = progress


class _ResumedSource:
    """What is left of a source, and what was left out of it, the earlier parts of the job included."""

    def __init__(self, source: DocumentSource, state: SplitProgress) -> None:
        self._source, self._state = source, state
        # Rows that are left out when a source is opened were counted the first time.
        self._already_counted = dict(source.skipped) if state.index.shards else {}

    def skipped(self) -> dict[str, int]:
        """Rows left out so far, counted by reason."""
        counts = Counter(self._source.skipped)
        counts.subtract(self._already_counted)
        counts.update(self._state.index.skipped)
        return {reason: count for reason, count in sorted(counts.items()) if count}

    def chunks(self) -> Iterator[_DocumentChunk]:
        """The documents that are not in shards yet, in order. How they are cut changes nothing but the speed."""
        position, past = self._state.position, self._state.past
        while True:
            start, skipped = position, self.skipped()
            texts: list[str] = []
            size = 0
            while size < CHUNK_CHARACTERS:
                some, position = self._source.read(0, position, DOCUMENTS_AT_ONCE)
                texts += some
                size += sum(map(len, some))
                if position is None:
                    break
            if past < len(texts):
                yield _DocumentChunk(texts[past:], start, past, skipped)
            past = max(0, past - len(texts))
            if position is None:
                return


def _in_order(
    chunks: Iterator[_DocumentChunk], tokenizer_pool: TokenizerPool
) -> Iterator[tuple[_DocumentChunk, list[Tokens]]]:
    """Each chunk with its tokens; as many are in flight as the processes need."""
    waiting: deque[tuple[_DocumentChunk, ItemsFuture[Tokens]]] = deque()
    for chunk in chunks:
        waiting.append((chunk, tokenizer_pool.submit(chunk.texts)))
        if len(waiting) > tokenizer_pool.prefetch_depth:
            first, future = waiting.popleft()
            yield first, future()
    for first, future in waiting:
        yield first, future()


def _train_tokenizer(config: MakeDataConfig, meter: ProgressMeter) -> Tokenizer:
    wanted = config.tokenizer
    meter.log(f"training a byte-level BPE tokenizer of {wanted.vocab_size:,} tokens ...")
    with _keys_of_this_config():
        source = open_source(config.source, "train")
        texts = first_documents(source, wanted.max_training_bytes)
        first = next(texts, None)
        if first is None:
            raise _no_documents_error("train", source.provenance, source.skipped)
        tokenizer = train_bpe(chain([first], texts), vocab_size=wanted.vocab_size, pattern=wanted.pattern)
    if tokenizer.vocab_size < wanted.vocab_size:
        meter.log(f"the text has no more pairs to merge: the tokenizer has {tokenizer.vocab_size:,} tokens")
    return tokenizer


def _no_documents_error(split: Split, provenance: str, skipped: dict[str, int]) -> ValueError:
    left_out = _format_counts(skipped)
    return ValueError(
        f"[source] has no {split} documents ({provenance}; left out: {left_out}); add text for this split"
    )


def _format_counts(skipped: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items())) or "nothing"


def _load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer in a directory, or in the one of a run or of other shards."""
    inside = Path(path) / TOKENIZER_DIRECTORY
    return load_tokenizer(inside if inside.is_dir() else path)


def _check_complete(
    config: MakeDataConfig,
    sources: Mapping[Split, DocumentSource],
    provided_tokenizer: Tokenizer | None,
    meter: ProgressMeter,
) -> ShardIndex:
    """The index of a directory that was made from the same, every file of it compared with its checksum."""
    directory = config.output.directory
    index = read_index(directory, "output.directory")
    identities = {split: split_index.identity for split, split_index in index.splits.items()}
    check_same_inputs(config, sources, provided_tokenizer, index.config, identities, index.tokenizer_fingerprint)
    meter.log(f"{directory} is complete; comparing its files with their checksums ...")
    for split_index in index.splits.values():
        check_checksums(directory, split_index)
    (directory / PROGRESS_FILE).unlink(missing_ok=True)
    return index


def _choose_num_processes(workers: int | None) -> int:
    """None: one for each core that this process may use; not every system tells."""
    cores = usable_cores()
    return workers if workers is not None else cores if cores > 1 else 0


@contextlib.contextmanager
def _keys_of_this_config() -> Iterator[None]:
    """Sources name their keys as a training config has them, in ``[data]``."""
    try:
        yield
    except ValueError as error:
        if "data.source" not in str(error):
            raise
        raise ValueError(str(error).replace("data.source", "source")) from error
