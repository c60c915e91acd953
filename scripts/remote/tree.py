"""Send the tracked files of the working tree."""

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
    """Run git in this tree and return its output."""
    try:
        done = subprocess.run(["git", *words], cwd=PROJECT_ROOT, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise CommandError("git is not here: it tells which files belong to the project") from error
    if done.returncode:
        raise CommandError(f"git {words[0]} fails in {PROJECT_ROOT}: {os.fsdecode(done.stderr).strip()}")
    return os.fsdecode(done.stdout)


def list_tracked_files() -> list[str]:
    """List the tracked files that exist.

    Raises:
        CommandError: a manifest cannot contain the name of a file.
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
    """Build a manifest in the format of sha256sum."""
    return "".join(
        f"{compute_sha256(PROJECT_ROOT / path)}  {path}\n" for path in paths if not (PROJECT_ROOT / path).is_symlink()
    )


def tree() -> str:
    """Describe this tree, see `describe_contents`."""
    return describe_contents(build_manifest(list_tracked_files()))


def describe_contents(text: str) -> str:
    """Describe the tree by its commit, whether it has changed since, and a hash of its manifest."""
    changed = git("status", "--porcelain", "--untracked-files=no").strip()
    commit = git("describe", "--always", "--abbrev=12", "--exclude=*").strip()
    digits = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"commit {commit}{', changed since' if changed else ''} (contents {digits})"


def send_tree(host: Host) -> None:
    """Send the tracked files with their uncommitted changes to the remote root."""
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
    """Write a tar archive of the files; the last entry is their manifest."""
    with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1, format=tarfile.PAX_FORMAT) as tar:
        for path in paths:
            tar.add(PROJECT_ROOT / path, f"tree/{path}", recursive=False, filter=remove_owner)
        info = tarfile.TarInfo("manifest")
        data = text.encode()
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))


def remove_owner(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove the owner from a tar entry."""
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def is_tracked(path: Path) -> bool:
    """Check whether git tracks a file."""
    return bool(git("ls-files", "--", str(path)).strip())
