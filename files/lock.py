"""An exclusive lock on a directory: an advisory ``flock`` on its file ``.lock``, which ends with the process."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

LOCK_FILE = ".lock"
POLL_SECONDS = 0.05


class DirectoryInUseError(OSError):
    """Another process holds the lock of the directory."""


@contextlib.contextmanager
def lock_directory(path: Path, timeout_seconds: float = 0.0) -> Iterator[int]:
    """Create ``path`` if it is missing and hold its lock for the duration of the block.

    Yields:
        The file descriptor of the lock. A process that inherits it holds the lock until it ends as well.

    Raises:
        DirectoryInUseError: another process still holds the lock after ``timeout_seconds``.
        OSError: the directory or its lock file cannot be created.
    """
    path.mkdir(parents=True, exist_ok=True)
    with (path / LOCK_FILE).open("a") as file:
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise DirectoryInUseError(
                        error.errno, "in use by another process; wait for it or stop it", str(path)
                    ) from error
                time.sleep(POLL_SECONDS)
        yield file.fileno()


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
