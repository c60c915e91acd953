"""Texts of a column of Parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from diffusionlm.data.bytestreams import CorruptFileError
from diffusionlm.data.records import ParsedRecord, validate_text

BATCH_BYTES = 4 << 20
"""Text that is decoded at once, where the rows of a group are alike."""
MOST_BATCH_ROWS = 1_024


def parquet_records(path: Path, column: str, at: int) -> Iterator[ParsedRecord]:
    """The cells of a column; places are rows. Other columns are not read.

    Raises:
        ValueError: there is no such column; lists those there are.
        CorruptFileError: the file is none, or cannot be read on.
    """
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
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        values = values.cast(pa.large_binary())
    cells: list[object] = values.to_pylist()
    return cells
