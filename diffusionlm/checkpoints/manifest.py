"""Checksums of a directory's files (MANIFEST.json), and directories that are written completely or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError

from files.atomic import sync_to_disk, temporary_path
from files.json_files import read_json_object
from files.paths import UNWRITABLE, hash_file

MANIFEST = "MANIFEST.json"
WRITE_ERRORS = (OSError, SafetensorError)
"""Errors of a full disk. safetensors raises its own."""
ManifestEntries = dict[str, dict[str, str | int]]
"""Path in the directory -> size in bytes and SHA-256."""
_NUM_THREADS = 4
"""Files that are hashed at the same time. Hashing one file uses one core."""


def write_directory_atomically(target: Path, write: Callable[[Path], None]) -> None:
    """Write a directory by ``write(folder)``: under a temporary name, with fsync and a manifest, then renamed.

    A process that is killed leaves no ``target`` or a complete one. The temporary directory ends in ``.tmp-*``;
    `remove_temporary_paths` removes it after a kill, and this function after an error.

    Raises:
        ValueError: it cannot be written, for example because the disk is full; names the directory and the free space.
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
    return sorted(path for path in folder.rglob("*") if path.is_file())


def make_manifest_entries(folder: Path, files: Collection[Path]) -> ManifestEntries:
    """Fsync files of a folder and return their manifest entries."""
    for path in files:
        sync_to_disk(path)
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": hash_file(path)} for path in files
    }


def publish_directory(tmp_path: Path, target: Path, entries: ManifestEntries) -> None:
    """Write the manifest of a temporary directory, fsync it, and rename it to ``target``.

    Raises:
        OSError: it cannot be written, or ``target`` exists.
    """
    (tmp_path / MANIFEST).write_text(format_manifest(entries), encoding="utf-8")
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    for path in [tmp_path / MANIFEST, *folders, tmp_path]:
        sync_to_disk(path)
    os.rename(tmp_path, target)
    sync_to_disk(target.parent)


def format_manifest(entries: ManifestEntries) -> str:
    """Format the text of MANIFEST.json, sorted by path."""
    return json.dumps({"files": dict(sorted(entries.items()))}, indent=1) + "\n"


def format_write_error(error: Exception, target: Path) -> str:
    """Format an error of writing ``target``, with the remedy: the free space of its disk, or another directory."""
    if not isinstance(error, WRITE_ERRORS):
        return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        return f"{error}; choose another directory, or make this one writable"
    free = shutil.disk_usage(next(folder for folder in target.parents if folder.exists())).free / 2**20
    return f"{error} ({free:,.0f} MiB are free there; make room)"


def verify_directory(
    directory: Path, file_names: Collection[str] | None = None, *, must_have_manifest: bool = False
) -> None:
    """Compare files with the manifest of their directory.

    Args:
        directory: without a manifest, as other programs write it, it passes.
        file_names: files to verify. None: all that the manifest names.
        must_have_manifest: reject a directory without a manifest.

    Raises:
        ValueError: a file is missing, truncated or changed; names it.
    """
    path = directory / MANIFEST
    if not path.is_file():
        if must_have_manifest:
            raise ValueError(f"{path} is missing: the directory is incomplete")
        return
    try:
        entries = read_json_object(path)["files"]
        expected = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: damaged manifest: {error!r}") from error
    files = {directory / name: entry for name, entry in expected.items() if file_names is None or name in file_names}
    for file, (size, _) in files.items():
        if not file.is_file():
            raise ValueError(f"{file} is missing; {MANIFEST} lists it")
        if file.stat().st_size != size:
            raise ValueError(f"{file} has {file.stat().st_size} bytes instead of {size} ({MANIFEST})")
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for (file, (_, expected_sum)), checksum in zip(files.items(), pool.map(hash_file, files), strict=True):
            if checksum != expected_sum:
                raise ValueError(f"{file} is damaged: its SHA-256 differs from the one in {MANIFEST}")
