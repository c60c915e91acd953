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

from files.atomic import sync_to_disk, temporary_path

MANIFEST = "MANIFEST.json"
WRITE_ERRORS = (OSError, SafetensorError)
"""How a full disk shows itself: safetensors has an error of its own."""
ManifestEntries = dict[str, dict[str, str | int]]
"""Size in bytes and SHA-256 of files, by their paths in the directory."""
_THREADS = 4
"""That hash at once when a directory is verified: a file keeps one core busy, and leaves the others free."""


def write_directory_atomically(target: Path, write: Callable[[Path], None]) -> None:
    """Make a directory by ``write(folder)``: written aside, fsynced, checksummed, then renamed.

    A process killed at any point leaves either no ``target`` or a complete one; what it wrote aside ends in ``.tmp-*``
    and is removed by `remove_temporary_paths`. On an error the part written is removed at once.

    Raises:
        ValueError: it could not be written (a full disk, say); names the directory and the space left.
    """
    tmp_path = temporary_path(target)
    try:
        tmp_path.mkdir(parents=True)
        write(tmp_path)
        publish_directory(tmp_path, target, make_manifest_entries(tmp_path, list_files(tmp_path)))
    except WRITE_ERRORS as error:
        raise ValueError(f"{target} was not written: {format_write_error(error, target)}") from error
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)


def list_files(folder: Path) -> list[Path]:
    """All files of a directory and those below it, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def make_manifest_entries(folder: Path, files: Collection[Path]) -> ManifestEntries:
    """What the manifest of a folder says of files in it. They are on the disk then, not only on their way there."""

    for path in files:
        sync_to_disk(path)
    return {path.relative_to(folder).as_posix(): _make_entry(path) for path in files}


def publish_directory(tmp_path: Path, target: Path, entries: ManifestEntries) -> None:
    """Write the manifest of what lies aside, and give it its name.

    Raises:
        OSError: it could not be written, or there is a ``target``.
    """
    text = json.dumps({"files": dict(sorted(entries.items()))}, indent=1) + "\n"
    (tmp_path / MANIFEST).write_text(text, encoding="utf-8")
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    for path in [tmp_path / MANIFEST, *folders, tmp_path]:
        sync_to_disk(path)
    os.rename(tmp_path, target)
    sync_to_disk(target.parent)


def format_write_error(error: Exception, target: Path) -> str:
    """An error of writing, with the space that is left there."""
    if not isinstance(error, WRITE_ERRORS):
        return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    free = shutil.disk_usage(_nearest_existing_parent(target.parent)).free / 2**20
    return f"{error} ({free:,.0f} MiB are free there; make room)"


def verify_directory(
    directory: Path, file_names: Collection[str] | None = None, *, must_have_manifest: bool = False
) -> None:
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
    named = {directory / name: says for name, says in sums.items() if file_names is None or name in file_names}
    for file, (size, _) in named.items():
        if not file.is_file():
            raise ValueError(f"{file} is missing, though the manifest beside it names it")
        if file.stat().st_size != size:
            raise ValueError(f"{file} has {file.stat().st_size} bytes, the manifest says {size}")
    with ThreadPoolExecutor(_THREADS) as pool:
        for (file, (_, checksum)), found in zip(named.items(), pool.map(_compute_checksum, named), strict=True):
            if found != checksum:
                raise ValueError(f"{file} is damaged: its checksum is not the manifest's")


def _make_entry(path: Path) -> dict[str, str | int]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _compute_checksum(path: Path) -> str:
    try:
        return str(_make_entry(path)["sha256"])
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _nearest_existing_parent(path: Path) -> Path:
    return path if path.exists() else _nearest_existing_parent(path.parent)
