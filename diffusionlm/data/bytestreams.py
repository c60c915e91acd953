"""Files as streams of bytes, decompressed on the way, read from any offset."""

from __future__ import annotations

import bz2
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import zstandard

CHUNK = 1 << 20
"""Bytes that a stream holds at once."""
COMPRESSED_BLOCK = 1 << 16
"""Compressed bytes that are read at once. Lines that were read depend on it where an archive is damaged."""

MAX_ZSTD_WINDOW = 1 << 31
"""Memory that a .zst may ask for, as `zstd --long=31` does."""


class CorruptFileError(Exception):
    """What is left of a file cannot be read; the message says why, and what to do."""

    def __init__(self, reason: str, found: str) -> None:
        super().__init__(f"{reason}: {found}")
        self.reason = reason
        self.found = found


class Decompressor(Protocol):
    """What zlib, bz2, lzma and zstandard have in common."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def _gzip() -> Decompressor:
    return zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)


def _zstd() -> Decompressor:
    return zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW).decompressobj()


DECOMPRESSORS: dict[str, Callable[[], Decompressor]] = {
    ".gz": _gzip,
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
    ".zst": _zstd,
}
"""By the ending of a file."""


def detect_compression(path: Path) -> str | None:
    """The ending that says how a file is compressed; None: it is not."""
    ending = path.suffix.lower()
    return ending if ending in DECOMPRESSORS else None


def open_bytes(path: Path, offset: int = 0) -> BinaryIO:
    """What a file holds from ``offset`` on, a place in the decompressed bytes. Archives are decompressed up to there.

    Raises:
        ValueError: the file ends before.
        CorruptFileError: while it is read; the archive is cut off, or is none. All that could be read was given.
    """
    ending = detect_compression(path)
    if ending is None:
        plain = path.open("rb", buffering=CHUNK)
        if offset > plain.seek(0, os.SEEK_END):
            raise _offset_beyond_end_error(path, offset)
        plain.seek(offset)
        return plain
    stream = io.BufferedReader(_DecompressedFile(path, DECOMPRESSORS[ending]), CHUNK)
    left = offset
    while left > 0:
        skipped = len(stream.read(min(CHUNK, left)))
        if not skipped:
            raise _offset_beyond_end_error(path, offset)
        left -= skipped
    return stream


def _offset_beyond_end_error(path: Path, offset: int) -> ValueError:
    return ValueError(
        f"{path} ends before byte {offset:,}, where reading is to go on: it is not the file that was read before; put "
        "that one back, or start a new run"
    )


class _DecompressedFile(io.RawIOBase):
    """Decompresses a file as it is read. Everything before a damaged place is given before the error is raised."""

    def __init__(self, path: Path, new: Callable[[], Decompressor]) -> None:
        self._file = path.open("rb")
        self._pieces = _decompress(self._file, new)
        self._piece = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._piece:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._piece = memoryview(piece)
        size = min(len(buffer), len(self._piece))
        buffer[:size] = self._piece[:size]
        self._piece = self._piece[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


def _decompress(file: BinaryIO, new: Callable[[], Decompressor]) -> Iterator[bytes]:
    """The members or frames of an archive, one behind the other, with any zeros between them left out."""
    decompressor = new()
    while block := file.read(COMPRESSED_BLOCK):
        while block:
            if decompressor.eof:
                block = block.lstrip(b"\0")
                if not block:
                    break
                decompressor = new()
            try:
                piece = decompressor.decompress(block)
            except (zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError) as error:
                raise CorruptFileError("damaged archive", f"{error}; download or copy it again") from error
            yield piece
            block = decompressor.unused_data
    if not decompressor.eof:
        raise CorruptFileError("truncated archive", "it ends in the middle; download or copy it again")
