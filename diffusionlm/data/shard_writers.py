"""Write shards: one writer per format. Files are hashed while they are written, fsynced, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol, assert_never

import numpy as np

from config.make_data import ShardFormat
from diffusionlm.data.reader import Split, Tokens
from diffusionlm.data.shard_index import OFFSET_DTYPE, PARQUET_COLUMN, FileRange, ShardDtype, little_endian_dtype
from files.atomic import sync_to_disk

PARTIAL_SUFFIX = ".tmp"

ROW_GROUP_TOKENS = 1 << 22
"""A Parquet row group ends with the document that reaches this many tokens: 16 MiB before compression."""


class ShardWriter(Protocol):
    """Writes one shard. The result does not depend on how the documents are grouped into calls."""

    def add(self, documents: list[Tokens]) -> None:
        """Append documents to the shard."""

    def finish(self) -> tuple[FileRange, ...]:
        """Make the shard durable and return its files."""

    def discard(self) -> None:
        """Remove an unfinished shard."""


def open_writer(
    shard_format: ShardFormat,
    directory: Path,
    split: Split,
    index: int,
    start: int,
    dtype: ShardDtype,
    eos_token_id: int,
) -> ShardWriter:
    """Open the writer of shard ``index`` of a split.

    Args:
        start: first byte of the shard in a ``dat`` file.

    Raises:
        ValueError: a ``dat`` file is shorter than ``start``.
    """
    path = directory / f"{split}-{index:05}"
    match shard_format:
        case "bin":
            return _BinWriter(path, dtype)
        case "parquet":
            return _ParquetWriter(path)
        case "dat":
            return _DatWriter(directory / f"{split}.dat", start, dtype, eos_token_id)
        case _:
            assert_never(shard_format)


def rename_dat_file(directory: Path, split: Split) -> None:
    """Rename the complete ``dat`` file of a split, if there is one; the other formats rename each shard."""
    path = directory / f"{split}.dat"
    if partial_path(path).exists():
        os.replace(partial_path(path), path)
        sync_to_disk(directory)


def partial_path(path: Path) -> Path:
    """Return the path under which a file is written until it is complete."""
    return path.with_name(path.name + PARTIAL_SUFFIX)


class HashedFile:
    """A file that is written once, front to back, with its SHA-256; enough of a Python file for pyarrow."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._size = 0

    def write(self, data: Any) -> int:
        size = self._file.write(data)
        self._digest.update(data)
        self._size += size
        return size

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Make the file durable and close it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self.closed = True

    def close_without_sync(self) -> None:
        with contextlib.suppress(OSError):  # closing flushes, which fails again on a full disk
            self._file.close()

    def file_range(self, name: str, start: int = 0) -> FileRange:
        return FileRange(file=name, start=start, bytes=self._size, sha256=self._digest.hexdigest())


class _PartialFile:
    """A file that is renamed when it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.file = HashedFile(partial_path(path).open("wb"))

    def finish(self) -> FileRange:
        self.file.close()
        os.replace(partial_path(self._path), self._path)
        sync_to_disk(self._path.parent)
        return self.file.file_range(self._path.name)

    def discard(self) -> None:
        self.file.close_without_sync()
        partial_path(self._path).unlink(missing_ok=True)


class _BinWriter:
    def __init__(self, path: Path, dtype: ShardDtype) -> None:
        self._path, self._dtype = path, little_endian_dtype(dtype)
        self._ids = _PartialFile(path.with_name(path.name + ".bin"))
        self._lengths: list[int] = []

    def add(self, documents: list[Tokens]) -> None:
        self._ids.file.write(np.concatenate(documents).astype(self._dtype).data)
        self._lengths += map(len, documents)

    def finish(self) -> tuple[FileRange, ...]:
        ids = self._ids.finish()
        offsets = _PartialFile(self._path.with_name(self._path.name + ".idx"))
        try:
            offsets.file.write(np.cumsum([0, *self._lengths]).astype(OFFSET_DTYPE).data)
            return ids, offsets.finish()
        except BaseException:
            offsets.discard()
            raise

    def discard(self) -> None:
        self._ids.discard()


class _DatWriter:
    """Appends to the one file of the split, which is renamed after the last shard."""

    def __init__(self, path: Path, start: int, dtype: ShardDtype, eos_token_id: int) -> None:
        self._path, self._start, self._dtype = path, start, little_endian_dtype(dtype)
        self._end = np.array([eos_token_id], dtype=np.int32)
        file = partial_path(path).open("r+b" if start else "wb")
        if file.seek(0, os.SEEK_END) < start:
            file.close()
            raise ValueError(
                f"{partial_path(path)} is shorter than the {start:,} bytes that were written; remove the directory "
                "and start again"
            )
        file.truncate(start)
        file.seek(start)
        self._file = HashedFile(file)

    def add(self, documents: list[Tokens]) -> None:
        pieces = [piece for tokens in documents for piece in (tokens, self._end)]
        self._file.write(np.concatenate(pieces).astype(self._dtype).data)

    def finish(self) -> tuple[FileRange, ...]:
        self._file.close()
        return (self._file.file_range(self._path.name, self._start),)

    def discard(self) -> None:
        if self._file.closed:
            return  # progress.json may list it already; otherwise the next writer of this shard truncates it
        self._file.close_without_sync()
        os.truncate(partial_path(self._path), self._start)


class _ParquetWriter:
    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._output = _PartialFile(path.with_name(path.name + ".parquet"))
        self._schema = pa.schema([pa.field(PARQUET_COLUMN, pa.list_(pa.field("element", pa.int32(), nullable=False)))])
        try:  # the constructor writes the first bytes
            self._writer = pq.ParquetWriter(
                self._output.file, self._schema, compression="zstd", write_page_checksum=True
            )
        except BaseException:
            self._output.discard()
            raise
        self._group: list[Tokens] = []
        self._group_tokens = 0

    def add(self, documents: list[Tokens]) -> None:
        for tokens in documents:
            self._group.append(tokens)
            self._group_tokens += len(tokens)
            if self._group_tokens >= ROW_GROUP_TOKENS:
                self._write_group()

    def finish(self) -> tuple[FileRange, ...]:
        self._write_group()
        self._writer.close()
        return (self._output.finish(),)

    def discard(self) -> None:
        self._writer.is_open = False  # otherwise it writes its footer when it is deleted
        self._output.discard()

    def _write_group(self) -> None:
        import pyarrow as pa

        if not self._group:
            return
        offsets = np.cumsum([0, *map(len, self._group)]).astype(np.int32)
        lists = pa.ListArray.from_arrays(offsets, np.concatenate(self._group), type=self._schema.field(0).type)
        self._writer.write_table(pa.table([lists], schema=self._schema), row_group_size=len(self._group))
        self._group, self._group_tokens = [], 0


@contextlib.contextmanager
def protect_write(directory: Path) -> Iterator[None]:
    """Convert OSError to a ValueError that names the directory, and delay Ctrl-C until the block ends."""
    try:
        with _delay_interrupts():
            yield
    except OSError as error:
        free_mib = shutil.disk_usage(directory).free / 2**20
        raise ValueError(
            f"output.directory = {directory} could not be written: {error.strerror or error} ({free_mib:,.0f} MiB are "
            "free there). Finished shards are kept: free some space, and repeat the command"
        ) from error


@contextlib.contextmanager
def _delay_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the block ends, so that no unknown file is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is interrupted
        return
    pending: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _frame: pending.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if pending:
            signal.raise_signal(signal.SIGINT)
