"""Small files that are replaced whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path


def aside_of(path: Path) -> Path:
    """A new name beside it, ``NAME.tmp-XXXXXXXX``, to be written first and renamed then."""
    return path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")


def replace_text(path: Path, text: str) -> None:
    """As `replace_bytes`, in UTF-8; line ends stay as they are."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Write aside, wait for the disk, rename: whoever reads sees the old file or the new one, also after a power cut.

    Raises:
        OSError: it cannot be written, names it; what was there is as it was, and nothing lies beside it.
    """
    aside = aside_of(path)
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # not the name that nobody asked for
        raise
    finally:
        with contextlib.suppress(OSError):  # which would hide the error that matters
            aside.unlink(missing_ok=True)
