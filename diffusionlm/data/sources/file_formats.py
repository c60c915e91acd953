"""Read the records of plain-text, JSON and Parquet files from any offset, decompressing text and JSON on the way."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from config.data import SampleBy
from diffusionlm.data.chat.conversation import Record
from diffusionlm.data.sources.record_source import (
    MAX_SHOWN_CHARACTERS,
    NOT_UTF8,
    BadRecord,
    ParsedRecord,
    RowParser,
    TextField,
    decode_utf8,
    list_fields,
    shorten_repr,
    validate_text,
)
from files.compressed import BUFFER_BYTES, CorruptFileError, check_regular_file, open_bytes

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

MAX_RECORD_BYTES = 1 << 28
PARQUET_BATCH_BYTES = 4 << 20
"""Text that is decoded at once, if all rows of a row group have the same size."""
MAX_PARQUET_BATCH_ROWS = 1_024

BYTE_ORDER_MARK = "\ufeff"
WHITESPACE = re.compile(r"[ \t\n\r]*")


def read_plain_records(
    path: Path, sample_by: SampleBy, offset: int, line: int, max_bytes: int = MAX_RECORD_BYTES
) -> Iterator[ParsedRecord]:
    """Read the documents of a plain-text file; offsets are bytes.

    Paragraphs are separated by blank lines; blank lines are no documents. The line break at the end of a line or
    paragraph is removed, ``\\r\\n`` becomes ``\\n``, and a byte order mark at the start of the file is removed.
    """
    if sample_by == "document":
        max_bytes = _limit_of_whole_file(path, max_bytes)
    with open_bytes(path, offset) as stream:
        for content, next_offset, next_line in DOCUMENT_SPLITTERS[sample_by](stream, offset, line, max_bytes):
            yield _parse_plain_text(content, is_first=offset == 0), next_offset, next_line
            offset = next_offset


def _limit_of_whole_file(path: Path, max_bytes: int) -> int:
    """Return the limit of a file that is one record: at least its size on the disk, so it concerns archives only."""
    return max(max_bytes, path.stat().st_size)


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        record = _too_large_record(max_bytes)
        raise CorruptFileError(record.reason, f"{record.detail}: reading ends here")


def _too_large_record(max_bytes: int) -> BadRecord:
    detail = f"more bytes than max_record_bytes = {max_bytes:,}; raise it, or write a smaller one"
    return BadRecord("record too large", detail)


def _parse_plain_text(content: bytes | BadRecord, *, is_first: bool) -> str | BadRecord:
    if isinstance(content, BadRecord):
        return content
    if b"\0" in content:
        return BadRecord("binary data", f"a byte 0 in {shorten_repr(content)}; plain text in UTF-8 has none")
    text = decode_utf8(content)
    if isinstance(text, BadRecord):
        assert text.repaired_text is not None, "bytes can always be decoded with replacement characters"
        return replace(text, repaired_text=_normalize_line_breaks(str(text.repaired_text), is_first=is_first))
    return _normalize_line_breaks(text, is_first=is_first)


def _normalize_line_breaks(text: str, *, is_first: bool) -> str:
    if is_first:
        text = text.removeprefix(BYTE_ORDER_MARK)
    return text.replace("\r\n", "\n") if "\r" in text else text


DocumentBytes = tuple[bytes | BadRecord, int, int]
"""(bytes of a document or line, next offset, number of lines up to there)."""


def _read_raw_lines(stream: BinaryIO, offset: int, line: int, max_bytes: int) -> Iterator[DocumentBytes]:
    """Read lines with their line breaks; one that is too large is a bad record, and reading continues after it."""
    while raw_line := stream.readline(max_bytes + 1):
        content: bytes | BadRecord = raw_line
        offset += len(raw_line)
        line += 1
        if len(raw_line) > max_bytes:
            content = _too_large_record(max_bytes)
            while raw_line and not raw_line.endswith(b"\n"):
                raw_line = stream.readline(BUFFER_BYTES)
                offset += len(raw_line)
        yield content, offset, line


def _read_whole(stream: BinaryIO, max_bytes: int) -> bytes:
    """Read the rest of a stream in pieces: one `read` reserves the memory of its limit, however small the file is."""
    pieces: list[bytes] = []
    num_bytes = 0
    while piece := stream.read(min(BUFFER_BYTES, max_bytes + 1 - num_bytes)):
        pieces.append(piece)
        num_bytes += len(piece)
    _check_size(num_bytes, max_bytes)
    return b"".join(pieces)


def _read_whole_file(stream: BinaryIO, offset: int, line: int, max_bytes: int) -> Iterator[DocumentBytes]:
    content = _read_whole(stream, max_bytes)
    if content or offset == 0:
        yield content, offset + len(content), line


def _read_paragraphs(stream: BinaryIO, offset: int, line: int, max_bytes: int) -> Iterator[DocumentBytes]:
    lines: list[bytes] = []
    num_bytes = 0
    for raw_line, next_offset, next_line in _read_raw_lines(stream, offset, line, max_bytes):
        if isinstance(raw_line, BadRecord) or raw_line.strip():
            num_bytes += next_offset - offset
            if isinstance(raw_line, BadRecord) or num_bytes > max_bytes:
                lines.clear()
            else:
                lines.append(raw_line)
        elif num_bytes:
            yield _join_paragraph(lines, max_bytes), next_offset, next_line
            lines, num_bytes = [], 0
        offset, line = next_offset, next_line
    if num_bytes:
        yield _join_paragraph(lines, max_bytes), offset, line


def _join_paragraph(lines: list[bytes], max_bytes: int) -> bytes | BadRecord:
    """Join the lines of a paragraph; none are kept of one that is too large."""
    return _strip_line_break(b"".join(lines)) if lines else _too_large_record(max_bytes)


def _read_lines(stream: BinaryIO, offset: int, line: int, max_bytes: int) -> Iterator[DocumentBytes]:
    for raw_line, next_offset, next_line in _read_raw_lines(stream, offset, line, max_bytes):
        if isinstance(raw_line, BadRecord):
            yield raw_line, next_offset, next_line
        elif raw_line.strip():
            yield _strip_line_break(raw_line), next_offset, next_line


def _strip_line_break(content: bytes) -> bytes:
    return content.removesuffix(b"\n").removesuffix(b"\r")


DOCUMENT_SPLITTERS: dict[SampleBy, Callable[[BinaryIO, int, int, int], Iterator[DocumentBytes]]] = {
    "document": _read_whole_file,
    "paragraph": _read_paragraphs,
    "line": _read_lines,
}


def read_json_records(
    path: Path, field: TextField, offset: int, line: int, max_bytes: int = MAX_RECORD_BYTES
) -> Iterator[ParsedRecord]:
    """Read the texts of JSON objects: one object per line, one array of objects, or one object.

    Offsets are bytes if each line is an object, else characters. Only a file that is one JSON value is held in memory.
    If an object has a field twice, the last one counts.
    """
    whole_bytes = _limit_of_whole_file(path, max_bytes)
    if not _has_json_lines(path, whole_bytes):
        return _read_json_array(path, field, offset, line, whole_bytes)
    return _read_json_lines(path, field, offset, line, max_bytes)


def _has_json_lines(path: Path, max_bytes: int) -> bool:
    """Decide by the file name or the first line whether each line is a JSON value of its own."""
    if {".jsonl", ".ndjson"} & {suffix.lower() for suffix in path.suffixes}:
        return True
    with open_bytes(path) as stream:
        lines = iter(lambda: stream.readline(max_bytes + 1), b"")
        found = ((line, text) for line in lines if (text := _decode_and_strip(line)))
        line, text = next(found, (b"", ""))
    if text.startswith("["):
        return False
    if len(line) > max_bytes:
        return True
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        continues_on_next_line = getattr(error, "pos", -1) == len(text) > 0  # the only error is that the line ends
        return not continues_on_next_line
    return True


def _decode_and_strip(line: bytes) -> str:
    return line.decode("utf-8", "replace").removeprefix(BYTE_ORDER_MARK).strip()


def _read_json_lines(path: Path, field: TextField, offset: int, line: int, max_bytes: int) -> Iterator[ParsedRecord]:
    with open_bytes(path, offset) as stream:
        for raw_line, next_offset, next_line in _read_raw_lines(stream, offset, line, max_bytes):
            content = raw_line if isinstance(raw_line, BadRecord) else parse_json_text(raw_line, field)
            if content is not None:
                yield content, next_offset, next_line


class _NumberText(str):
    """A JSON number as it is spelled: parsing 1e3 or 1.50 would change the text."""


_DECODER = json.JSONDecoder(parse_int=_NumberText, parse_float=_NumberText)


def parse_json_text(source: bytes, field: TextField) -> Record | BadRecord | None:
    """Return the text or conversation of a JSON object, or the reason why there is none; None for a blank line."""
    text = _decode_and_strip(source)
    if not text:
        return None
    line = decode_utf8(source)
    content: Record | BadRecord
    try:
        if isinstance(field, str):
            content = _text_of_field(_DECODER.decode(text), field)
        else:
            value = json.loads(text)
            content = field(value) if isinstance(value, dict) else BadRecord("not an object", shorten_repr(value))
    except json.JSONDecodeError as error:
        hint = "" if source.endswith(b"\n") else "; is the file cut off?"
        content = BadRecord("malformed JSON", f"{error.msg} at character {error.pos} of {shorten_repr(text)}{hint}")
    except RecursionError:
        content = BadRecord("malformed JSON", f"nested too deeply: {shorten_repr(text)}")
    except ValueError as error:  # an integer with more digits than Python reads
        content = BadRecord("malformed JSON", f"{error}: {shorten_repr(text)}")
    if isinstance(line, str):
        return content
    return replace(line, repaired_text=content.repaired_text if isinstance(content, BadRecord) else content)


def _text_of_field(value: Any, field: str) -> str | BadRecord:
    if not isinstance(value, dict):
        return BadRecord("not an object", shorten_repr(value))
    if field not in value:
        return BadRecord(f"no field {field!r}", f"its fields are {list_fields(value)}", is_field_error=True)
    text = value[field]
    if isinstance(text, _NumberText):
        return BadRecord("number instead of text", text[:MAX_SHOWN_CHARACTERS], str(text), is_field_error=True)
    return validate_text(text)


def _read_json_array(path: Path, field: TextField, offset: int, line: int, max_bytes: int) -> Iterator[ParsedRecord]:
    """Read the objects of an array; a single object is read as an array of one."""
    with open_bytes(path) as stream:
        content = _read_whole(stream, max_bytes)
    text = content.decode("utf-8-sig", "surrogateescape").rstrip()
    if not text.startswith("[", _skip_whitespace(text, 0)):
        text = f"[{text}]"
    while True:
        is_first, previous_offset = offset == 0, offset
        separator = _skip_whitespace(text, offset)
        start = _skip_whitespace(text, separator + 1)
        end = start if is_first else separator
        if text.startswith("]", end) and end + 1 == len(text):
            return
        try:
            if not text.startswith("[" if is_first else ",", separator):
                raise json.JSONDecodeError("Expecting ',' or the end of the array", text, separator)
            _, offset = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            excerpt = shorten_repr(text[start : start + MAX_SHOWN_CHARACTERS])
            yield BadRecord("malformed JSON", f"{error}: {excerpt}; the rest of the array is lost"), len(text) + 1, line
            return
        line = max(1, line) + text.count("\n", previous_offset, offset)
        record = parse_json_text(text[start:offset].encode("utf-8", "surrogateescape"), field)
        assert record is not None, "a JSON value is not blank"
        yield record, offset, line


def _skip_whitespace(text: str, start: int) -> int:
    match = WHITESPACE.match(text, start)
    assert match is not None, "the pattern also matches the empty string"
    return match.end()


def read_parquet_records(
    path: Path, column: TextField, start_row: int, column_setting: str, max_bytes: int = MAX_RECORD_BYTES
) -> Iterator[ParsedRecord]:
    """Read the cells of one column from ``start_row`` on; other columns are not read. Offsets are rows.

    Args:
        column: a column, or what parses all columns of a row.
        column_setting: config key of the column and its value, for the error message.

    Raises:
        ValueError: there is no such column.
        CorruptFileError: the file is not Parquet, or reading cannot continue.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = start_row
    check_regular_file(path)
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if isinstance(column, str) and column not in names:
                raise ValueError(
                    f"{column_setting} is no column of {path}; its columns are {', '.join(map(repr, names))}"
                )
            for value in _read_cells(file, column if isinstance(column, str) else None, start_row, max_bytes):
                row += 1
                if isinstance(value, bytes) and len(value) > max_bytes:
                    value = _too_large_record(max_bytes)
                elif isinstance(column, str):
                    value = validate_text(value)
                else:
                    value = parse_arrow_row(column, value)
                yield value, row, row
    except (FileNotFoundError, PermissionError):
        raise
    except (pa.ArrowException, OSError) as error:
        is_limit = isinstance(error, pa.ArrowCapacityError | pa.ArrowMemoryError | pa.ArrowNotImplementedError)
        if is_limit or "Not yet implemented" in str(error):
            raise CorruptFileError("unsupported Parquet", f"{error}; write it with smaller row groups") from error
        raise CorruptFileError("damaged Parquet", f"{error}; download or copy it again") from error


def _read_cells(file: pq.ParquetFile, column: str | None, start_row: int, max_bytes: int) -> Iterator[Any]:
    """Yield the cells of a column from ``start_row`` on; None: whole rows, or the error of decoding one.

    Text of a column is bytes, because Parquet does not check that it is UTF-8.
    """
    first_row = 0
    for group in range(file.metadata.num_row_groups):
        num_rows = file.metadata.row_group(group).num_rows
        if start_row < first_row + num_rows:
            batch_rows = _choose_batch_rows(file, column, group, max_bytes)
            num_skipped = max(0, start_row - first_row)
            columns = None if column is None else [column]
            for batch in file.iter_batches(batch_rows, [group], columns, use_threads=False):
                if num_skipped < len(batch):
                    rest = batch.slice(num_skipped)
                    yield from _rows_to_python(rest) if column is None else _to_python(rest.column(0))
                num_skipped = max(0, num_skipped - len(batch))
        first_row += num_rows


def _choose_batch_rows(file: pq.ParquetFile, column: str | None, group: int, max_bytes: int) -> int:
    metadata = file.metadata.row_group(group)
    columns = (metadata.column(index) for index in range(metadata.num_columns))
    size = sum(
        chunk.total_uncompressed_size for chunk in columns if column in (None, chunk.path_in_schema.split(".")[0])
    )
    _check_size(size // max(1, metadata.num_rows), max_bytes)
    num_rows: int = PARQUET_BATCH_BYTES * metadata.num_rows // max(1, size)
    return max(1, min(MAX_PARQUET_BATCH_ROWS, num_rows))


def _rows_to_python(batch: pa.RecordBatch) -> Iterator[Any]:
    for index in range(len(batch)):
        try:
            yield batch.slice(index, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            yield error


def parse_arrow_row(parse_row: RowParser, row: Any) -> Record | BadRecord:
    """Parse a row of Arrow, which has null for every key that another row has."""
    if isinstance(row, UnicodeDecodeError):
        return BadRecord(NOT_UTF8, str(row))
    return parse_row(_drop_nulls(row))


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


def _to_python(values: pa.Array) -> list[object]:
    import pyarrow as pa

    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    arrow_type = values.type
    if pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type) or pa.types.is_string_view(arrow_type):
        values = values.cast(pa.large_binary())
    cells: list[object] = values.to_pylist()
    return cells
