"""Send the tracked files of the working tree."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

from fetched import compute_hash, format_names
from host import PROJECT_ROOT, CommandError, Host
from transfer import push


def git(*words: str) -> str:
    """Run git in this tree and return its output."""
    try:
        done = subprocess.run(["git", *words], cwd=PROJECT_ROOT, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise CommandError("git is not here: it tells which files belong to the project, so install it") from error
    if done.returncode:
        raise CommandError(f"git {words[0]} fails in {PROJECT_ROOT}: {os.fsdecode(done.stderr).strip()}")
    return os.fsdecode(done.stdout)


def list_tracked_files() -> list[str]:
    """List the tracked files that exist."""
    return [path for path in git("ls-files", "-z").split("\0") if path and os.path.lexists(PROJECT_ROOT / path)]


def describe_tree() -> str:
    """Describe the tree by its commit, whether it has changed since, and a hash of the tracked files."""
    paths = sorted(map(os.fsencode, list_tracked_files()))
    contents = hashlib.sha256()
    for path in paths:
        file = PROJECT_ROOT / os.fsdecode(path)
        if file.is_file() and not file.is_symlink():
            contents.update(compute_hash(file).encode() + b"  " + path + b"\0")
    changed = ", changed since" if git("status", "--porcelain", "--untracked-files=no").strip() else ""
    commit = git("describe", "--always", "--abbrev=12", "--exclude=*").strip()
    return f"commit {commit}{changed} (contents {contents.hexdigest()[:12]})"


def send_tree(host: Host) -> None:
    """Send the tracked files with their uncommitted changes to the remote root."""
    paths = list_tracked_files()
    description = describe_tree()
    host.run("stage")
    # Unchanged files become hard links to those in the root.
    push(host, PROJECT_ROOT, ".remote/incoming", paths, "--links", "--link-dest=../..")
    host.run("install", description)
    new = git("ls-files", "-z", "--others", "--exclude-standard").split("\0")[:-1]
    if new:
        print(f"not sent, since git does not track them: {format_names(new)} (git add names them)")
    print(f"sent {len(paths)} tracked files: {description}", flush=True)


def is_tracked(path: Path) -> bool:
    """Check whether git tracks a file."""
    return bool(git("ls-files", "--", str(path)).strip())
