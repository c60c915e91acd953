"""Files that patterns name, and what is remembered of them."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
