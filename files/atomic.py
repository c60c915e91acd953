"""Small files that are replaced whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path


def temporary_path(path: Path) -> Path:
    """A new name beside it, ``NAME.tmp-XXXXXXXX``, to be written first and renamed then."""
    return path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")


def write_text_atomic(path: Path, text: str) -> None:
    """As `write_bytes_atomic`, in UTF-8; line ends stay as they are."""
    write_bytes_atomic(path, text.encode())


def write_bytes_atomic(path: Path, content: bytes) -> None:
    """Write aside, wait for the disk, rename: whoever reads sees the old file or the new one, also after a power cut.

    Raises:
        OSError: it cannot be written, names it; what was there is as it was, and nothing lies beside it.
    """
    tmp_path = temporary_path(path)
    try:
        with tmp_path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp_path, path)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # not the name that nobody asked for
        raise
    finally:
        with contextlib.suppress(OSError):  # which would hide the error that matters
            tmp_path.unlink(missing_ok=True)
