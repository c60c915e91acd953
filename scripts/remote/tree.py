"""The project's own files: what git tracks, as it lies in the working tree."""

from __future__ import annotations

import hashlib
import io
import os
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import IO

from fetched import compute_sha256, format_names
from host import PROJECT_ROOT, CommandError, Host
from transfer import format_bytes


def git(*words: str) -> str:
    """What git says of this tree."""
    try:
        done = subprocess.run(["git", *words], cwd=PROJECT_ROOT, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise CommandError("git is not here: it tells which files belong to the project") from error
    if done.returncode:
        raise CommandError(f"git {words[0]} fails in {PROJECT_ROOT}: {os.fsdecode(done.stderr).strip()}")
    return os.fsdecode(done.stdout)


def list_tracked_files() -> list[str]:
    """Paths of the tracked files that are there.

    Raises:
        CommandError: one has a name that a manifest cannot hold.
    """
    paths = [path for path in git("ls-files", "-z").split("\0") if path and os.path.lexists(PROJECT_ROOT / path)]
    for path in paths:
        if re.search("[\n\\\\\udc80-\udcff]", path):
            raise CommandError(
                f"{path!r}: a tracked file with a line break, a backslash or bytes that are not UTF-8 in its name "
                "cannot be sent"
            )
    return paths


def build_manifest(paths: list[str]) -> str:
    """As sha256sum writes and checks it."""
    return "".join(
        f"{compute_sha256(PROJECT_ROOT / path)}  {path}\n" for path in paths if not (PROJECT_ROOT / path).is_symlink()
    )


def tree() -> str:
    """This tree in words."""
    return describe_contents(build_manifest(list_tracked_files()))


def describe_contents(text: str) -> str:
    """The tree in words: its commit, whether it was changed since, and the digits of its contents."""
    changed = git("status", "--porcelain", "--untracked-files=no").strip()
    commit = git("describe", "--always", "--abbrev=12", "--exclude=*").strip()
    digits = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"commit {commit}{', changed since' if changed else ''} (contents {digits})"


def send_tree(host: Host) -> None:
    """Put the tracked files, as they are in the working tree, into the root."""
    paths = list_tracked_files()
    text = build_manifest(paths)
    words = describe_contents(text)
    with tempfile.TemporaryFile() as file:
        write_archive(file, paths, text)
        size = file.tell()
        file.seek(0)
        host.run("install", words, stdin=file)
    new = git("ls-files", "-z", "--others", "--exclude-standard").split("\0")[:-1]
    if new:
        listed = format_names(new).encode(errors="backslashreplace").decode()
        print(f"not sent, since git does not track them: {listed} (git add names them)")
    print(f"sent {len(paths)} tracked files, {format_bytes(size)}: {words}", flush=True)


def write_archive(file: IO[bytes], paths: list[str], text: str) -> None:
    """A tar of the files, and at its very end their manifest."""
    with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1, format=tarfile.PAX_FORMAT) as tar:
        for path in paths:
            tar.add(PROJECT_ROOT / path, f"tree/{path}", recursive=False, filter=remove_owner)
        info = tarfile.TarInfo("manifest")
        data = text.encode()
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))


def remove_owner(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without owners."""
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def is_tracked(path: Path) -> bool:
    """Whether git tracks the file."""
    return bool(git("ls-files", "--", str(path)).strip())
