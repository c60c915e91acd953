"""Copies to and from the remote machine, by rsync over the shared connection.

A file is continued where an interrupted copy of it ended, and takes its place only when it is whole, which rsync checks
by a checksum. What is replaced is kept: there in ``.remote/replaced/``, here in ``runs/.replaced/``.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from host import PROJECT_ROOT, CommandError, ConnectionLostError, Host

REMOTE = "env:./"
"""The remote folder of a copy, as rsync writes it. rsync appends the word before the colon and its own command to the
ssh command, which names the machine already; there, ``env`` executes that command."""
OPTIONS = ("--perms", "--times", "--modify-window=-1", "--omit-dir-times", "--compress", "--keep-dirlinks", "--backup")
PARTIAL = ".rsync-partial"
NOT_FETCHED = (".lock", "*.tmp-old", f"*.tmp-{'[0-9a-f]' * 8}")
"""Locks, and what is written aside before it is renamed."""


def copy(host: Host, folder: str, source: str, target: str, *options: str, names: list[str] | None = None) -> str:
    """Copy between a remote and a local folder by rsync, over the shared connection; returns what rsync prints.

    Args:
        folder: the remote folder, absolute or relative to the root (empty: the root).
        source: the folder to copy from; the remote one is `REMOTE`.
        target: the folder to copy to.
        options: more options of rsync.
        names: the files, relative to the folders; None copies all.

    Raises:
        ConnectionLostError: the connection was lost; the same copy continues.
        CommandError: files could not be copied, or were removed meanwhile.
    """
    remote_shell = " ".join("'" + word.replace("'", "''") + "'" for word in host.ssh("-T"))
    command = ["rsync", f"--rsh={remote_shell}", f"--rsync-path={host.command('serve', folder)}", *OPTIONS]
    command += [f"--partial-dir={PARTIAL}", *options]
    command += ["--recursive"] if names is None else ["--files-from=-", "--from0", "--no-implied-dirs"]
    has_progress = sys.stderr.isatty() and "--verbose" not in options
    command += ["--info=progress2"] if has_progress else []
    pipe = subprocess.PIPE
    text = subprocess.run(["rsync", "--help"], stdin=subprocess.DEVNULL, capture_output=True, check=False).stdout
    # Since 3.5 rsync follows a link to a folder of another disk only with this option.
    command += [*(["--insecure-links"] if b"--insecure-links" in text else []), source, target]
    process = subprocess.Popen(command, stdin=pipe, stdout=sys.stderr if has_progress else pipe, stderr=pipe)
    with process:
        try:
            # Without "./" rsync takes a name that begins with # or ; for a comment.
            output, stderr = process.communicate(b"".join(b"./" + os.fsencode(name) + b"\0" for name in names or []))
        except BaseException:
            process.terminate()
            raise
    messages = [line for line in stderr.decode(errors="replace").splitlines() if line]
    if process.returncode and not host.control_connection("check"):
        raise ConnectionLostError(f"the connection to {host.name} was lost; the same command continues")
    if process.returncode:
        reason = messages[0] if messages else f"rsync ended with exit code {process.returncode}"
        raise CommandError(f"{reason}: see to that and run the same again, which copies only the rest")
    return (output or b"").decode(errors="replace")


def push(host: Host, source: Path, folder: str, *options: str, names: list[str] | None = None) -> None:
    """Copy files of a local folder to a remote one; files that are replaced there are kept and listed."""
    host.run("prepare", folder)
    try:
        copy(host, folder, f"{source}/", REMOTE, *options, names=names)
    finally:
        if host.control_connection("check"):
            host.run("keep_replaced")


def send(host: Host, source: Path, path: str) -> None:
    """Send a file or the files of a folder to a path under the root.

    Links to files of the same folder stay links; the targets of other links are sent in their place.
    """
    if source.is_dir():
        for link in source.rglob("*"):
            if link.is_symlink() and link.parent.resolve().is_relative_to(link.resolve()):
                raise CommandError(f"{link} links to a folder that holds it: remove it")
        push(host, source, path, "--links", "--copy-unsafe-links")
    else:
        push(host, source.parent, posixpath.dirname(path), "--copy-links", names=[source.name])
    print(f"sent {path} to {host.name}:{host.root}", flush=True)


def fetch(host: Host, path: str, *, linked_only: bool = False) -> None:
    """Fetch a file or folder to the same path in this tree. Files that it replaces are moved to runs/.replaced/.

    Args:
        path: the path, absolute or relative to the root.
        linked_only: whether checkpoints are omitted that no link names.

    Raises:
        CommandError: the path does not exist, a file vanished during the copy, or the connection was lost.
    """
    path, here = resolve_remote_path(host, path)
    kind, *checkpoints = find_path(host, path)
    if kind == "nothing":
        raise CommandError(f"{host.name}:{host.root} has no {path}: just list-runs shows its runs")
    target = here if kind == "folder" else here.parent
    target.mkdir(parents=True, exist_ok=True)
    replaced = PROJECT_ROOT / "runs" / ".replaced" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    options = ["--force", f"--backup-dir={replaced / target.relative_to(PROJECT_ROOT)}"]
    options += [f"--exclude={pattern}" for pattern in NOT_FETCHED]
    options += ["--chmod=F600"] if re.search(r"(^|/)env(/|$)", path) else []
    try:
        if kind == "file":
            copy(host, posixpath.dirname(path), REMOTE, f"{target}/", *options, "--copy-links", names=[here.name])
        else:
            if linked_only and checkpoints:
                options += [*(f"--include=/checkpoints/{name}/" for name in checkpoints), "--exclude=/checkpoints/*/"]
            copy(host, path, REMOTE, f"{target}/", *options, "--no-links")
            # Links come after all files, so that their targets are complete.
            output = copy(host, path, REMOTE, f"{target}/", *options, "--links", "--safe-links", "--verbose")
            for line in output.splitlines():
                if line.startswith("ignoring unsafe symlink"):
                    print(f"left out: {line.removeprefix('ignoring ')}", file=sys.stderr)
    finally:
        list_replaced(replaced)
    print(f"fetched {here}", flush=True)


def list_replaced(folder: Path) -> None:
    """List the files that a fetch replaced; without any, remove the folder that was made for them."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    if files:
        names = format_names([path.relative_to(folder).as_posix() for path in files])
        print(f"replaced {len(files)} files here, kept in {folder.relative_to(PROJECT_ROOT)}: {names}", file=sys.stderr)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def find_path(host: Host, path: str) -> list[str]:
    """``folder`` and the checkpoints that its links name, ``file``, or ``nothing``."""
    return host.run("find_path", path, capture=True).split("\0")[:-1]


def resolve_remote_path(host: Host, path: str) -> tuple[str, Path]:
    """Return the path relative to the remote root (or absolute), and the local path that it is fetched to."""
    inside = posixpath.normpath(path)
    if inside.startswith("/"):
        # Only the remote machine knows the absolute path of its root.
        inside = inside.removeprefix(host.run("root", capture=True).rstrip("/") + "/")
    if inside == "." or inside.split("/")[0] == "..":
        raise CommandError(f"any_file = {path!r} is not under {host.root}: name a file or folder there")
    return inside, PROJECT_ROOT / (f"runs/fetched{inside}" if inside.startswith("/") else inside)


def format_names(names: list[str]) -> str:
    """Format the first five names and the number of others."""
    first = [name if name.isprintable() else ascii(name) for name in names[:5]]
    return ", ".join(first) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def git(*words: str) -> str:
    """Run git in this tree and return its output."""
    done = subprocess.run(["git", *words], cwd=PROJECT_ROOT, capture_output=True, check=False)
    if done.returncode:
        raise CommandError(f"git {words[0]} fails in {PROJECT_ROOT}: {os.fsdecode(done.stderr).strip()}")
    return os.fsdecode(done.stdout)


def describe_tree() -> str:
    """Describe the tracked files: their commit, and whether they have changed since."""
    return f"commit {git('describe', '--always', '--dirty', '--abbrev=12', '--exclude=*').strip()}"


def send_tree(host: Host) -> None:
    """Send the tracked files with their uncommitted changes to the remote root."""
    names = [path for path in git("ls-files", "-z").split("\0") if path and os.path.lexists(PROJECT_ROOT / path)]
    description = describe_tree()
    host.run("stage", stdin=b"".join(os.fsencode(name) + b"\0" for name in names))
    push(host, PROJECT_ROOT, "", "--links", "--delay-updates", names=names)
    host.run("install", description)
    new = git("ls-files", "-z", "--others", "--exclude-standard").split("\0")[:-1]
    if new:
        print(f"not sent, since git does not track them: {format_names(new)} (git add names them)")
    print(f"sent {len(names)} tracked files: {description}", flush=True)
