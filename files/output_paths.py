"""Checks of the paths that a command writes, before its work begins."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT)
"""Errors that no room on the disk cures."""


def check_can_write(directory: Path, setting: str) -> None:
    """Check that files can be written in a directory, or that it can be created.

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
