"""Copies to and from the remote machine, by rsync over the shared connection.

rsync compares files by checksum, continues an interrupted file from ``.rsync-partial/`` beside it, and puts a file in
its place only when it is complete. It moves what it replaces to a backup folder. There, files that came from the other
side are deleted, see ``keep_edited`` in there.sh and `fetched.FetchRecord`; the others are kept and listed.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from fetched import FetchRecord, compute_hash, format_names, resolve_remote_path
from host import CommandError, ConnectionLostError, Host

PARTIAL = ".rsync-partial"
REMOTE = "env:./"
"""The remote folder of a copy, as rsync writes it. rsync appends the word before the colon and its own command to the
ssh command, which names the machine already; there, ``env`` executes that command."""

OPTIONS = ("--checksum", "--perms", "--times", "--omit-dir-times", "--compress", "--keep-dirlinks", "--backup")
PROGRESS = ["--info=progress2"] if sys.stderr.isatty() else []
LARGE = 1 << 24
"""Bytes from which on a copy to the remote machine shows its progress."""

VANISHED_EXIT_CODE = 24
"""Exit code of rsync if a file was removed after it was listed."""

SECRET = re.compile(r"(^|/)env(/|$)")
NOT_FETCHED = (".lock", ".fetched.json", "*.tmp-old", f"*.tmp-{'[0-9a-f]' * 8}")
"""Locks, the record of fetched files, and what is written aside before it is renamed."""

# Two slashes end a name, because it may contain a line break. The last character shows whether rsync escapes control
# characters (since 3.5) or writes them as they are.
LOG_FORMAT = "%i %l %n//\x01"
LOGGED = re.compile(rb"\[\d+\] (?:[<>]f|cL)\S* (\d+) (.*?)//(\x01|\\#001)\n", re.DOTALL)
ESCAPE = re.compile(rb"\\#([0-7]{3})")
LEFT_OUT = re.compile(rb"ignoring (unsafe symlink .*)\n")


@dataclass(frozen=True)
class Copy:
    """The outcome of rsync: exit code, messages, sizes of the copied files by name, links that were left out."""

    code: int
    messages: list[str]
    sizes: dict[str, int]
    left_out: list[str]
    is_connected: bool

    def check(self, host: Host) -> None:
        """Raise the error for the exit code.

        Raises:
            ConnectionLostError: the connection was lost.
            CommandError: files could not be copied.
        """
        if not self.is_connected:
            raise ConnectionLostError(
                f"the connection to {host.name} was lost after {len(self.sizes)} files; the same command continues"
            )
        if self.code:
            reason = self.messages[0] if self.messages else f"rsync ended with exit code {self.code}"
            raise CommandError(f"{reason}: see to that and run the same again, which copies only the rest")


def copy(host: Host, folder: str, source: str, target: str, names: list[str] | None, *options: str) -> Copy:
    """Copy files between a remote and a local folder.

    Args:
        host: the machine.
        folder: the remote folder, absolute or relative to the root (empty: the root).
        source: the folder to copy from; the remote one is `REMOTE`.
        target: the folder to copy to.
        names: the files, relative to the folders; None copies all.
        options: more options of rsync.
    """
    log = host.control.with_name("log")
    log.unlink(missing_ok=True)
    remote_shell = " ".join("'" + word.replace("'", "''") + "'" for word in host.ssh("-T"))
    command = ["rsync", f"--rsh={remote_shell}", f"--rsync-path={host.command('serve', folder)}", *OPTIONS, *options]
    command += [f"--partial-dir={PARTIAL}", f"--log-file={log}", f"--log-file-format={LOG_FORMAT}", "--8-bit-output"]
    command += ["--recursive"] if names is None else ["--files-from=-", "--from0", "--no-implied-dirs"]
    output = sys.stderr if "--info=progress2" in options else subprocess.DEVNULL
    pipe = subprocess.PIPE
    try:
        command += [*find_link_options(), source, target]
        process = subprocess.Popen(command, stdin=pipe, stdout=output, stderr=pipe)
    except FileNotFoundError as error:
        raise CommandError("rsync is not here: install it (sudo apt-get install rsync, brew install rsync)") from error
    with process:
        try:
            # Without "./" rsync takes a name that begins with # or ; for a comment.
            _, stderr = process.communicate(b"".join(b"./" + os.fsencode(name) + b"\0" for name in names or []))
        except BaseException:
            process.terminate()
            raise
    messages = [line for line in stderr.decode(errors="replace").splitlines() if line]
    text = log.read_bytes() if log.exists() else b""
    left_out = [os.fsdecode(line) for line in LEFT_OUT.findall(text)]
    is_connected = process.returncode == 0 or host.control_connection("check")
    return Copy(process.returncode, messages, read_sizes(text), left_out, is_connected)


def read_sizes(log: bytes) -> dict[str, int]:
    """Read the sizes of the copied files by name from a log of rsync."""
    sizes = {}
    for size, name, end in LOGGED.findall(log):
        if end != b"\x01":
            name = ESCAPE.sub(lambda digits: bytes([int(digits[1], 8)]), name)
        sizes[posixpath.normpath(os.fsdecode(name))] = int(size)
    return sizes


def find_link_options() -> list[str]:
    """Find the option with which rsync follows a link to a folder of another disk; before 3.5 it needed none."""
    text = subprocess.run(["rsync", "--help"], stdin=subprocess.DEVNULL, capture_output=True, check=False).stdout
    return ["--insecure-links"] if b"--insecure-links" in text else []


def push(host: Host, source: Path, folder: str, names: list[str], *options: str) -> int:
    """Copy files of a local folder to a remote folder. Returns the number of those that were not there."""
    # Links are followed, because the target of a link to elsewhere is sent in its place.
    paths = [path for name in names if (path := (source / name).resolve()).is_file()]
    hashes = {compute_hash(path) for path in paths}
    if sum(path.stat().st_size for path in paths) > LARGE:
        options += tuple(PROGRESS)
    host.run("receive", folder, stdin="".join(f"{digits}\n" for digits in hashes).encode())
    copied = copy(host, folder, f"{source}/", REMOTE, names, *options)
    if copied.is_connected:
        host.run("keep_edited")
    copied.check(host)
    return len(copied.sizes)


def send(host: Host, source: Path, path: str) -> None:
    """Send a file or the files of a folder to a path under the root, except files that are there already.

    Links to files of the same folder stay links; the targets of other links are sent in their place.
    """
    names, skipped = list_files(source) if source.is_dir() else ([source.name], [])
    if source.is_dir():
        count = push(host, source, path, names, "--links", "--copy-unsafe-links")
    else:
        count = push(host, source.parent, posixpath.dirname(path), names, "--copy-links")
    if skipped:
        print(f"left out, since they are neither files nor links to any: {format_names(skipped)}", file=sys.stderr)
    print(f"sent {count} files to {host.name}:{host.root}/{path}; {len(names) - count} were there", flush=True)


def list_files(folder: Path) -> tuple[list[str], list[str]]:
    """List the files of a folder, and of folders elsewhere that its links name; then what cannot be sent."""
    names: list[str] = []
    skipped: list[str] = []

    def collect(directory: Path, parents: list[Path]) -> None:
        for path in sorted(directory.iterdir()):
            name = path.relative_to(folder).as_posix()
            if path.is_symlink() and is_inside(path, folder):
                names.append(name)
            elif path.is_dir() and not any(parent.is_relative_to(path.resolve()) for parent in parents):
                if path.name != PARTIAL:
                    collect(path, [*parents, path.resolve()])
            else:
                (names if path.is_file() else skipped).append(name)

    collect(folder, [folder.resolve()])
    return names, skipped


def is_inside(link: Path, folder: Path) -> bool:
    """Check whether a link is relative, and names something that is in the folder."""
    target = os.readlink(link)
    inside = Path(os.path.normpath(link.parent / target))
    return not target.startswith("/") and link.exists() and inside.is_relative_to(folder)


def fetch(host: Host, path: str, *, linked_only: bool = False) -> None:
    """Fetch a file or folder to the same path in this tree.

    Links are copied after all files, so that their targets are complete. Local files that were not fetched are moved
    aside, and their names are printed.

    Args:
        host: the machine.
        path: the path, absolute or relative to the root.
        linked_only: whether checkpoints are omitted that no link names.

    Raises:
        CommandError: the path does not exist, a file changed during the copy, or the connection was lost.
    """
    path, here = resolve_remote_path(host, path)
    kind, *checkpoints = host.run("find_path", path, capture=True).split("\0")[:-1]
    if kind == "nothing":
        raise CommandError(f"{host.name}:{host.root} has no {path}: just list-runs shows its runs")
    folder, target, names = path, here, None
    # The second copy of a folder also shows what changed during the first.
    passes = [["--no-links", "--info=nonreg0", *PROGRESS], ["--links", "--safe-links", "--info=name1"]]
    options = ["--force", *(f"--exclude={pattern}" for pattern in NOT_FETCHED)]
    if kind == "file":
        folder, target, names, passes = posixpath.dirname(path), here.parent, [here.name], [["--copy-links"]]
    elif linked_only and checkpoints:
        options += [*(f"--include=/checkpoints/{name}/" for name in checkpoints), "--exclude=/checkpoints/*/"]
    if SECRET.search(path):
        options.append("--chmod=F600")
    target.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, int] = {}
    changed: list[str] = []
    for extra in passes:
        with FetchRecord(host, target) as record:
            copied = copy(host, folder, REMOTE, f"{target}/", names, f"--backup-dir={record.backup}", *options, *extra)
            record.add(name for name in copied.sizes if not any(name in message for message in copied.messages))
        if copied.code != VANISHED_EXIT_CODE:
            copied.check(host)
        changed += [message for message in copied.messages if "vanished:" in message]
        # A file that is longer now was appended to: what was copied before is its beginning.
        changed += [name for name, size in copied.sizes.items() if size <= sizes.get(name, -1)]
        sizes |= copied.sizes
    for link in copied.left_out:
        print(f"left out: {link}", file=sys.stderr)
    if changed:
        raise CommandError(
            f"changed or gone on {host.name} while it was fetched: {format_names(changed)}; run the same again"
        )
    print(f"fetched {len(sizes)} files to {here}", flush=True)
