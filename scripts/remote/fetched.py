"""The record of fetched files. Local files that are not in it are kept when a fetch replaces them.

``runs/.fetched.json`` contains the SHA-256 and the machine of each fetched file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import posixpath
import shlex
import sys
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path

from host import PROJECT_ROOT, CommandError, Host

RECORD = PROJECT_ROOT / "runs" / ".fetched.json"


class FetchRecord:
    """The files that were fetched from a machine; as a context, a copy of more files to a local folder.

    The copy has to move what it replaces to the folder `backup`. At the end, the files in it that had been fetched are
    deleted, and the names of the others are printed.
    """

    def __init__(self, host: Host, folder: Path) -> None:
        self.folder = folder
        self._origin = f"{host.name}:{host.root}"
        entries = read_record().items()
        self._hashes = {name: digits for name, (digits, origin) in entries if origin == self._origin}
        self._new_entries: dict[str, list[str]] = {}
        self._replaced = RECORD.with_name(".replaced") / f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns()}"
        self.backup = self._replaced / relative_name(folder)

    def holds(self, path: Path, name: str) -> bool:
        """Check whether a file is as it was fetched under a name."""
        return self._hashes.get(name) == compute_hash(path)

    def holds_folder(self) -> bool:
        """Check whether the folder is that of a fetched run, or of the files that were fetched of one."""
        name, metrics = relative_name(self.folder), self.folder / "metrics.jsonl"
        if metrics.exists():
            return self.holds(metrics, f"{name}/{metrics.name}")
        return any(fetched.startswith(f"{name}/") for fetched in self._hashes)

    def add(self, names: Iterable[str]) -> None:
        """Record fetched files of the folder."""
        for name in names:
            path = self.folder / name
            self._new_entries[relative_name(path)] = [compute_hash(path), self._origin]

    def __enter__(self) -> FetchRecord:
        return self

    def __exit__(self, *_: object) -> None:
        RECORD.parent.mkdir(parents=True, exist_ok=True)
        part = RECORD.with_name(f"{RECORD.name}.part")
        part.write_text(json.dumps(read_record() | self._new_entries, indent=0) + "\n", encoding="utf-8")
        os.replace(part, RECORD)
        names = []
        for path in sorted(self._replaced.rglob("*"), reverse=True):
            name = path.relative_to(self._replaced).as_posix()
            if path.is_dir() and not path.is_symlink():
                remove_if_empty(path)
            elif self.holds(path, name):
                path.unlink()
            else:
                names.append(name)
        remove_if_empty(self._replaced)
        remove_if_empty(self._replaced.parent)
        if names:
            print(
                f"replaced {len(names)} files here that did not come from there, kept in "
                f"{relative_name(self._replaced)}: {format_names(names[::-1])}",
                file=sys.stderr,
            )


def remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def read_record() -> dict[str, list[str]]:
    """Read the record. Invalid entries are ignored: their files count as not fetched, and are kept."""
    try:
        record = json.loads(RECORD.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    entries = record.items() if isinstance(record, dict) else ()
    return {name: value for name, value in entries if isinstance(value, list) and len(value) == 2}


def relative_name(path: Path) -> str:
    """The path relative to this tree, as in the record."""
    return path.relative_to(PROJECT_ROOT).as_posix()


def resolve_remote_path(host: Host, path: str) -> tuple[str, Path]:
    """Return the path relative to the remote root (or absolute), and the local path that it is fetched to."""
    inside = posixpath.normpath(path)
    if inside.startswith("/"):
        # Only the remote machine knows the absolute path of its root.
        inside = inside.removeprefix(host.run("root", capture=True).rstrip("/") + "/")
    if inside == "." or inside.split("/")[0] == "..":
        raise CommandError(f"any_file = {path!r} is not under {host.root}: name a file or folder there")
    return inside, PROJECT_ROOT / (f"runs/fetched{inside}" if inside.startswith("/") else inside)


def check_run_directory(host: Host, config: str, extra: list[str]) -> None:
    """Check that fetching a run would not replace a local run.

    Raises:
        CommandError: its directory exists here and was not fetched.
    """
    directory = run_directory(config, extra)
    if not directory:
        return
    _, folder = resolve_remote_path(host, directory)
    if folder.is_dir() and any(folder.iterdir()) and not FetchRecord(host, folder).holds_folder():
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


def compute_hash(path: Path) -> str:
    """Compute the SHA-256 of a file, or of the target of a link."""
    if path.is_symlink():
        return hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def format_names(names: list[str]) -> str:
    """Format the first five names and the number of others."""
    shown = [name if name.isprintable() else ascii(name) for name in names[:5]]
    return ", ".join(shown) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
