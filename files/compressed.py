"""Read files of data from any offset, decompressing them on the way."""

from __future__ import annotations

import bz2
import errno
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

BUFFER_BYTES = 1 << 20
COMPRESSED_BLOCK = 1 << 16
"""Compressed bytes per read. It decides how many lines before a corrupt place are still read."""

MAX_ZSTD_WINDOW = 1 << 31
"""Memory limit of a .zst file, for archives made with `zstd --long=31`."""


class CorruptFileError(Exception):
    """The rest of a file cannot be read. All records before the corrupt place were returned."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=zlib.MAX_WBITS | 16),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW).decompressobj(),
}
"""File name extension -> decompressor; all have `decompress`, `eof` and `unused_data`."""


def detect_compression(path: Path) -> str | None:
    """Return the extension that names the compression of a file; None: it is not compressed."""
    extension = path.suffix.lower()
    return extension if extension in DECOMPRESSORS else None


def check_regular_file(path: Path) -> None:
    """Check that opening a path cannot wait, as for a named pipe.

    Raises:
        OSError: it is neither a regular file nor missing.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file, and data is read several times: name a file", str(path))


def open_bytes(path: Path, offset: int = 0) -> BinaryIO:
    """Open a file for reading from ``offset``, which counts decompressed bytes. Archives are decompressed up to there.

    Raises:
        ValueError: the file is shorter than ``offset``.
        OSError: it is no regular file, or cannot be opened.
        CorruptFileError: (while reading) the archive is truncated or damaged.
    """
    check_regular_file(path)
    extension = detect_compression(path)
    if extension is None:
        stream = path.open("rb", buffering=BUFFER_BYTES)
        num_missing = max(0, offset - stream.seek(0, os.SEEK_END))
        stream.seek(offset)
    else:
        stream = io.BufferedReader(_DecompressedFile(path, DECOMPRESSORS[extension]), BUFFER_BYTES)
        num_missing = offset
        while num_missing and (skipped := stream.read(min(BUFFER_BYTES, num_missing))):
            num_missing -= len(skipped)
    if num_missing:
        raise ValueError(
            f"{path} has no byte {offset:,}, where reading continues: it is not the file that was read before; restore "
            "that file, or start a new run"
        )
    return stream


class _DecompressedFile(io.RawIOBase):
    """Decompresses a file while it is read. Data before a corrupt place is returned before the error is raised."""

    def __init__(self, path: Path, open_decompressor: Callable[[], Any]) -> None:
        self._file = path.open("rb")
        self._chunks = filter(None, _decompress(self._file, open_decompressor))
        self._chunk = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if not self._chunk:
            self._chunk = memoryview(next(self._chunks, b""))
        size = min(len(buffer), len(self._chunk))
        buffer[:size] = self._chunk[:size]
        self._chunk = self._chunk[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


def _decompress(file: BinaryIO, open_decompressor: Callable[[], Any]) -> Iterator[bytes]:
    """Decompress all members or frames of an archive, ignoring zero bytes between them."""
    decompressor = open_decompressor()
    while block := file.read(COMPRESSED_BLOCK):
        while block:
            if decompressor.eof:
                block = block.lstrip(b"\0")
                if not block:
                    break
                decompressor = open_decompressor()
            try:
                chunk = decompressor.decompress(block)
            except (zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError) as error:
                raise CorruptFileError("damaged archive", f"{error}; download or copy it again") from error
            yield chunk
            block = decompressor.unused_data
    if not decompressor.eof:
        raise CorruptFileError("truncated archive", "it ends in the middle; download or copy it again")
