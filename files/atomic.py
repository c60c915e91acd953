"""Replace files and symbolic links atomically: a reader sees the old version or the new one.

Everything is written beside its target as ``NAME.tmp-XXXXXXXX``, synced to disk and renamed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from pathlib import Path


def temporary_path(path: Path) -> Path:
    """Return a new name beside ``path``, ``NAME.tmp-XXXXXXXX``."""
    return path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")


def remove_temporary_paths(folder: Path) -> None:
    """Remove the temporary files, links and directories that interrupted writers left in ``folder``."""
    for path in folder.glob("*.tmp-*"):
        with contextlib.suppress(OSError):
            remove_path(path)


def remove_path(path: Path) -> None:
    """Remove a file or a directory; of a symbolic link the link alone.

    Raises:
        OSError: it cannot be removed, or only in part.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_to_disk(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text_atomic(path: Path, text: str) -> None:
    """Like `write_bytes_atomic`, for text in UTF-8; line ends are not translated."""
    write_bytes_atomic(path, text.encode())


def write_bytes_atomic(path: Path, content: bytes) -> None:
    """Replace a file atomically and durably: also after a power cut it is the old one or the new one.

    Raises:
        OSError: it cannot be written; names ``path``. No temporary file is left.
    """
    tmp_path = temporary_path(path)
    try:
        with tmp_path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp_path, path)
        sync_to_disk(path.parent)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # not the temporary name, which the caller does not know
        raise
    finally:
        with contextlib.suppress(OSError):  # it would hide the first error
            tmp_path.unlink(missing_ok=True)


def replace_symlink(link: Path, target: str) -> None:
    """Point the symbolic link ``link`` to ``target``, atomically."""
    tmp_path = temporary_path(link)
    try:
        tmp_path.symlink_to(target)
        os.replace(tmp_path, link)
    finally:
        tmp_path.unlink(missing_ok=True)
