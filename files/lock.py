"""An exclusive lock on a directory: an advisory ``flock`` on its file ``.lock``, which ends with the process."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

LOCK_FILE = ".lock"


class DirectoryInUseError(OSError):
    """Another process holds the lock of the directory."""


@contextlib.contextmanager
def lock_directory(path: Path) -> Iterator[None]:
    """Create ``path`` if it is missing and hold its lock for the duration of the block.

    Raises:
        DirectoryInUseError: another process holds the lock.
        OSError: the directory or its lock file cannot be created.
    """
    path.mkdir(parents=True, exist_ok=True)
    with (path / LOCK_FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DirectoryInUseError(error.errno, "in use by another process", str(path)) from error
        yield


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of directory ``path``. Nothing is created; unreadable means no."""
    try:
        with (path / LOCK_FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
