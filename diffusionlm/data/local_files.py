"""Files on this machine as a source of documents: JSON, plain text and Parquet, plain or compressed."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from config.data import LocalFiles, PythonStdlib
from diffusionlm.data.file_formats import (
    DECOMPRESSORS,
    CorruptFileError,
    detect_compression,
    json_records,
    parquet_records,
    read_plain_records,
)
from diffusionlm.data.reader import ReaderPosition, Split
from diffusionlm.data.record_source import BadRecord, ParsedRecord, RecordSource, SampleBy

FINGERPRINT_BYTES = 1 << 16
"""Bytes at each end of a file that tell it from another one."""


def find_files(patterns: tuple[str, ...], key: str) -> list[Path]:
    """All files that the patterns name, sorted, each once; directories with everything below them that is not hidden.

    Symbolic links to directories are followed where a pattern names them, and not below.

    Raises:
        ValueError: a pattern that matches no file, or a directory that cannot be read.
    """
    found: set[Path] = set()
    for pattern in patterns:
        literal = Path(os.path.expanduser(pattern))  # a name may hold what looks like a glob
        matches = [literal] if literal.exists() else map(Path, glob.glob(str(literal), recursive=True))
        files = [path for match in matches for path in _expand_directory(match, key)]
        if not files:
            what = "is a directory without files" if literal.is_dir() else "matches no file"
            raise ValueError(f"{key}: {pattern!r} {what}; paths are relative to {Path.cwd()}")
        found.update(path.absolute() for path in files)
    return sorted(found)


def _expand_directory(match: Path, key: str) -> Iterator[Path]:
    """The file itself, or those below a directory."""
    if not match.is_dir():
        yield match
        return

    def raise_unreadable(error: OSError) -> None:
        raise ValueError(f"{key}: {error.filename} cannot be read ({error.strerror})") from error

    for folder, folders, names in os.walk(match, onerror=raise_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


@dataclass(frozen=True)
class FileFingerprint:
    """A file as it was when it was found."""

    path: Path
    size: int
    """Bytes."""
    modified_ns: int
    """Time in ns."""
    ends_sha256: str
    """Digest of its beginning and its end: whole files may be too large to read twice."""

    @classmethod
    def of(cls, path: Path, key: str) -> FileFingerprint:
        """What is there now.

        Raises:
            ValueError: it cannot be read.
        """
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                ends_sha256 = hashlib.sha256(file.read(FINGERPRINT_BYTES))
                file.seek(max(0, status.st_size - FINGERPRINT_BYTES))
                ends_sha256.update(file.read(FINGERPRINT_BYTES))
        except OSError as error:
            raise ValueError(f"{key}: {path} cannot be read ({error.strerror})") from error
        return cls(path, status.st_size, status.st_mtime_ns, ends_sha256.hexdigest())

    @property
    def identity(self) -> str:
        """Name, size and content as far as it is known; the same in another place."""
        return f"{self.path.name} {self.size} {self.ends_sha256}"

    def check(self, key: str) -> None:
        """That it is still what it was.

        Raises:
            ValueError: it is gone, or has changed; that it was only touched does not matter.
        """
        try:
            status = self.path.stat()
        except OSError as error:
            raise ValueError(f"{key}: {self.path} was there, and cannot be read now ({error.strerror})") from error
        if (status.st_size, status.st_mtime_ns) == (self.size, self.modified_ns):
            return
        now = FileFingerprint.of(self.path, key)
        if now.identity != self.identity:
            raise ValueError(
                f"{key}: {self.path} has changed since it was opened ({self.size:,} bytes then, {now.size:,} now); "
                "put it back, or start a new run"
            )


TextFileFormat = Literal["json", "text", "parquet"]


FORMATS: dict[str, TextFileFormat] = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".parquet": "parquet"}


TEXT_ENDINGS = {".txt", ".text", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".java", ".js", ".ts", ".html", ".tex"}


def open_local_files(config: LocalFiles, split: Split) -> RecordSource:
    """The documents of a split; a hash of its text decides where a document belongs if there are no files for it.

    Raises:
        ValueError: a pattern without files, or a file that is empty, unreadable or of an unknown format.
    """
    validation, separate = split == "validation", bool(config.validation_paths)
    key = "data.source.validation_paths" if validation and separate else "data.source.paths"
    patterns = config.validation_paths if validation and separate else config.paths
    files = _find_data_files(config, patterns, key)
    empty = [file for file in files if file.found.size == 0]
    # One of plain text is an empty document; of the other formats it is a loss.
    lost = [file for file in empty if file.format != "text"]
    if len(empty) == len(files) or (lost and config.on_bad_row == "raise"):
        remedy = ', or set data.source.on_bad_row = "skip"' if len(empty) < len(files) else ""
        raise ValueError(
            f"{key}: empty file {', '.join(str(file.found.path) for file in empty[:5])}; remove it, name others{remedy}"
        )
    files = [file for file in files if file not in lost]
    validation_fraction = None if separate else config.validation_fraction
    max_documents = None if validation else config.max_documents
    how = [validation_fraction, max_documents, config.on_bad_row, config.text_field, config.sample_by]
    lines = [f"{file.format} {file.found.identity}" for file in files]
    digest = hashlib.sha256("\n".join([json.dumps(how), *lines]).encode("utf-8", "surrogateescape"))
    return RecordSource(
        LocalFileRecords(files, key, config.text_field, config.sample_by),
        identity=f"files/{split}/{digest.hexdigest()[:16]}",
        provenance=_provenance(files, patterns),
        on_bad_row=config.on_bad_row,
        max_documents=max_documents,
        validation_fraction=validation_fraction,
        is_validation=validation,
        skipped={"empty file": len(lost)} if lost else {},
    )


def detect_format(path: Path) -> TextFileFormat | None:
    """json, text or parquet, by the ending; None where it says nothing."""
    endings = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in DECOMPRESSORS]
    ending = endings[-1] if endings else ""
    return "text" if ending in TEXT_ENDINGS else FORMATS.get(ending)


@dataclass(frozen=True)
class DataFile:
    """A file and how it is read."""

    found: FileFingerprint
    format: TextFileFormat

    @property
    def kind(self) -> str:
        """Format and compression, for people."""
        ending = detect_compression(self.found.path)
        return f"{self.format} ({ending[1:]})" if ending else self.format


def _find_data_files(config: LocalFiles, patterns: tuple[str, ...], key: str) -> list[DataFile]:
    """The files, all with fields or all without: plain text that lies beside other data is hardly meant to be read."""
    files: list[DataFile] = []
    for path in find_files(patterns, key):
        kind = detect_format(path) if config.format == "auto" else config.format
        if kind is None:
            raise ValueError(
                f"{key}: cannot tell the format of {path} by its ending; name the other files alone, or set "
                "data.source.format to json, text or parquet"
            )
        if kind == "parquet" and detect_compression(path) is not None:
            raise ValueError(f"{key}: {path} cannot be read inside of its archive; unpack it: Parquet is compressed")
        files.append(DataFile(FileFingerprint.of(path, key), kind))
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
class LocalFileRecords:
    """What several files hold, one file after the other."""

    files: list[DataFile]
    config_key: str
    text_field: str
    sample_by: SampleBy

    def cursor(self, place: dict[str, int] | None) -> LocalFileCursor:
        """Reads on from a file, a place in it, and the number of lines before."""
        return LocalFileCursor(self, **(place or {}))

    def key(self, *, is_field_error: bool) -> str:
        """The config's key of the field, or of the files."""
        return f"data.source.text_field = {self.text_field!r}" if is_field_error else self.config_key

    def of(self, file: DataFile, at: int, line: int) -> Iterator[ParsedRecord]:
        """What one file holds from a place on."""
        match file.format:
            case "json":
                return json_records(file.found.path, self.text_field, at, line)
            case "text":
                return read_plain_records(file.found.path, self.sample_by, at, line)
            case "parquet":
                return parquet_records(file.found.path, self.text_field, at)


@dataclass
class LocalFileCursor:
    """A place in the files: behind the record given last."""

    records: LocalFileRecords
    file: int = 0
    at: int = 0
    """In the file: bytes, characters or rows, as its format counts."""
    line: int = 0
    """Lines, or rows, of the file up to there."""

    def __iter__(self) -> Iterator[str | BadRecord]:
        while self.file < len(self.records.files):
            file = self.records.files[self.file]
            file.found.check(self.records.config_key)
            try:
                for record in self.records.of(file, self.at, self.line):
                    content, self.at, self.line = record
                    yield content
            except CorruptFileError as damage:
                self.at += 1  # a record of its own
                yield BadRecord(damage.reason, damage.found)
            except OSError as error:
                path = file.found.path
                raise ValueError(f"{self.records.config_key}: {path} cannot be read on ({error.strerror})") from error
            self.file, self.at, self.line = self.file + 1, 0, 0

    def place(self) -> dict[str, int]:
        return {"file": self.file, "at": self.at, "line": self.line}

    def sort_key(self) -> tuple[int, ...]:
        return self.file, self.at

    def location(self) -> str:
        file = self.records.files[self.file]
        unit = "row" if file.format == "parquet" else "line"
        return f"{file.found.path}, {unit} {self.line}" if self.line else str(file.found.path)


EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "encodings", "pydoc_data", "test", "tests", "idle_test"}
)
"""Not the library's own text, tables, and tests."""


@dataclass
class StdlibSource:
    """Python files of the standard library, in sorted order; a file is a document."""

    root: Path
    paths: list[Path]
    identity: str
    provenance: str
    skipped: dict[str, int]

    @classmethod
    def open(cls, config: PythonStdlib, split: Split) -> StdlibSource:
        """The files of one split; which it is depends on the file's path inside the library alone."""
        root = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(
            path
            for path in root.rglob("*.py")
            if EXCLUDED_FOLDERS.isdisjoint(path.relative_to(root).parts[:-1]) and path.stat().st_size > 0
        )
        chosen, skipped, digest, size = list[Path](), dict[str, int](), hashlib.sha256(), 0
        for path in files:
            name = path.relative_to(root).as_posix()
            if _is_one_in(name, config.validation_share) != (split == "validation"):
                continue
            content = path.read_bytes()
            try:
                content.decode("utf-8")
            except UnicodeDecodeError:
                skipped["not UTF-8"] = skipped.get("not UTF-8", 0) + 1
                continue
            chosen.append(path)
            size += len(content)
            digest.update(name.encode() + hashlib.sha256(content).digest())
        if not chosen:
            raise ValueError(f"data.source python-stdlib: no Python files for {split} in {root}")
        identity = f"python-stdlib/{split}/{digest.hexdigest()[:16]}"
        return cls(root, chosen, identity, f"{len(chosen)} files, {size:,} bytes, in {root}", skipped)

    def read(self, epoch: int, position: ReaderPosition, limit: int) -> tuple[list[str], ReaderPosition]:
        """The files from the ``position``-th on."""
        start = position or 0
        documents = [path.read_text(encoding="utf-8") for path in self.paths[start : start + limit]]
        return documents, start + limit if len(documents) == limit else None


def _is_one_in(name: str, share: int) -> bool:
    """True for one name in ``share``, by its hash."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % share == 0
