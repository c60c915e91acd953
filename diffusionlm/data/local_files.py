"""Files on this machine as a source of documents: JSON, plain text and Parquet, plain or compressed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from config.data import LocalFiles
from diffusionlm.data.bytestreams import DECOMPRESSORS, DamagedFile, compression_of
from diffusionlm.data.file_formats import json_records
from diffusionlm.data.found_files import FoundFile, find_files
from diffusionlm.data.reader import Split
from diffusionlm.data.record_source import WrittenSource
from diffusionlm.data.records import Fault, Record, SampleBy, plain_records

Format = Literal["json", "text", "parquet"]

FORMATS: dict[str, Format] = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".parquet": "parquet"}
TEXT_ENDINGS = {".txt", ".text", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".java", ".js", ".ts", ".html", ".tex"}


def open_files(config: LocalFiles, split: Split) -> WrittenSource:
    """The documents of a split; a hash of its text decides where a document belongs if there are no files for it.

    Raises:
        ValueError: a pattern without files, or a file that is empty, unreadable or of an unknown format.
    """
    validation, separate = split == "validation", bool(config.validation_paths)
    key = "data.source.validation_paths" if validation and separate else "data.source.paths"
    patterns = config.validation_paths if validation and separate else config.paths
    files = _data_files(config, patterns, key)
    empty = [file for file in files if file.found.size == 0]
    # One of plain text is an empty document; of the other formats it is a loss.
    lost = [file for file in empty if file.format != "text"]
    if len(empty) == len(files) or (lost and config.on_bad_row == "raise"):
        remedy = ', or set data.source.on_bad_row = "skip"' if len(empty) < len(files) else ""
        raise ValueError(
            f"{key}: empty file {', '.join(str(file.found.path) for file in empty[:5])}; remove it, name others{remedy}"
        )
    files = [file for file in files if file not in lost]
    fraction = None if separate else config.validation_fraction
    max_documents = None if validation else config.max_documents
    how = [fraction, max_documents, config.on_bad_row, config.text_field, config.sample_by]
    lines = [f"{file.format} {file.found.identity}" for file in files]
    digest = hashlib.sha256("\n".join([json.dumps(how), *lines]).encode("utf-8", "surrogateescape"))
    return WrittenSource(
        FileRecords(files, key, config.text_field, config.sample_by),
        identity=f"files/{split}/{digest.hexdigest()[:16]}",
        provenance=_provenance(files, patterns),
        on_bad_row=config.on_bad_row,
        max_documents=max_documents,
        fraction=fraction,
        wants_validation=validation,
        skipped={"empty file": len(lost)} if lost else {},
    )


def format_of(path: Path) -> Format | None:
    """json, text or parquet, by the ending; None where it says nothing."""
    endings = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in DECOMPRESSORS]
    ending = endings[-1] if endings else ""
    return "text" if ending in TEXT_ENDINGS else FORMATS.get(ending)


@dataclass(frozen=True)
class DataFile:
    """A file and how it is read."""

    found: FoundFile
    format: Format

    @property
    def kind(self) -> str:
        """Format and compression, for people."""
        ending = compression_of(self.found.path)
        return f"{self.format} ({ending[1:]})" if ending else self.format


def _data_files(config: LocalFiles, patterns: tuple[str, ...], key: str) -> list[DataFile]:
    """The files, all with fields or all without: plain text that lies beside other data is hardly meant to be read."""
    files: list[DataFile] = []
    for path in find_files(patterns, key):
        kind = format_of(path) if config.format == "auto" else config.format
        if kind is None:
            raise ValueError(
                f"{key}: cannot tell the format of {path} by its ending; name the other files alone, or set "
                "data.source.format to json, text or parquet"
            )
        if kind == "parquet" and compression_of(path) is not None:
            raise ValueError(f"{key}: {path} cannot be read inside of its archive; unpack it: Parquet is compressed")
        files.append(DataFile(FoundFile.of(path, key), kind))
    plain = [file for file in files if file.format == "text"]
    if plain and len(plain) < len(files):
        other = next(file for file in files if file.format != "text")
        raise ValueError(
            f"{key}: {plain[0].found.path} is plain text and {other.found.path} is {other.format}; name the files that "
            "are meant, make each kind a source of its own in [[data.mixture]], or set data.source.format"
        )
    return files


def _provenance(files: Sequence[DataFile], patterns: tuple[str, ...]) -> str:
    size = sum(file.found.size for file in files)
    kinds = " and ".join(sorted({file.kind for file in files}))
    count = "1 file" if len(files) == 1 else f"{len(files):,} files"
    return f"{count}, {size:,} bytes, {kinds}, of {', '.join(patterns)}"


@dataclass(frozen=True)
class FileRecords:
    """What several files hold, one file after the other."""

    files: list[DataFile]
    patterns_key: str
    text_field: str
    sample_by: SampleBy

    def cursor(self, place: dict[str, int] | None) -> FileCursor:
        """Reads on from a file, a place in it, and the number of lines before."""
        return FileCursor(self, **(place or {}))

    def key(self, *, in_field: bool) -> str:
        """The config's key of the field, or of the files."""
        return f"data.source.text_field = {self.text_field!r}" if in_field else self.patterns_key

    def of(self, file: DataFile, at: int, line: int) -> Iterator[Record]:
        """What one file holds from a place on."""
        match file.format:
            case "json":
                return json_records(file.found.path, self.text_field, at, line)
            case "text":
                return plain_records(file.found.path, self.sample_by, at, line)
            case "parquet":
                from diffusionlm.data.parquet_records import parquet_records

                return parquet_records(file.found.path, self.text_field, at)


@dataclass
class FileCursor:
    """A place in the files: behind the record given last."""

    records: FileRecords
    file: int = 0
    at: int = 0
    """In the file: bytes, characters or rows, as its format counts."""
    line: int = 0
    """Lines, or rows, of the file up to there."""

    def __iter__(self) -> Iterator[str | Fault]:
        while self.file < len(self.records.files):
            file = self.records.files[self.file]
            file.found.check(self.records.patterns_key)
            try:
                for record in self.records.of(file, self.at, self.line):
                    content, self.at, self.line = record
                    yield content
            except DamagedFile as damage:
                self.at += 1  # a record of its own
                yield Fault(damage.reason, damage.found)
            except OSError as error:
                path = file.found.path
                raise ValueError(f"{self.records.patterns_key}: {path} cannot be read on ({error.strerror})") from error
            self.file, self.at, self.line = self.file + 1, 0, 0

    def place(self) -> dict[str, int]:
        return {"file": self.file, "at": self.at, "line": self.line}

    def order(self) -> tuple[int, ...]:
        return self.file, self.at

    def where(self) -> str:
        file = self.records.files[self.file]
        unit = "row" if file.format == "parquet" else "line"
        return f"{file.found.path}, {unit} {self.line}" if self.line else str(file.found.path)
