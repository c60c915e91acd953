"""Records of plain-text, JSON and Parquet files; files as streams of bytes, decompressed on the way."""

from __future__ import annotations

import bz2
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import zstandard

from diffusionlm.data.record_source import (
    BYTE_ORDER_MARK,
    MAX_SHOWN_CHARACTERS,
    SURROGATES,
    BadRecord,
    ParsedRecord,
    SampleBy,
    decode_utf8,
    shorten_repr,
    validate_text,
)

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

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


def read_plain_records(path: Path, sample_by: SampleBy, at: int, line: int) -> Iterator[ParsedRecord]:
    """The documents of a plain text file; places are bytes.

    Paragraphs are between blank lines, and blank lines are no documents. The line break at the end of a line or a
    paragraph is left out. Line breaks of Windows become plain ones, and a byte order mark at the beginning goes.
    """
    with open_bytes(path, at) as stream:
        for content, behind, count in DOCUMENT_SPLITTERS[sample_by](stream, at, line):
            yield _parse_plain_text(content, is_first=at == 0), behind, count
            at = behind


def _parse_plain_text(content: bytes, *, is_first: bool) -> str | BadRecord:
    if b"\0" in content:
        return BadRecord("binary data", f"a byte 0 in {shorten_repr(content)}; plain text in UTF-8 has none")
    text = decode_utf8(content)
    if isinstance(text, BadRecord):
        assert text.repaired_text is not None, "bytes can always be mended"
        return BadRecord(text.reason, text.detail, _normalize_line_breaks(text.repaired_text, is_first=is_first))
    return _normalize_line_breaks(text, is_first=is_first)


def _normalize_line_breaks(text: str, *, is_first: bool) -> str:
    if is_first:
        text = text.removeprefix(BYTE_ORDER_MARK)
    return text.replace("\r\n", "\n") if "\r" in text else text


DocumentBytes = tuple[bytes, int, int]
"""Bytes of a document, the place behind it, and the lines up to there."""


def _read_whole_file(stream: BinaryIO, at: int, line: int) -> Iterator[DocumentBytes]:
    content = stream.read()
    if content or at == 0:
        yield content, at + len(content), line


def _read_paragraphs(stream: BinaryIO, at: int, line: int) -> Iterator[DocumentBytes]:
    lines: list[bytes] = []
    for raw in stream:
        at += len(raw)
        line += 1
        if raw.strip():
            lines.append(raw)
        elif lines:
            yield _strip_line_break(b"".join(lines)), at, line
            lines = []
    if lines:
        yield _strip_line_break(b"".join(lines)), at, line


def _read_lines(stream: BinaryIO, at: int, line: int) -> Iterator[DocumentBytes]:
    for raw in stream:
        at += len(raw)
        line += 1
        if raw.strip():
            yield _strip_line_break(raw), at, line


def _strip_line_break(content: bytes) -> bytes:
    return content.removesuffix(b"\n").removesuffix(b"\r")


DOCUMENT_SPLITTERS: dict[SampleBy, Callable[[BinaryIO, int, int], Iterator[DocumentBytes]]] = {
    "document": _read_whole_file,
    "paragraph": _read_paragraphs,
    "line": _read_lines,
}


WHITESPACE = re.compile(r"[ \t\n\r]*")


MAX_SHOWN_FIELDS = 20
"""Names of fields that a message shows."""


def json_records(path: Path, field: str, at: int, line: int) -> Iterator[ParsedRecord]:
    """The texts under a key; places are bytes where each line is an object, and characters otherwise.

    Only a file that is one value is held in memory. Of a key that an object has twice, the last one counts.
    """
    if _has_lines(path):
        return _read_json_lines(path, field, at, line)
    return _read_json_array(path, field, at, line)


def _has_lines(path: Path) -> bool:
    """Whether each line is a value of its own: the name tells, or the first line."""
    if {".jsonl", ".ndjson"} & {suffix.lower() for suffix in path.suffixes}:
        return True
    with open_bytes(path) as stream:
        text = next((text for text in map(_decode_and_strip, stream) if text), "")
    if text.startswith("["):
        return False
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        goes_on = error.pos == len(text) > 0  # nothing is wrong but that the line ends
        return not goes_on
    except (ValueError, RecursionError):
        return True
    return True


def _decode_and_strip(line: bytes) -> str:
    return line.decode("utf-8", "replace").removeprefix(BYTE_ORDER_MARK).strip()


def _read_json_lines(path: Path, field: str, at: int, line: int) -> Iterator[ParsedRecord]:
    parse = json.JSONDecoder().raw_decode
    content: Any
    with open_bytes(path, at) as stream:
        for raw in stream:
            at += len(raw)
            line += 1
            try:
                text = raw.decode()
                row, end = parse(text)
                content = row[field]
                content.encode()
                is_text = text[end:].isspace()
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                is_text = False
            if not is_text:  # find out why, slowly
                content = parse_json_text(raw, field)
            if content is not None:
                yield content, at, line


class _NumberText(str):
    """A number as it is written: 1e3 and 1.50 would be others as numbers."""


def parse_json_text(source: bytes, field: str) -> str | BadRecord | None:
    """The text of an object, or what is wrong with it; None for a blank line."""
    text = _decode_and_strip(source)
    if not text:
        return None
    line = decode_utf8(source)
    content: str | BadRecord
    try:
        row = json.loads(text, parse_int=_NumberText, parse_float=_NumberText)
        content = _text_of_field(row, field)
    except json.JSONDecodeError as error:
        cut_off = "" if source.endswith(b"\n") else "; is the file cut off?"
        content = BadRecord("malformed JSON", f"{error.msg} at character {error.pos} of {shorten_repr(text)}{cut_off}")
    except RecursionError:
        content = BadRecord("malformed JSON", f"nested too deeply: {shorten_repr(text)}")
    if isinstance(line, str):
        return content
    return replace(line, repaired_text=content if isinstance(content, str) else content.repaired_text)


def _text_of_field(row: Any, field: str) -> str | BadRecord:
    if not isinstance(row, dict):
        return BadRecord("not an object", shorten_repr(row))
    if field not in row:
        fields = ", ".join(map(repr, list(row)[:MAX_SHOWN_FIELDS]))
        return BadRecord(f"no field {field!r}", f"its fields are {fields}", is_field_error=True)
    value = row[field]
    if isinstance(value, _NumberText):
        return BadRecord("number instead of text", value[:MAX_SHOWN_CHARACTERS], str(value), is_field_error=True)
    return validate_text(value)


def _read_json_array(path: Path, field: str, at: int, line: int) -> Iterator[ParsedRecord]:
    """The objects of an array; one object alone is read as an array of it."""
    with open_bytes(path) as stream:
        content = stream.read()
    text = content.decode("utf-8-sig", "surrogateescape").rstrip()
    is_utf8 = SURROGATES.search(text) is None
    if not text.startswith("[", _skip_whitespace(text, 0)):
        text = f"[{text}]"
    parse = json.JSONDecoder(parse_int=_NumberText, parse_float=_NumberText).raw_decode
    while True:
        is_first, before = at == 0, at
        mark = _skip_whitespace(text, at)
        start = _skip_whitespace(text, mark + 1)
        end = start if is_first else mark
        if text.startswith("]", end) and end + 1 == len(text):
            return
        try:
            if not text.startswith("[" if is_first else ",", mark):
                raise json.JSONDecodeError("Expecting ',' or the end of the array", text, mark)
            value, at = parse(text, start)
        except (ValueError, RecursionError) as error:
            detail = f"{error}: {shorten_repr(text[start : start + MAX_SHOWN_CHARACTERS])}; what follows in the array is lost"
            yield BadRecord("malformed JSON", detail), len(text), line
            return
        line = max(1, line) + text.count("\n", before, at)
        text_of_row: str | BadRecord | None
        if is_utf8 and type(value) is dict and type(value.get(field)) is str:
            text_of_row = validate_text(value[field])
        else:
            text_of_row = parse_json_text(text[start:at].encode("utf-8", "surrogateescape"), field)
        assert text_of_row is not None, "a value is not blank"
        yield text_of_row, at, line


def _skip_whitespace(text: str, place: int) -> int:
    blanks = WHITESPACE.match(text, place)
    assert blanks is not None, "it matches nothing, too"
    return blanks.end()


BATCH_BYTES = 4 << 20
"""Text that is decoded at once, where the rows of a group are alike."""


MOST_BATCH_ROWS = 1_024


def parquet_records(path: Path, column: str, at: int) -> Iterator[ParsedRecord]:
    """The cells of a column; places are rows. Other columns are not read.

    Raises:
        ValueError: there is no such column; lists those there are.
        CorruptFileError: the file is none, or cannot be read on.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise ValueError(
                    f"data.source.text_field = {column!r} is no column of {path}; "
                    f"its columns are {', '.join(map(repr, names))}"
                )
            for value in _read_column(file, column, at):
                at += 1
                yield validate_text(value), at, at
    except (FileNotFoundError, PermissionError):
        raise
    except (pa.ArrowException, OSError) as error:
        raise CorruptFileError("damaged Parquet", f"{error}; download or copy it again") from error


def _read_column(file: pq.ParquetFile, column: str, start: int) -> Iterator[object]:
    """The cells from row ``start`` on; text as bytes, because nothing has checked that it is UTF-8."""
    first = 0
    for group in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if start < first + rows:
            size = _batch_rows(file, column, group)
            skipped = max(0, start - first)
            for batch in file.iter_batches(size, [group], [column], use_threads=False):
                if skipped < len(batch):
                    yield from _to_python(batch.column(0).slice(skipped))
                skipped = max(0, skipped - len(batch))
        first += rows


def _batch_rows(file: pq.ParquetFile, column: str, group: int) -> int:
    metadata = file.metadata.row_group(group)
    chunks = [metadata.column(index) for index in range(metadata.num_columns)]
    size = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] == column)
    rows: int = BATCH_BYTES * metadata.num_rows // max(1, size)
    return max(1, min(MOST_BATCH_ROWS, rows))


def _to_python(values: pa.Array) -> list[object]:
    import pyarrow as pa

    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        values = values.cast(pa.large_binary())
    cells: list[object] = values.to_pylist()
    return cells
