"""Sources of local files: text data (plain, JSON, Parquet) and the Python standard library."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from config.data import HubDataset, LocalFiles, PythonStdlib, SampleBy
from diffusionlm.data.chat.conversation import Record
from diffusionlm.data.chat.formats import ChatRowParser
from diffusionlm.data.reader import ReaderPosition, SkipLog, Split
from diffusionlm.data.sources.file_formats import read_json_records, read_parquet_records, read_plain_records
from diffusionlm.data.sources.record_source import (
    NOT_UTF8,
    BadRecord,
    ParsedRecord,
    RecordSource,
    TextField,
    select_split,
)
from diffusionlm.data.sources.validation_split import DocumentSplit
from files.compressed import DECOMPRESSORS, CorruptFileError, check_regular_file, detect_compression
from files.paths import portable_path

FINGERPRINT_BYTES = 1 << 16
"""Bytes at each end of a file that its fingerprint hashes."""

TextFileFormat = Literal["json", "text", "parquet"]

FORMATS: dict[str, TextFileFormat] = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".parquet": "parquet"}
IMAGE_EXTENSIONS = {".png", ".jpg", ".jpeg", ".webp"}
"""Files beside those of conversations, which name them."""
TEXT_EXTENSIONS = {".txt", ".text", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".java", ".js", ".ts", ".html", ".tex"}

EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "encodings", "pydoc_data", "test", "tests", "idle_test"}
)
"""Folders below the standard library with other packages, tables or tests."""


def find_files(patterns: tuple[str, ...], key: str) -> list[Path]:
    """Return all files that the patterns match, sorted and without duplicates.

    A directory stands for all files below it that are not hidden. Symbolic links to directories are followed if a
    pattern matches them, but not below.

    Raises:
        ValueError: a pattern matches no file, or a directory cannot be read.
    """
    paths: set[Path] = set()
    for pattern in patterns:
        literal = Path(os.path.expanduser(pattern))  # a file name may contain glob characters
        matches = [literal] if literal.exists() else map(Path, glob.glob(str(literal), recursive=True))
        files = [path for match in matches for path in _expand_directory(match, key)]
        if not files:
            problem = "is a directory without files" if literal.is_dir() else "matches no file"
            raise ValueError(f"{key}: {pattern!r} {problem}; paths are relative to {Path.cwd()}")
        paths.update(path.absolute() for path in files)
    return sorted(paths)


def _expand_directory(path: Path, key: str) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return

    def raise_unreadable(error: OSError) -> None:
        raise ValueError(f"{key}: {error.filename} cannot be read ({error.strerror})") from error

    for folder, folders, names in os.walk(path, onerror=raise_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


@dataclass(frozen=True)
class DataFile:
    """A file with its size, modification time and a partial hash, to detect changes."""

    path: Path
    format: TextFileFormat | None
    """None: it is not read here."""
    size: int
    """Bytes."""
    modified_ns: int
    ends_sha256: str
    """Hash of the beginning and the end of the file: a whole file may be too large to read twice."""

    @classmethod
    def open(cls, path: Path, key: str, format: TextFileFormat | None = None) -> DataFile:
        """Read the size and the hash of a file.

        Raises:
            ValueError: the file cannot be read; names ``key``.
        """
        try:
            check_regular_file(path)
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                ends_sha256 = hashlib.sha256(file.read(FINGERPRINT_BYTES))
                file.seek(max(0, status.st_size - FINGERPRINT_BYTES))
                ends_sha256.update(file.read(FINGERPRINT_BYTES))
        except OSError as error:
            raise ValueError(f"{key}: {path} cannot be read ({error.strerror})") from error
        return cls(path, format, status.st_size, status.st_mtime_ns, ends_sha256.hexdigest())

    @property
    def identity(self) -> str:
        """Name, size and hash; the same for a copy in another directory."""
        return f"{self.path.name} {self.size} {self.ends_sha256}"

    def check(self, key: str) -> None:
        """Check that the file has not changed; a new modification time alone is accepted.

        Raises:
            ValueError: the file is missing or has changed.
        """
        try:
            status = self.path.stat()
        except OSError as error:
            raise ValueError(f"{key}: {self.path} can no longer be read ({error.strerror}); restore it") from error
        if (status.st_size, status.st_mtime_ns) == (self.size, self.modified_ns):
            return
        current = DataFile.open(self.path, key)
        if current.identity != self.identity:
            raise ValueError(
                f"{key}: {self.path} has changed since it was opened ({self.size:,} bytes then, {current.size:,} "
                "now); restore it, or start a new run"
            )


def open_local_files(config: LocalFiles, split: Split, key: str) -> RecordSource:
    """Open the documents of a split. Without `validation_paths`, `choose_split` holds out validation text.

    Raises:
        ValueError: a pattern matches no file, a file is empty, unreadable or of an unknown format, or the text is too
            short to hold out a part of it; or as `select_split`.
    """
    is_validation, has_own_paths = split == "validation", bool(config.validation_paths)
    name = "validation_paths" if is_validation and has_own_paths else "paths"
    patterns = config.validation_paths if is_validation and has_own_paths else config.paths
    files = _find_data_files(config, patterns, name, key)
    # An empty plain-text file is an empty document; an empty file of another format is an error.
    empty = [file for file in files if file.size == 0]
    invalid = [file for file in empty if file.format != "text"]
    if len(empty) == len(files) or (invalid and config.on_bad_row == "raise"):
        remedy = f', or set {key}.on_bad_row = "skip"' if len(empty) < len(files) else ""
        names = ", ".join(str(file.path) for file in empty[:5])
        raise ValueError(f"{key}.{name}: empty file {names}; remove it, name other files{remedy}")
    files = [file for file in files if file not in invalid]
    skip_log = SkipLog()
    for file in invalid:
        skip_log.add("empty file", str(file.path))
    validation_fraction = None if has_own_paths else config.validation_fraction
    max_documents = None if is_validation else config.max_documents
    field, field_setting = select_field(config, key)
    records = LocalFileRecords(files, f"{key}.{name}", field_setting, field, config.sample_by, config.max_record_bytes)
    document_split = select_split(records, config, validation_fraction, is_validation, f"{key}.{name}")
    options = [validation_fraction, max_documents, config.on_bad_row, config.text_field, config.sample_by]
    options = list_identifying_options(options, config, document_split)
    lines = [f"{file.format} {file.identity}" for file in files]
    digest = hashlib.sha256("\n".join([json.dumps(options), *lines]).encode("utf-8", "surrogateescape"))
    identity, size = f"files/{split}/{digest.hexdigest()[:16]}", sum(file.size for file in files)
    formats = " and ".join(sorted({str(file.format) for file in files}))
    provenance = f"{len(files):,} files, {size:,} bytes, {formats}, of {', '.join(map(portable_path, patterns))}"
    if document_split.description:
        provenance += f"; {document_split.description}"
    return RecordSource(records, key, config.on_bad_row, document_split, max_documents, identity, provenance, skip_log)


def select_field(config: LocalFiles | HubDataset, key: str) -> tuple[TextField, str]:
    """Return the text field of records, or what parses their conversations, and its config key (and value)."""
    if config.chat is None:
        return config.text_field, f"{key}.text_field = {config.text_field!r}"
    return ChatRowParser(config.chat), f"{key}.chat"


def list_identifying_options(
    options: list[Any], config: LocalFiles | HubDataset, document_split: DocumentSplit
) -> list[Any]:
    """Return the options that change the documents, for the identity of a source."""
    chat = [] if config.chat is None else [config.chat.identity]
    return [*options, *chat, *(["ends"] if document_split.description else [])]


def _find_data_files(config: LocalFiles, patterns: tuple[str, ...], name: str, key: str) -> list[DataFile]:
    """Find the files and their formats. Plain text beside other formats is an error: it is probably a README."""
    files: list[DataFile] = []
    for path in find_files(patterns, f"{key}.{name}"):
        if config.chat is not None and path.suffix.lower() in IMAGE_EXTENSIONS:
            continue
        file_format = detect_format(path) if config.format == "auto" else config.format
        if file_format is None:
            raise ValueError(
                f"{key}.{name}: the extension of {path} does not identify its format; leave the file out, or set "
                f"{key}.format to json, text or parquet"
            )
        if file_format == "parquet" and detect_compression(path) is not None:
            raise ValueError(
                f"{key}.{name}: {path} is Parquet in an archive, which cannot be read; unpack it (Parquet is "
                "compressed)"
            )
        files.append(DataFile.open(path, f"{key}.{name}", file_format))
    plain = [file for file in files if file.format == "text"]
    if plain and config.chat is not None:
        raise ValueError(
            f"{key}.{name}: {plain[0].path} is plain text, and {key}.chat reads conversations from JSON or Parquet: "
            "leave the file out, or remove chat"
        )
    if plain and len(plain) < len(files):
        structured = next(file for file in files if file.format != "text")
        raise ValueError(
            f"{key}.{name}: {plain[0].path} is plain text and {structured.path} is {structured.format}; leave out one "
            f"kind, make each kind a source of its own in [[data.mixture]], or set {key}.format"
        )
    return files


def detect_format(path: Path) -> TextFileFormat | None:
    """Return the format that the file name extension stands for; None: unknown."""
    extensions = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in DECOMPRESSORS]
    extension = extensions[-1] if extensions else ""
    return "text" if extension in TEXT_EXTENSIONS else FORMATS.get(extension)


@dataclass
class LocalFileRecords:
    """A `RecordCursor` of several files, one after the other. The names of its position are part of checkpoints."""

    files: list[DataFile]
    key: str
    field_setting: str
    field: TextField
    sample_by: SampleBy
    max_record_bytes: int
    file: int = 0
    at: int = 0
    """Offset after the last record: bytes, characters or rows, as the file's format counts."""
    line: int = 0
    """Number of lines or rows before ``at``."""

    def seek(self, position: dict[str, int] | None) -> None:
        position = position or {"file": 0, "at": 0, "line": 0}
        self.file, self.at, self.line = position["file"], position["at"], position["line"]

    def _read_file(self, file: DataFile) -> Iterator[ParsedRecord]:
        """Read the records of one file from the position on."""
        max_bytes = self.max_record_bytes
        field = self.field if isinstance(self.field, str) else partial(self.field, folder=file.path.parent)
        match file.format:
            case "json":
                return read_json_records(file.path, field, self.at, self.line, max_bytes)
            case "text":
                return read_plain_records(file.path, self.sample_by, self.at, self.line, max_bytes)
            case _:
                return read_parquet_records(file.path, field, self.at, self.field_setting, max_bytes)

    def __iter__(self) -> Iterator[Record | BadRecord]:
        while self.file < len(self.files):
            file = self.files[self.file]
            file.check(self.key)
            try:
                for content, self.at, self.line in self._read_file(file):  # noqa: B020
                    yield content
            except CorruptFileError as error:
                self.at += 1  # the corrupt rest of the file counts as one record
                yield BadRecord(error.reason, error.detail)
            except OSError as error:
                raise ValueError(f"{self.key}: {file.path} cannot be read ({error.strerror})") from error
            self.file, self.at, self.line = self.file + 1, 0, 0

    def position(self) -> dict[str, int]:
        return {"file": self.file, "at": self.at, "line": self.line}

    def sort_key(self) -> tuple[int, ...]:
        return self.file, self.at

    def location(self) -> str:
        file = self.files[self.file]
        unit = "row" if file.format == "parquet" else "line"
        return f"{file.path}, {unit} {self.line}" if self.line else str(file.path)


class StdlibSource:
    """The Python files of the standard library in sorted order; each file is a document.

    A hash of its path inside the library assigns a file to a split.

    Raises:
        ValueError: there are no such files.
    """

    def __init__(self, config: PythonStdlib, split: Split, key: str) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        self.paths: list[Path] = []
        self.skip_log = SkipLog()
        digest, size = hashlib.sha256(), 0
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root)
            is_excluded = not EXCLUDED_FOLDERS.isdisjoint(name.parts[:-1]) or path.stat().st_size == 0
            name_hash = int.from_bytes(hashlib.sha256(name.as_posix().encode()).digest()[:8], "big")
            if is_excluded or (name_hash % config.validation_share == 0) != (split == "validation"):
                continue
            content = path.read_bytes()
            self.skip_log.total += 1
            try:
                content.decode("utf-8")
            except UnicodeDecodeError:
                self.skip_log.add(NOT_UTF8, str(path))
                continue
            self.paths.append(path)
            size += len(content)
            digest.update(name.as_posix().encode() + hashlib.sha256(content).digest())
        if not self.paths:
            raise ValueError(f"{key}: python-stdlib has no {split} files in {root}; use another source")
        self.identity = f"python-stdlib/{split}/{digest.hexdigest()[:16]}"
        self.provenance = f"{len(self.paths)} files, {size:,} bytes, in {portable_path(root)}"

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[str], ReaderPosition]:
        start = position or 0
        documents = [path.read_text(encoding="utf-8") for path in self.paths[start : start + limit]]
        return documents, start + limit if len(documents) == limit else None
