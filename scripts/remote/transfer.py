"""Resumable copies to and from the remote machine; a file appears under its name only when it is complete.

An incomplete file is called ``<name>.<first digits of its SHA-256>.part``. After a lost connection the same command
continues at its last byte. Complete files are not sent again; a file that changed starts from the beginning, because
its digits differ.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from fetched import RECORD, FetchRecord, compute_sha256, format_names, resolve_remote_path
from host import CommandError, ConnectionLostError, Host

CHUNK = 1 << 18
PART = re.compile(r"\.[0-9a-f]{12}\.part$")
SECRET = re.compile(r"(^|/)env/[^/]+\.env$")
"""Files with secrets: readable by the owner only, and their SHA-256 appears in no command line."""

VANISHED_EXIT_CODE = 3
"""Exit code of ``read_bytes`` if the file no longer exists."""


@dataclass(frozen=True)
class RemoteFile:
    """A remote file: path, size in bytes and SHA-256; or a link and its target."""

    path: str
    size: int
    hash: str
    target: str | None = None

    @property
    def part(self) -> str:
        """The path of the incomplete file."""
        return f"{self.path}.{'0' * 12 if self.is_secret else self.hash[:12]}.part"

    @property
    def is_secret(self) -> bool:
        """True if the file contains secrets; such a short file is never resumed."""
        return SECRET.search(self.path) is not None


def list_files(host: Host, *paths: str, which: str = "all") -> list[RemoteFile]:
    """List the remote files below paths; ``newest`` omits checkpoints that no link points to."""
    files = []
    for record in host.run("list", which, *paths, capture=True).split(b"\0")[:-1]:
        first, second, name = os.fsdecode(record).split("\t", 2)
        is_link = first == "link"
        files.append(RemoteFile(name, 0 if is_link else int(first), second, second if is_link else None))
    return files


def fetch(host: Host, path: str, which: str = "all") -> list[Path]:
    """Fetch a file or folder to the same path in this tree. Returns the files.

    Local files that were not fetched are moved aside, and their names are printed.

    Raises:
        CommandError: the path does not exist, a file changed during the copy, or the connection was lost.
    """
    path, base = resolve_remote_path(host, path)
    entries = [entry for entry in list_files(host, path, which=which) if entry.path != RECORD]
    if not entries:
        raise CommandError(f"{host.name}:{host.root} has no {path}: just list-runs shows its runs")
    for entry in entries:
        if not f"{entry.path}/".startswith(f"{path}/") or ".." in entry.path.split("/"):
            raise CommandError(f"{host.name} names {entry.path}, which is not in {path}: nothing was fetched")
    done: list[Path] = []
    changed: list[str] = []
    fetched = FetchRecord(host)
    try:
        # Links are last, so that their targets are complete.
        for entry in sorted(entries, key=lambda entry: entry.target is not None):
            target = base / entry.path.lstrip("/")
            if entry.target is not None:
                if not changed:
                    link(entry.target, entry.path, entries, target, fetched)
            elif not fetch_one(host, entry, target, fetched):
                changed.append(entry.path)
                continue
            done.append(target)
    except ConnectionLostError as error:
        raise ConnectionLostError(
            f"{error} after {len(done)} of {len(entries)} files; the same command goes on where it stopped"
        ) from error
    finally:
        fetched.close()
    if changed:
        raise CommandError(
            f"changed or gone on {host.name} while it was fetched: {format_names(changed)}; the rest is here, the "
            "links in it as they were: run the same again"
        )
    total = sum(entry.size for entry in entries)
    print(f"fetched {len(done)} files, {format_bytes(total)}, to {base / path.lstrip('/')}", flush=True)
    return done


def fetch_one(host: Host, entry: RemoteFile, target: Path, fetched: FetchRecord) -> bool:
    """Fetch a file unless it exists already. Returns False if it changed since it was listed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if has_same_content(target, entry):
        if entry.is_secret:
            target.chmod(0o600)
        return True
    part = target.with_name(posixpath.basename(entry.part))
    for stale in target.parent.glob("*.part"):
        if PART.sub("", stale.name) == target.name and (stale != part or entry.is_secret):
            stale.unlink()
    offset = min(part.stat().st_size, entry.size) if part.exists() else 0
    command = host.command("read_bytes", entry.path, offset, entry.size - offset)
    mode = 0o600 if entry.is_secret else 0o666
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT, mode), "wb") as file:
        file.truncate(offset)
        file.seek(offset)
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            while data := os.read(process.stdout.fileno(), CHUNK):
                file.write(data)
                offset += len(data)
                print_progress(entry.path, offset, entry.size)
        file.flush()
        os.fsync(file.fileno())
    if process.returncode != VANISHED_EXIT_CODE:
        host.check(process.returncode)
    if not has_same_content(part, entry):
        part.unlink()
        return False
    fetched.move_aside(target)
    os.replace(part, target)
    fetched.add(target, entry.hash)
    return True


def send(host: Host, source: Path, path: str) -> None:
    """Send a file or the files of a folder to a path under the root, except files that exist there already.

    Links to files of the same folder stay links; the targets of other links are sent in their place.
    """
    send_list = SendList(source, path)
    files = [(file, RemoteFile(to, file.stat().st_size, compute_sha256(file))) for file, to in send_list.files]
    links = [RemoteFile(to, 0, target, target) for to, target in send_list.links]
    # The incomplete copy of a single file is beside it.
    paths = [path] if source.is_dir() else [path, *(entry.part for _, entry in files)]
    remote_files = {entry.path: entry for entry in list_files(host, *paths)}
    sent = total = 0
    try:
        for file, entry in files:
            if remote_files.get(entry.path) == entry and not entry.is_secret:
                continue
            part = remote_files.get(entry.part)
            offset = min(part.size, entry.size) if part and not entry.is_secret else 0
            send_one(host, file, entry, offset)
            sent, total = sent + 1, total + entry.size
        for entry in links:
            if remote_files.get(entry.path) != entry:
                host.run("make_link", entry.path, entry.hash)
                sent += 1
    except ConnectionLostError as error:
        raise ConnectionLostError(
            f"{error} after {sent} of {len(files) + len(links)} files; the same command goes on where it stopped"
        ) from error
    if send_list.skipped:
        print(
            f"left out, since they are neither files nor links to any: {format_names(send_list.skipped)}",
            file=sys.stderr,
        )
    same = len(files) + len(links) - sent
    print(f"sent {sent} files, {format_bytes(total)}, to {host.name}:{host.root}/{path}; {same} were there")


class SendList:
    """The files and links of a file or folder with their remote paths, and the skipped paths."""

    def __init__(self, source: Path, path: str) -> None:
        self.files: list[tuple[Path, str]] = []
        self.links: list[tuple[str, str]] = []
        self.skipped: list[str] = []
        self._source = source
        self._collect(source, path, [])

    def _collect(self, source: Path, path: str, parents: list[str]) -> None:
        if source.is_symlink() and source != self._source and self._is_inside(source):
            self.links.append((path, os.readlink(source)))
        elif source.is_dir() and not any(f"{parent}/".startswith(f"{source.resolve()}/") for parent in parents):
            for child in sorted(source.iterdir()):
                self._collect(child, f"{path}/{child.name}", [*parents, str(source.resolve())])
        elif source.is_file():
            if not PART.search(source.name):
                self.files.append((source, path))
        else:
            self.skipped.append(path)

    def _is_inside(self, link: Path) -> bool:
        """Check whether a link is relative and points into the folder that is sent."""
        target = os.readlink(link)
        inside = os.path.normpath(link.parent / target)
        return not target.startswith("/") and link.exists() and Path(inside).is_relative_to(self._source)


def send_one(host: Host, file: Path, entry: RemoteFile, offset: int) -> None:
    """Send the SHA-256 of a file and its bytes after the first ``offset``."""
    command = host.command("write_file", entry.path, offset, entry.size, "600" if entry.is_secret else "644")
    # If ssh ends early, its exit code is the reason.
    with (
        file.open("rb") as source,
        contextlib.suppress(BrokenPipeError),
        subprocess.Popen(command, stdin=subprocess.PIPE) as process,
    ):
        assert process.stdin is not None
        process.stdin.write(f"{entry.hash}\n".encode())
        source.seek(offset)
        while data := source.read(CHUNK):
            process.stdin.write(data)
            offset += len(data)
            print_progress(entry.path, min(offset, entry.size), entry.size)
    host.check(process.returncode)


def link(target: str, where: str, entries: list[RemoteFile], path: Path, fetched: FetchRecord) -> None:
    """Create a fetched link, if it is relative and its target was listed."""
    linked_path = posixpath.normpath(posixpath.join(posixpath.dirname(where), target))
    reason = ""
    if target.startswith("/") or ".." in target.split("/"):
        reason = "it points elsewhere"
    elif not any(f"{entry.path}/".startswith(f"{linked_path}/") for entry in entries):
        reason = "what it names is not there, or not yet"
    if reason:
        print(f"{path.name} -> {target} is left out: {reason}", file=sys.stderr)
        return
    if path.is_symlink() and os.readlink(path) == target:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    fetched.move_aside(path)
    temporary = path.with_name(f"{path.name}.part")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, path)
    fetched.add(path, target)


def has_same_content(path: Path, entry: RemoteFile) -> bool:
    """Check whether a local file has the size and the SHA-256 of an entry."""
    return path.is_file() and path.stat().st_size == entry.size and compute_sha256(path) == entry.hash


def print_progress(path: str, done: int, size: int) -> None:
    """Print the progress of a large file in a terminal."""
    if size > 64 * CHUNK and sys.stderr.isatty():
        print(f"\r{path}: {100 * done // size} %", end="\n" if done == size else "", file=sys.stderr, flush=True)


def format_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
