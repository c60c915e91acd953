"""Checksums of a directory, and directories that appear whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError

from files.atomic import aside_of

MANIFEST = "MANIFEST.json"
WRITE_ERRORS = (OSError, SafetensorError)
"""How a full disk shows itself: safetensors has an error of its own."""
Entries = dict[str, dict[str, str | int]]
"""Size in bytes and SHA-256 of files, by their paths in the directory."""
_THREADS = 4
"""That hash at once when a directory is verified: a file keeps one core busy, and leaves the others free."""


def write_directory(target: Path, write: Callable[[Path], None]) -> None:
    """Make a directory by ``write(folder)``: written aside, fsynced, checksummed, then renamed.

    A process killed at any point leaves either no ``target`` or a complete one; what it wrote aside ends in ``.tmp-*``
    and is removed by `remove_leftovers`. On an error the part written is removed at once.

    Raises:
        ValueError: it could not be written (a full disk, say); names the directory and the space left.
    """
    aside = aside_of(target)
    try:
        aside.mkdir(parents=True)
        write(aside)
        seal(aside, target, entries_of(aside, files_in(aside)))
    except WRITE_ERRORS as error:
        raise ValueError(f"{target} was not written: {with_room(error, target)}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def files_in(folder: Path) -> list[Path]:
    """All files of a directory and those below it, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def entries_of(folder: Path, files: Collection[Path]) -> Entries:
    """What the manifest of a folder says of files in it. They are on the disk then, not only on their way there."""

    for path in files:
        _fsync(path)
    return {path.relative_to(folder).as_posix(): _entry(path) for path in files}


def seal(aside: Path, target: Path, entries: Entries) -> None:
    """Write the manifest of what lies aside, and give it its name.

    Raises:
        OSError: it could not be written, or there is a ``target``.
    """
    text = json.dumps({"files": dict(sorted(entries.items()))}, indent=1) + "\n"
    (aside / MANIFEST).write_text(text, encoding="utf-8")
    folders = [path for path in aside.rglob("*") if path.is_dir()]
    for path in [aside / MANIFEST, *folders, aside]:
        _fsync(path)
    os.rename(aside, target)
    _fsync(target.parent)


def with_room(error: Exception, target: Path) -> str:
    """An error of writing, with the space that is left there."""
    if not isinstance(error, WRITE_ERRORS):
        return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    free = shutil.disk_usage(_existing(target.parent)).free / 2**20
    return f"{error} ({free:,.0f} MiB are free there; make room)"


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
    named = {directory / name: says for name, says in sums.items() if only is None or name in only}
    for file, (size, _) in named.items():
        if not file.is_file():
            raise ValueError(f"{file} is missing, though the manifest beside it names it")
        if file.stat().st_size != size:
            raise ValueError(f"{file} has {file.stat().st_size} bytes, the manifest says {size}")
    with ThreadPoolExecutor(_THREADS) as pool:
        for (file, (_, checksum)), found in zip(named.items(), pool.map(_checksum, named), strict=True):
            if found != checksum:
                raise ValueError(f"{file} is damaged: its checksum is not the manifest's")


def remove_leftovers(folder: Path) -> None:
    """Remove what interrupted writers left aside in a folder."""
    for path in folder.glob("*.tmp-*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def replace_link(link: Path, target: str) -> None:
    """Point a symbolic link somewhere, in one step."""
    aside = aside_of(link)
    try:
        aside.symlink_to(target)
        os.replace(aside, link)
    finally:
        aside.unlink(missing_ok=True)


def _entry(path: Path) -> dict[str, str | int]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _checksum(path: Path) -> str:
    try:
        return str(_entry(path)["sha256"])
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
