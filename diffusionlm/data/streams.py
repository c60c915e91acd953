"""Local files and datasets of the Hub, as unshuffled streams of the ``datasets`` library."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config.data import HubDataset, LocalFiles
from diffusionlm.data.sources import Position, Split

COMPRESSED = {".gz", ".zst", ".bz2", ".xz"}
FORMATS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".parquet": "parquet"}
IDENTITY_BYTES = 1 << 16
TEXT_ENDINGS = {".txt", ".text", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".java", ".js", ".ts", ".html", ".tex"}


@dataclass
class StreamSource:
    """Documents of one split. The stream is never shuffled here: a shuffled one cannot be resumed exactly."""

    stream: Any
    text_field: str
    name: str
    identity: str
    fraction: float | None = None
    """Share of the documents kept for validation, where one stream serves both splits."""
    wants_validation: bool = False
    skipped: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._start = self.stream.state_dict()
        self._iterator: Iterator[dict[str, Any]] | None = None
        self._behind: Position = None

    @classmethod
    def open(cls, config: LocalFiles | HubDataset, split: Split) -> StreamSource:
        """The stream of a split; a hash of its text decides where a document belongs if there is no split for it."""
        validation = split == "validation"
        if isinstance(config, LocalFiles):
            separate = bool(config.validation_paths)
            patterns = config.validation_paths if validation and separate else config.paths
            key = "data.source.validation_paths" if validation and separate else "data.source.paths"
            files = find_files(patterns, key)
            stream, text_field = _open_files(config, files)
            name = ", ".join(patterns)
            identity = _identity(files)
        else:
            separate = config.validation_split is not None
            stream = _open_hub(config, (config.validation_split if validation else None) or config.train_split)
            name, text_field = config.dataset, config.text_field
            identity = (
                f"hub/{config.dataset}/{config.config}/{config.revision}/{config.train_split}/{config.text_field}"
            )
        return cls(
            stream,
            text_field,
            name,
            f"{identity}/{split}",
            fraction=None if separate else config.validation_fraction,
            wants_validation=validation,
        )

    def read(self, epoch: int, position: Position, limit: int) -> tuple[list[str], Position]:
        """Documents from a state of the stream on; going on where the last call stopped costs no seek."""
        if self._iterator is None or position != self._behind or position is None:
            self.stream.load_state_dict(self._start if position is None else position)
            self._iterator = iter(self.stream)
        documents: list[str] = []
        while len(documents) < limit:
            row = self._next(self._iterator)
            if row is None:
                self._iterator = None
                return documents, None
            text = self._text(row, count=epoch == 0)
            if text and self._belongs(text):
                documents.append(text)
        self._behind = self.stream.state_dict()
        return documents, self._behind

    def _next(self, iterator: Iterator[dict[str, Any]]) -> dict[str, Any] | None:
        try:
            return next(iterator, None)
        except Exception as error:  # the library raises whatever its reader does: Arrow, Unicode, OS errors
            raise ValueError(f"data.source: cannot read on in {self.name}: {error}") from error

    def _text(self, row: dict[str, Any], *, count: bool) -> str | None:
        if self.text_field not in row:
            raise ValueError(
                f"data.source.text_field = {self.text_field!r} is not a field of {self.name}; "
                f"its fields are {', '.join(map(repr, row))}"
            )
        text: object = row[self.text_field]
        if text and isinstance(text, str):
            return text
        if text:
            raise ValueError(
                f"data.source.text_field = {self.text_field!r} of {self.name} holds {type(text).__name__}, not text"
            )
        if count:
            self.skipped["empty"] = self.skipped.get("empty", 0) + 1
        return None

    def _belongs(self, text: str) -> bool:
        if self.fraction is None:
            return True
        place = int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64
        return (place < self.fraction) == self.wants_validation


def find_files(patterns: tuple[str, ...], key: str) -> list[Path]:
    """All files that the patterns name, sorted; directories with everything below them.

    Raises:
        ValueError: a pattern that matches no file, or an empty file.
    """
    found: set[Path] = set()
    for pattern in patterns:
        literal = Path(pattern)  # a name may hold what looks like a glob
        matches = [literal] if literal.exists() else [Path(match) for match in glob.glob(pattern, recursive=True)]
        files = [path for path in matches if path.is_file()]
        for folder in (path for path in matches if path.is_dir()):
            files += [path for path in folder.rglob("*") if path.is_file() and not _is_hidden(path.relative_to(folder))]
        if not files:
            raise ValueError(f"{key}: {pattern!r} matches no file; paths are relative to {Path.cwd()}")
        found.update(files)
    empty = [str(path) for path in sorted(found) if path.stat().st_size == 0]
    if empty:
        raise ValueError(f"{key}: empty file {', '.join(empty)}; remove it or name the others")
    return sorted(found)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def format_of(path: Path) -> str | None:
    """json, text or parquet, by the ending; None where it says nothing."""
    suffixes = [suffix for suffix in path.suffixes if suffix not in COMPRESSED]
    ending = suffixes[-1].lower() if suffixes else ""
    return "text" if ending in TEXT_ENDINGS else FORMATS.get(ending)


def _open_files(config: LocalFiles, files: list[Path]) -> tuple[Any, str]:
    """The stream of the files, and the name of its text column."""
    import datasets

    formats = {config.format} if config.format != "auto" else {format_of(path) for path in files}
    if len(formats) != 1 or None in formats:
        odd = next((path for path in files if format_of(path) is None), files[0])
        raise ValueError(
            f"data.source.paths: cannot tell one format for all files (for example {odd}); "
            "set data.source.format to json, text or parquet"
        )
    kind = formats.pop()
    options = {"sample_by": config.sample_by} if kind == "text" else {}
    names = [glob.escape(str(path)) for path in files]
    try:
        stream = datasets.load_dataset(kind, data_files={"train": names}, split="train", streaming=True, **options)
    except Exception as error:  # it reads the first file: Arrow, Unicode, OS, end-of-file errors
        raise ValueError(f"data.source.paths: cannot read {', '.join(map(str, files[:5]))}: {error!r}") from error
    return stream, "text" if kind == "text" else config.text_field


def _open_hub(config: HubDataset, split: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(
            config.dataset, config.config, split=split, revision=config.revision, streaming=True
        )
    except Exception as error:  # whatever the Hub client raises: not found, offline, gated, no such split
        raise ValueError(
            f"data.source.dataset = {config.dataset!r}, split {split!r}: cannot be opened: {error}"
        ) from error


def _identity(files: list[Path]) -> str:
    """Names, sizes, and both ends of each file: whole files may be too large to read twice."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(IDENTITY_BYTES))
            file.seek(max(0, size - IDENTITY_BYTES))
            digest.update(file.read(IDENTITY_BYTES))
    return f"files/{digest.hexdigest()[:16]}"
