"""Files of tokens, one writer for each format: written aside, hashed on the way, fsynced, renamed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal, Protocol, assert_never

import numpy as np
from pydantic import NonNegativeInt

from diffusionlm.data.reader import ReaderPosition, Split, Tokens
from diffusionlm.data.shard_index import (
    FORMAT_VERSION,
    OFFSET_DTYPE,
    PARQUET_COLUMN,
    PROGRESS_FILE,
    FileRange,
    ShardDtype,
    ShardFormat,
    SplitIndex,
    StrictModel,
)
from files.atomic import sync_to_disk, write_text_atomic
from files.lock import DirectoryInUseError, lock_directory

TEMPORARY_SUFFIX = ".tmp"
"""Ending of a file that is being written."""
SHARD_FILE_PATTERN = re.compile(r"(train|validation)(-\d{5,}\.(bin|idx|parquet)|\.dat)(\.tmp)?")
"""Files of shards, complete or not."""


ROW_GROUP_TOKENS = 1 << 22
"""A row group of Parquet ends with the document that brings it to so many: 16 MiB before compression."""


class ShardWriter(Protocol):
    """Writes one shard; what it has written does not depend on how the documents came in portions."""

    def add(self, documents: list[Tokens]) -> None:
        """Append documents."""

    def finish(self) -> tuple[FileRange, ...]:
        """Make the shard durable; says what was written."""

    def discard(self) -> None:
        """Leave nothing of a shard that is not finished."""


def open_writer(
    kind: ShardFormat, directory: Path, split: Split, number: int, start: int, dtype: ShardDtype, eos_token_id: int
) -> ShardWriter:
    """The writer of a split's shard with this number; ``start`` is where it begins in a ``dat`` file.

    Raises:
        ValueError: the part of a ``dat`` file that was written before is not all there.
    """
    path = directory / f"{split}-{number:05}"
    match kind:
        case "bin":
            return _BinWriter(path, dtype)
        case "parquet":
            return _ParquetWriter(path)
        case "dat":
            return _DatWriter(directory / f"{split}.dat", start, dtype, eos_token_id)
        case _:
            assert_never(kind)


def rename_dat_file(directory: Path, split: Split, kind: ShardFormat) -> None:
    """Give the file of a split that grew over all its shards its name; those of the other formats have theirs."""
    path = directory / f"{split}.dat"
    if kind == "dat" and partial_path(path).exists():
        os.replace(partial_path(path), path)
        sync_to_disk(directory)


def partial_path(path: Path) -> Path:
    """Where a file is written until it is complete."""
    return path.with_name(path.name + TEMPORARY_SUFFIX)


class HashedFile:
    """A file that is written once from its start to its end; as much of Python's files as Parquet needs."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._size = 0

    def write(self, data: Any) -> int:
        """Append bytes."""
        size = self._file.write(data)
        self._digest.update(data)
        self._size += size
        return size

    def tell(self) -> int:
        """Bytes so far."""
        return self._size

    def flush(self) -> None:
        """Hand everything to the system."""
        self._file.flush()

    def close(self) -> None:
        """Make it durable."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self.closed = True

    def close_without_sync(self) -> None:
        """Close it as it is."""
        with contextlib.suppress(OSError):  # a full disk once more
            self._file.close()

    def part(self, name: str, start: int = 0) -> FileRange:
        """What was written."""
        return FileRange(file=name, start=start, bytes=self._size, sha256=self._digest.hexdigest())


class _TemporaryFile:
    """A file that gets its name when it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.file = HashedFile(partial_path(path).open("wb"))

    def finish(self) -> FileRange:
        self.file.close()
        os.replace(partial_path(self._path), self._path)
        sync_to_disk(self._path.parent)
        return self.file.part(self._path.name)

    def discard(self) -> None:
        self.file.close_without_sync()
        partial_path(self._path).unlink(missing_ok=True)


class _BinWriter:
    def __init__(self, path: Path, dtype: ShardDtype) -> None:
        self._path, self._dtype = path, _little_endian(dtype)
        self._ids = _TemporaryFile(path.with_name(path.name + ".bin"))
        self._lengths: list[int] = []

    def add(self, documents: list[Tokens]) -> None:
        self._ids.file.write(np.concatenate(documents).astype(self._dtype).data)
        self._lengths += map(len, documents)

    def finish(self) -> tuple[FileRange, ...]:
        ids = self._ids.finish()
        offsets = _TemporaryFile(self._path.with_name(self._path.name + ".idx"))
        try:
            offsets.file.write(np.cumsum([0, *self._lengths]).astype(OFFSET_DTYPE).data)
            return ids, offsets.finish()
        except BaseException:
            offsets.discard()
            raise

    def discard(self) -> None:
        self._ids.discard()


class _DatWriter:
    """Appends to the one file of the split, which gets its name when all of it is there."""

    def __init__(self, path: Path, start: int, dtype: ShardDtype, eos_token_id: int) -> None:
        self._path, self._start, self._dtype = path, start, _little_endian(dtype)
        self._end = np.array([eos_token_id], dtype=np.int32)
        file = partial_path(path).open("r+b" if start else "wb")
        if file.seek(0, os.SEEK_END) < start:
            file.close()
            raise ValueError(
                f"{partial_path(path)} is shorter than {start:,} bytes, which were there: remove the directory and begin again"
            )
        file.truncate(start)
        file.seek(start)
        self._file = HashedFile(file)

    def add(self, documents: list[Tokens]) -> None:
        ended = [each for tokens in documents for each in (tokens, self._end)]
        self._file.write(np.concatenate(ended).astype(self._dtype).data)

    def finish(self) -> tuple[FileRange, ...]:
        self._file.close()
        return (self._file.part(self._path.name, self._start),)

    def discard(self) -> None:
        if self._file.closed:
            return  # it may be on record already; if not, the next writer of this shard cuts it off
        self._file.close_without_sync()
        os.truncate(partial_path(self._path), self._start)


class _ParquetWriter:
    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._new = _TemporaryFile(path.with_name(path.name + ".parquet"))
        self._schema = pa.schema([pa.field(PARQUET_COLUMN, pa.list_(pa.field("element", pa.int32(), nullable=False)))])
        try:  # it writes the first bytes at once
            self._writer = pq.ParquetWriter(self._new.file, self._schema, compression="zstd", write_page_checksum=True)
        except BaseException:
            self._new.discard()
            raise
        self._group: list[Tokens] = []
        self._tokens = 0

    def add(self, documents: list[Tokens]) -> None:
        for tokens in documents:
            self._group.append(tokens)
            self._tokens += len(tokens)
            if self._tokens >= ROW_GROUP_TOKENS:
                self._write_group()

    def finish(self) -> tuple[FileRange, ...]:
        self._write_group()
        self._writer.close()
        return (self._new.finish(),)

    def discard(self) -> None:
        self._writer.is_open = False  # else it writes its footer when it is deleted
        self._new.discard()

    def _write_group(self) -> None:
        import pyarrow as pa

        if not self._group:
            return
        offsets = np.cumsum([0, *map(len, self._group)]).astype(np.int32)
        lists = pa.ListArray.from_arrays(offsets, np.concatenate(self._group), type=self._schema.field(0).type)
        self._writer.write_table(pa.table([lists], schema=self._schema), row_group_size=len(self._group))
        self._group, self._tokens = [], 0


def _little_endian(dtype: ShardDtype) -> np.dtype[Any]:
    """Unsigned integers, little-endian on every machine."""
    return np.dtype(dtype).newbyteorder("<")


class SplitProgress(StrictModel):
    """What is done of a split."""

    index: SplitIndex
    """The shards that are complete; rows that were skipped before ``position``."""
    position: ReaderPosition = None
    """Where the source is read on."""
    past: NonNegativeInt = 0
    """Documents from there on that are in complete shards already."""
    done: bool = False


class MakeDataProgress(StrictModel):
    """``progress.json``: replaced after each shard."""

    version: Literal[1] = FORMAT_VERSION
    config: dict[str, Any]
    tokenizer_fingerprint: str | None = None
    """None: there is no tokenizer yet."""
    splits: dict[Split, SplitProgress]

    def save(self, directory: Path) -> None:
        """Replace the file."""
        write_text_atomic(directory / PROGRESS_FILE, self.model_dump_json(indent=1) + "\n")


@contextlib.contextmanager
def lock_output_directory(directory: Path) -> Iterator[None]:
    """The directory, made if need be, for this process alone.

    Raises:
        ValueError: it is a file, cannot be made, or another process writes there.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock_directory(directory))
        except DirectoryInUseError as error:
            raise ValueError(
                f"output.directory = {directory} is in use by another process; wait for it or stop it"
            ) from error
        except OSError as error:
            raise ValueError(f"output.directory = {directory} cannot be written: {error.strerror}") from error
        yield


@contextlib.contextmanager
def protect_write(directory: Path) -> Iterator[None]:
    """A block in which an OSError means that the directory could not be written, and that Ctrl-C does not cut short."""
    try:
        with _delay_interrupts():
            yield
    except OSError as error:
        free = shutil.disk_usage(directory).free / 2**20
        raise ValueError(
            f"output.directory = {directory} could not be written: {error.strerror or error} ({free:,.0f} MiB are free "
            "there). What was complete is kept: make room, and repeat the command"
        ) from error


@contextlib.contextmanager
def _delay_interrupts() -> Iterator[None]:
    """Ctrl-C counts at the end of the block: no file is left behind that nobody knows of."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is ever interrupted
        return
    waiting: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: waiting.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting:
            signal.raise_signal(signal.SIGINT)
