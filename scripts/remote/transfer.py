"""Files to and from the remote machine, each whole or not at all under its name.

A file on its way is called ``<name>.<first digits of its SHA-256>.part``. If the connection is lost, the same command
goes on at its last byte; what arrived whole is not sent again; what changed meanwhile starts anew: its digits differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from host import HERE, Host, LostError, StopError

CHUNK = 1 << 18
PART = re.compile(r"\.[0-9a-f]{12}\.part$")


@dataclass(frozen=True)
class Entry:
    """A file there: its path, bytes and SHA-256; or a link and its target."""

    path: str
    size: int
    hash: str
    target: str | None = None

    @property
    def part(self) -> str:
        """Its path while it is on its way."""
        return f"{self.path}.{self.hash[:12]}.part"


def listing(host: Host, *paths: str, which: str = "all") -> list[Entry]:
    """The files of paths on the remote machine; ``newest`` leaves out checkpoints that no link names."""
    found = []
    for record in host.run("list", which, *paths, capture=True).decode().split("\0")[:-1]:
        first, second, name = record.split("\t", 2)
        is_link = first == "link"
        found.append(Entry(name, 0 if is_link else int(first), second, second if is_link else None))
    return found


def fetch(host: Host, path: str, which: str = "all") -> list[Path]:
    """Bring a file or folder here, to the same place in this tree. Returns the files.

    Raises:
        StopError: there is no such thing, or it changed on its way, or the connection was lost.
    """
    path, base = place(host, path)
    entries = listing(host, path, which=which)
    if not entries:
        raise StopError(f"{host.name}:{host.root} has no {path}: just list-runs shows its runs")
    for entry in entries:
        if not f"{entry.path}/".startswith(f"{path}/") or ".." in entry.path.split("/"):
            raise StopError(f"{host.name} names {entry.path}, which is not in {path}: nothing was fetched")
    done: list[Path] = []
    for entry in entries:
        target = base / entry.path.lstrip("/")
        try:
            fetch_one(host, entry, target)
        except LostError as error:
            raise LostError(
                f"{error} after {len(done)} of {len(entries)} files; the same command goes on where it stopped"
            ) from error
        done.append(target)
    total = sum(entry.size for entry in entries)
    print(f"fetched {len(done)} files, {readable(total)}, to {base / path.lstrip('/')}", flush=True)
    return done


def place(host: Host, path: str) -> tuple[str, Path]:
    """The path under the root, or from /, and the local folder that it goes to."""
    root = host.root.rstrip("/") + "/"
    path = posixpath.normpath(path.removeprefix(root))
    if not path or path == "." or path.split("/")[0] == "..":
        raise StopError(f"any_file = {path!r} is not under {host.root}: name a file or folder there")
    return path, HERE / "runs" / "fetched" if path.startswith("/") else HERE


def fetch_one(host: Host, entry: Entry, target: Path) -> None:
    """Bring one file, unless it is here."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if entry.target is not None:
        link(entry.target, target)
        return
    if is_same(target, entry):
        return
    part = target.with_name(posixpath.basename(entry.part))
    for stale in target.parent.glob("*.part"):
        if PART.sub("", stale.name) == target.name and stale != part:
            stale.unlink()
    kept = min(part.stat().st_size, entry.size) if part.exists() else 0
    command = host.command("read", entry.path, kept, entry.size - kept)
    with part.open("r+b" if part.exists() else "wb") as file:
        file.truncate(kept)
        file.seek(kept)
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            while data := os.read(process.stdout.fileno(), CHUNK):
                file.write(data)
                kept += len(data)
                show(entry.path, kept, entry.size)
        file.flush()
        os.fsync(file.fileno())
    host.check(process.returncode)
    if not is_same(part, entry):
        part.unlink()
        raise StopError(f"{entry.path} changed on {host.name} while it was fetched: run the same again")
    os.replace(part, target)


def send(host: Host, source: Path, path: str, mode: int = 0o644) -> None:
    """Send a file, or the files of a folder, to a path under the root. What is there already is not sent again."""
    files = sorted(file for file in source.rglob("*") if file.is_file()) if source.is_dir() else [source]
    files = [file for file in files if not PART.search(file.name)]
    wanted = {}
    for file in files:
        target = f"{path}/{file.relative_to(source).as_posix()}" if source.is_dir() else path
        wanted[file] = Entry(target, file.stat().st_size, digest(file))
    # The part of a single file lies beside it.
    places = [path] if source.is_dir() else [path, wanted[source].part]
    there = {entry.path: entry for entry in listing(host, *places)}
    sent = total = 0
    for file, entry in wanted.items():
        if there.get(entry.path) == entry:
            continue
        part = there.get(entry.part)
        try:
            send_one(host, file, entry, min(part.size, entry.size) if part else 0, mode)
        except LostError as error:
            raise LostError(
                f"{error} after {sent} of {len(files)} files; the same command goes on where it stopped"
            ) from error
        sent, total = sent + 1, total + entry.size
    print(f"sent {sent} files, {readable(total)}, to {host.name}:{host.root}/{path}; {len(files) - sent} were there")


def send_one(host: Host, file: Path, entry: Entry, kept: int, mode: int) -> None:
    """Send what follows the first ``kept`` bytes."""
    command = host.command("write", entry.path, entry.part, kept, entry.hash, f"{mode:o}")
    with file.open("rb", buffering=0) as source:
        source.seek(kept)
        with subprocess.Popen(command, stdin=source) as process:
            while process.poll() is None:
                # The position is that of ssh too.
                show(entry.path, source.tell(), entry.size)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1)
    host.check(process.returncode)
    show(entry.path, entry.size, entry.size)


def link(target: str, path: Path) -> None:
    """A link as it is there, if it points to a place beside it."""
    if target.startswith("/") or ".." in target.split("/"):
        print(f"{path.name} -> {target} is left out: it points elsewhere", file=sys.stderr)
        return
    aside = path.with_name(f"{path.name}.part")
    aside.unlink(missing_ok=True)
    aside.symlink_to(target)
    os.replace(aside, path)


def is_same(path: Path, entry: Entry) -> bool:
    """Whether the file has these bytes."""
    return path.is_file() and path.stat().st_size == entry.size and digest(path) == entry.hash


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def show(path: str, done: int, size: int) -> None:
    """How far a large file is, in a terminal."""
    if size > 64 * CHUNK and sys.stderr.isatty():
        print(f"\r{path}: {100 * done // size} %", end="\n" if done == size else "", file=sys.stderr, flush=True)


def readable(size: float) -> str:
    """Bytes, for people."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
