"""Names, hashes and checks of paths."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from pathlib import Path

UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT)
"""Errors that no room on the disk cures."""


def check_can_write(directory: Path, setting: str) -> None:
    """Check that files can be written in a directory, or that it can be created, before the work begins.

    By creating and removing a directory, in it or in its last existing parent: permissions alone do not say it of root
    and of read-only file systems.

    Args:
        setting: begins the error, for example ``output.directory = runs/x``.

    Raises:
        ValueError: they cannot.
    """
    existing = directory
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        raise ValueError(f"{setting} cannot be written: {existing} is not a directory; choose another path")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".diffusionlm-", dir=existing))
    except OSError as error:
        is_full = error.errno not in UNWRITABLE
        remedy = "make room" if is_full else "choose another directory, or make this one writable"
        raise ValueError(f"{setting} cannot be written: {existing}: {error.strerror}; {remedy}") from error


def portable_path(path: str | Path) -> str:
    """Name a path without the folders of this machine, for files that are published: relative to the working directory
    if it is inside, else by its last part."""
    absolute, directory = Path(os.path.abspath(Path(path).expanduser())), Path.cwd()
    if directory in absolute.parents:
        return absolute.relative_to(directory).as_posix()
    return absolute.name


def hash_file(path: Path) -> str:
    """SHA-256 of a file's whole content.

    Raises:
        ValueError: it cannot be read; names it.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
