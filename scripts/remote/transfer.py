"""Files to and from the remote machine, each whole or not at all under its name.

A file on its way is called ``<name>.<first digits of its SHA-256>.part``. If the connection is lost, the same command
goes on at its last byte; what arrived whole is not sent again; what changed meanwhile starts anew: its digits differ.
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
"""Files that their owner alone may read, and whose digits are in no command line."""

VANISHED_EXIT_CODE = 3
"""The exit code of ``read`` where there is no such file any more."""


@dataclass(frozen=True)
class RemoteFile:
    """A file there: its path, bytes and SHA-256; or a link and its target."""

    path: str
    size: int
    hash: str
    target: str | None = None

    @property
    def part(self) -> str:
        """Its path while it is on its way."""
        return f"{self.path}.{'0' * 12 if self.is_secret else self.hash[:12]}.part"

    @property
    def is_secret(self) -> bool:
        """Whether it holds settings and secrets; such a file is short, and always starts anew."""
        return SECRET.search(self.path) is not None


def list_files(host: Host, *paths: str, which: str = "all") -> list[RemoteFile]:
    """The files of paths on the remote machine; ``newest`` leaves out checkpoints that no link names."""
    found = []
    for record in host.run("list", which, *paths, capture=True).split(b"\0")[:-1]:
        first, second, name = os.fsdecode(record).split("\t", 2)
        is_link = first == "link"
        found.append(RemoteFile(name, 0 if is_link else int(first), second, second if is_link else None))
    return found


def fetch(host: Host, path: str, which: str = "all") -> list[Path]:
    """Bring a file or folder here, to the same place in this tree. Returns the files.

    What is here and did not come from there is moved aside first, and named.

    Raises:
        CommandError: there is no such thing, or some of it changed on its way, or the connection was lost.
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
        # Links last: they name what is whole then.
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
            f"changed or gone on {host.name} while it was fetched: {format_names(changed)}; the rest is here, the links in it "
            "as they were: run the same again"
        )
    total = sum(entry.size for entry in entries)
    print(f"fetched {len(done)} files, {format_bytes(total)}, to {base / path.lstrip('/')}", flush=True)
    return done


def fetch_one(host: Host, entry: RemoteFile, target: Path, fetched: FetchRecord) -> bool:
    """Bring one file, unless it is here. Returns whether it is, as it was listed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if has_same_content(target, entry):
        if entry.is_secret:
            target.chmod(0o600)
        return True
    part = target.with_name(posixpath.basename(entry.part))
    for stale in target.parent.glob("*.part"):
        if PART.sub("", stale.name) == target.name and (stale != part or entry.is_secret):
            stale.unlink()
    kept = min(part.stat().st_size, entry.size) if part.exists() else 0
    command = host.command("read", entry.path, kept, entry.size - kept)
    mode = 0o600 if entry.is_secret else 0o666
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT, mode), "wb") as file:
        file.truncate(kept)
        file.seek(kept)
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            while data := os.read(process.stdout.fileno(), CHUNK):
                file.write(data)
                kept += len(data)
                print_progress(entry.path, kept, entry.size)
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
    """Send a file, or the files of a folder, to a path under the root. What is there already is not sent again.

    Links in a folder stay links where they name something in it; others are sent as what they name.
    """
    found = SendList(source, path)
    wanted = [(file, RemoteFile(to, file.stat().st_size, compute_sha256(file))) for file, to in found.files]
    links = [RemoteFile(to, 0, target, target) for to, target in found.links]
    # The part of a single file lies beside it.
    places = [path] if source.is_dir() else [path, *(entry.part for _, entry in wanted)]
    there = {entry.path: entry for entry in list_files(host, *places)}
    sent = total = 0
    try:
        for file, entry in wanted:
            if there.get(entry.path) == entry and not entry.is_secret:
                continue
            part = there.get(entry.part)
            kept = min(part.size, entry.size) if part and not entry.is_secret else 0
            send_one(host, file, entry, kept)
            sent, total = sent + 1, total + entry.size
        for entry in links:
            if there.get(entry.path) != entry:
                host.run("link", entry.path, entry.hash)
                sent += 1
    except ConnectionLostError as error:
        raise ConnectionLostError(
            f"{error} after {sent} of {len(wanted) + len(links)} files; the same command goes on where it stopped"
        ) from error
    if found.skipped:
        print(
            f"left out, since they are neither files nor links to any: {format_names(found.skipped)}", file=sys.stderr
        )
    same = len(wanted) + len(links) - sent
    print(f"sent {sent} files, {format_bytes(total)}, to {host.name}:{host.root}/{path}; {same} were there")


class SendList:
    """What is to be sent of a file or folder: files and links, each with its path there, and what is skipped."""

    def __init__(self, source: Path, path: str) -> None:
        self.files: list[tuple[Path, str]] = []
        self.links: list[tuple[str, str]] = []
        self.skipped: list[str] = []
        self._source = source
        self._collect(source, path, [])

    def _collect(self, source: Path, path: str, above: list[str]) -> None:
        if source.is_symlink() and source != self._source and self._is_inside(source):
            self.links.append((path, os.readlink(source)))
        elif source.is_dir() and not any(f"{each}/".startswith(f"{source.resolve()}/") for each in above):
            for each in sorted(source.iterdir()):
                self._collect(each, f"{path}/{each.name}", [*above, str(source.resolve())])
        elif source.is_file():
            if not PART.search(source.name):
                self.files.append((source, path))
        else:
            self.skipped.append(path)

    def _is_inside(self, link: Path) -> bool:
        """Whether the link names, from where it lies, something of the same folder."""
        target = os.readlink(link)
        inside = os.path.normpath(link.parent / target)
        return not target.startswith("/") and link.exists() and Path(inside).is_relative_to(self._source)


def send_one(host: Host, file: Path, entry: RemoteFile, kept: int) -> None:
    """Send its SHA-256, and what follows the first ``kept`` bytes."""
    command = host.command("write", entry.path, kept, entry.size, "600" if entry.is_secret else "644")
    # Where ssh ends first, its exit code says why.
    with (
        file.open("rb") as source,
        contextlib.suppress(BrokenPipeError),
        subprocess.Popen(command, stdin=subprocess.PIPE) as process,
    ):
        assert process.stdin is not None
        process.stdin.write(f"{entry.hash}\n".encode())
        source.seek(kept)
        while data := source.read(CHUNK):
            process.stdin.write(data)
            kept += len(data)
            print_progress(entry.path, min(kept, entry.size), entry.size)
    host.check(process.returncode)


def link(target: str, where: str, entries: list[RemoteFile], path: Path, fetched: FetchRecord) -> None:
    """A link as it is there, if it names something beside it that was listed."""
    named = posixpath.normpath(posixpath.join(posixpath.dirname(where), target))
    why = ""
    if target.startswith("/") or ".." in target.split("/"):
        why = "it points elsewhere"
    elif not any(f"{entry.path}/".startswith(f"{named}/") for entry in entries):
        why = "what it names is not there, or not yet"
    if why:
        print(f"{path.name} -> {target} is left out: {why}", file=sys.stderr)
        return
    if path.is_symlink() and os.readlink(path) == target:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    fetched.move_aside(path)
    aside = path.with_name(f"{path.name}.part")
    aside.unlink(missing_ok=True)
    aside.symlink_to(target)
    os.replace(aside, path)
    fetched.add(path, target)


def has_same_content(path: Path, entry: RemoteFile) -> bool:
    """Whether the file has these bytes."""
    return path.is_file() and path.stat().st_size == entry.size and compute_sha256(path) == entry.hash


def print_progress(path: str, done: int, size: int) -> None:
    """How far a large file is, in a terminal."""
    if size > 64 * CHUNK and sys.stderr.isatty():
        print(f"\r{path}: {100 * done // size} %", end="\n" if done == size else "", file=sys.stderr, flush=True)


def format_bytes(size: float) -> str:
    """Bytes, for people."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
