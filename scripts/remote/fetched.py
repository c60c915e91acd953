"""The record of fetched files. Local files that are not in it are moved aside before they are replaced.

``runs/.fetched.json`` contains the SHA-256 and the machine of each fetched file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import posixpath
import shlex
import shutil
import sys
import time
import tomllib
from pathlib import Path

from host import PROJECT_ROOT, CommandError, Host

RECORD = "runs/.fetched.json"
REPLACED = "runs/.replaced"


class FetchRecord:
    """The files of earlier fetches, and the local files that this fetch replaces."""

    def __init__(self, host: Host) -> None:
        self._origin = f"{host.name}:{host.root}"
        self._previous_record = read(PROJECT_ROOT / RECORD)
        self._new_entries: dict[str, list[str]] = {}
        self._backup_directory = PROJECT_ROOT / REPLACED / time.strftime("%Y%m%d-%H%M%S")
        self._moved_paths: list[str] = []

    def is_unchanged(self, path: Path, contents: str) -> bool:
        """Check whether a file was fetched from this machine with these contents: a SHA-256, or the target of a
        link."""
        return self._previous_record.get(relative_name(path)) == [contents, self._origin]

    def has_files_below(self, folder: Path) -> bool:
        """Check whether a file in the folder was fetched from this machine."""
        start = f"{relative_name(folder)}/"
        return any(
            name.startswith(start) and origin == self._origin for name, (_, origin) in self._previous_record.items()
        )

    def move_aside(self, path: Path) -> None:
        """Move a local file to the backup directory, unless it is unchanged since it was fetched."""
        if not os.path.lexists(path):
            return
        contents = os.readlink(path) if path.is_symlink() else compute_sha256(path) if path.is_file() else ""
        if self.is_unchanged(path, contents):
            return
        while not self._moved_paths and self._backup_directory.exists():  # of another fetch in the same second
            self._backup_directory = self._backup_directory.with_name(f"{self._backup_directory.name}-")
        backup = self._backup_directory / relative_name(path)
        backup.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, backup)
        self._moved_paths.append(relative_name(path))

    def add(self, path: Path, contents: str) -> None:
        """Record a fetched file."""
        self._new_entries[relative_name(path)] = [contents, self._origin]

    def close(self) -> None:
        """Write the record, and print which files were moved aside."""
        if self._new_entries:
            record = PROJECT_ROOT / RECORD
            record.parent.mkdir(parents=True, exist_ok=True)
            temporary = record.with_name(f"{record.name}.part")
            temporary.write_text(json.dumps(read(record) | self._new_entries, indent=0) + "\n", encoding="utf-8")
            os.replace(temporary, record)
        if self._moved_paths:
            count = "1 file" if len(self._moved_paths) == 1 else f"{len(self._moved_paths)} files"
            backup = f"{REPLACED}/{self._backup_directory.name}"
            print(
                f"replaced {count} here that did not come from there, kept in {backup}: "
                f"{format_names(self._moved_paths)}",
                file=sys.stderr,
            )


def read(path: Path) -> dict[str, list[str]]:
    """Read the record. Invalid entries are ignored: their files count as not fetched, and are kept."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    entries = record.items() if isinstance(record, dict) else ()
    return {name: value for name, value in entries if isinstance(value, list) and len(value) == 2}


def relative_name(path: Path) -> str:
    """The path relative to this tree, as in the record."""
    return path.relative_to(PROJECT_ROOT).as_posix()


def resolve_remote_path(host: Host, path: str) -> tuple[str, Path]:
    """Return the path relative to the remote root (or absolute), and the local folder that it is fetched to."""
    if path.startswith("/"):
        path = posixpath.normpath(path)
        # Only the remote machine knows the absolute path of its root.
        path = path.removeprefix(os.fsdecode(host.run("root", capture=True)).rstrip("/") + "/")
    inside = posixpath.normpath(path)
    if inside == "." or inside.split("/")[0] == "..":
        raise CommandError(f"any_file = {path!r} is not under {host.root}: name a file or folder there")
    return inside, PROJECT_ROOT / "runs" / "fetched" if inside.startswith("/") else PROJECT_ROOT


def check_run_directory(host: Host, config: str, extra: list[str]) -> None:
    """Check that fetching a run would not replace a local run.

    Raises:
        CommandError: its directory exists here and was not fetched.
    """
    directory = run_directory(config, extra)
    if not directory:
        return
    path, base = resolve_remote_path(host, directory)
    folder = base / path.lstrip("/")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    metrics, fetched = folder / "metrics.jsonl", FetchRecord(host)
    if not (
        fetched.is_unchanged(metrics, compute_sha256(metrics)) if metrics.is_file() else fetched.has_files_below(folder)
    ):
        raise CommandError(
            f"run.directory = {directory} is here already, and it is not as it was fetched from {host.name}: set "
            f"another run.directory, or move {folder} away, or use just train, and then "
            f"just fetch any_file={shlex.quote(directory)}, which keeps what it replaces"
        )


def run_directory(config: str, extra: list[str]) -> str:
    """Read ``run.directory`` from the config and the options; empty if it cannot be determined locally."""
    directory = ""
    # The config may exist only on the remote machine, or be invalid, which the remote command reports.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        directory = tomllib.loads((PROJECT_ROOT / config).read_text(encoding="utf-8"))["run"]["directory"]
    for before, word in zip(["", *extra], extra, strict=False):
        key, equals, value = word.removeprefix("--set=").partition("=")
        if equals and key.strip() == "run.directory" and (before == "--set" or word.startswith("--set=")):
            directory = value.strip().strip("\"'")
    is_plain = isinstance(directory, str) and not directory.startswith("~") and ".." not in directory.split("/")
    return directory if is_plain else ""


def compute_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def format_names(names: list[str]) -> str:
    """Format the first five names and the number of others."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
