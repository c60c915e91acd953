"""Checksums of a directory, and directories that appear whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Collection
from pathlib import Path

from safetensors import SafetensorError

MANIFEST = "MANIFEST.json"


def write_directory(target: Path, write: Callable[[Path], None]) -> None:
    """Make a directory by ``write(folder)``: written aside, fsynced, checksummed, then renamed.

    A process killed at any point leaves either no ``target`` or a complete one; what it wrote aside ends in ``.tmp-*``
    and is removed by `remove_leftovers`. On an error the part written is removed at once.

    Raises:
        ValueError: it could not be written (a full disk, say); names the directory and the space left.
    """
    aside = target.with_name(f"{target.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        aside.mkdir(parents=True)
        write(aside)
        files = sorted(path for path in aside.rglob("*") if path.is_file())
        entries = {path.relative_to(aside).as_posix(): _entry(path) for path in files}
        (aside / MANIFEST).write_text(json.dumps({"files": entries}, indent=1) + "\n", encoding="utf-8")
        for path in [*files, aside / MANIFEST, aside]:
            _fsync(path)
        os.rename(aside, target)
        _fsync(target.parent)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
        shutil.rmtree(aside, ignore_errors=True)
        free = shutil.disk_usage(_existing(target.parent)).free / 2**20
        raise ValueError(f"{target} was not written: {error} ({free:,.0f} MiB are free there; make room)") from error
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def verify(directory: Path, only: Collection[str] | None = None, *, must_have_manifest: bool = False) -> None:
    """Compare the files with the manifest; a directory without one (from elsewhere) passes, unless it must have one.

    Raises:
        ValueError: a file is missing, truncated or changed; names it.
    """
    path = directory / MANIFEST
    if not path.is_file():
        if must_have_manifest:
            raise ValueError(f"{path} is missing: the directory is not complete")
        return
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["files"]
        sums = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: damaged manifest: {error!r}") from error
    for name, (size, checksum) in sums.items():
        if only is not None and name not in only:
            continue
        file = directory / name
        if not file.is_file():
            raise ValueError(f"{file} is missing, though the manifest beside it names it")
        if file.stat().st_size != size:
            raise ValueError(f"{file} has {file.stat().st_size} bytes, the manifest says {size}")
        try:
            found = _entry(file)["sha256"]
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error}") from error
        if found != checksum:
            raise ValueError(f"{file} is damaged: its checksum is not the manifest's")


def remove_leftovers(folder: Path) -> None:
    """Remove what interrupted writers left aside in a folder."""
    for path in folder.glob("*.tmp-*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    aside = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        aside.write_text(text, encoding="utf-8")
        _fsync(aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _entry(path: Path) -> dict[str, str | int]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
