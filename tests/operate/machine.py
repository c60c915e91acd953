"""The other machine of the tests of the remote recipes: a server, a home of its own, and a tree on this side."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BIG = random.Random(0).randbytes(2_000_000)  # not compressible, and longer than what is read at once

TREE = Path(__file__).parents[2]
# Of this process, since another on this machine may test the same.
SECRET = f"not for other eyes {os.getpid()}"
TINY = Path(__file__).with_name("tiny.toml").read_text(encoding="utf-8")

STUB = Path(__file__).with_name("stub.sh").read_text(encoding="utf-8")

NAMES = r"REMOTE_.*|PRIME_HOST|WANDB_.*|TMUX.*|VIRTUAL_ENV|XDG_.*|PYTEST_.*"


@dataclass
class Remote:
    """The machine, and this side of it."""

    folder: Path
    environment: dict[str, str]
    home: Path
    tree: Path
    tmux: dict[str, str]
    root: Path = field(init=False)

    def __post_init__(self) -> None:
        self.root = self.home / self.environment["REMOTE_ROOT"]

    def just(self, *words: str, timeout: float = 100, **more: str) -> subprocess.CompletedProcess[str]:
        """A recipe, and what came of it."""
        return subprocess.run(
            ["just", *words],
            cwd=self.tree,
            env={**self.environment, **more},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def works(self, *words: str, **more: Any) -> str:
        """What a recipe prints that must end well."""
        done = self.just(*words, **more)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def fails(self, *words: str, code: int = 2, **more: Any) -> str:
        """The only line that a recipe says which must not end well."""
        done = self.just(*words, **more)
        assert done.returncode == code, done.stdout + done.stderr
        lines = done.stderr.splitlines()
        assert len(lines) == 1, done.stderr
        return lines[0]

    def sessions(self) -> str:
        """tmux's sessions, with the number of the process of each."""
        words = ["tmux", "list-panes", "-a", "-F", "#{session_name} #{pane_pid}"]
        return subprocess.run(words, env=self.tmux, capture_output=True, text=True).stdout


def plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not re.fullmatch(NAMES, name)}


def until(condition: Callable[[], object], description: str, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {description}"
        time.sleep(0.02)


def copy_tree(target: Path) -> None:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=TREE, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (TREE / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(TREE / name, target / name)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "--quiet"], ["add", "--all"], [*identity, "commit", "--quiet", "--message", "all"]):
        subprocess.run(["git", *words], cwd=target, check=True)
    (target / "tiny.toml").write_text(TINY, encoding="utf-8")
    (target / "data").mkdir()
    (target / "data" / "big one.bin").write_bytes(bytes(range(256)) * 2000)
    env = target / "env" / "wandb.env"
    env.write_text(f"WANDB_API_KEY='{SECRET}'\nWANDB_MODE=disabled\n", encoding="utf-8")
    env.chmod(0o600)


@contextlib.contextmanager
def serving(folder: Path, home: Path, environment: dict[str, str]) -> Iterator[dict[str, Any]]:
    """A server with this environment; the variables that name it."""
    folder.mkdir()
    words = [sys.executable, str(Path(__file__).with_name("ssh_server.py")), str(folder), str(home)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(words, env={**environment, "HOME": str(home)}, stdout=log, stderr=log)
    try:
        until(lambda: (folder / "port").exists() or process.poll() is not None, "the server")
        assert process.poll() is None, (folder / "log").read_text(encoding="utf-8")
        key, known_hosts = shlex.quote(str(folder / "key")), shlex.quote(f"UserKnownHostsFile={folder / 'known_hosts'}")
        yield {
            "REMOTE_HOST": "someone@127.0.0.1",
            "REMOTE_PORT": (folder / "port").read_text(encoding="utf-8"),
            "REMOTE_SSH_OPTIONS": f"-F /dev/null -i {key} -o IdentitiesOnly=yes -o {known_hosts}",
        }
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def machine(folder: Path) -> Iterator[Remote]:
    """A machine with nothing but a home, and a copy of the tree here, in folders with unfriendly names."""
    for program in ("ssh", "rsync", "tmux", "git", "uv", "just"):
        assert shutil.which(program), f"{program} is needed: .ci/run installs it"
    home, tree = folder / "a home", folder / "the tree"
    home.mkdir()
    tree.mkdir()
    copy_tree(tree)
    cache = subprocess.run(["uv", "cache", "dir"], capture_output=True, text=True, check=True).stdout.strip()
    plain = plain_environment()
    # A socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="tmux-", dir="/tmp") as sockets:
        there = {**plain, "TMUX_TMPDIR": sockets, "UV_CACHE_DIR": cache, "OMP_NUM_THREADS": "1", "SHELL": "/bin/bash"}
        with serving(folder / "server", home, there) as names:
            here = {**plain, **names, "REMOTE_ROOT": "some $HOME/it's here"}
            yield Remote(folder / "server", here, home, tree, there)
        subprocess.run(["tmux", "kill-server"], env=there, capture_output=True)
    shutil.rmtree(home)  # gigabytes, where the cache is on another disk


def install_stub(root: Path) -> None:
    """Put the command that stands for a training into the root."""
    path = root / ".venv" / "bin" / "stub"
    path.write_text(STUB, encoding="utf-8")
    path.chmod(0o755)


def stub(lines: int = 1, end: int = 0) -> list[str]:
    return ["config=tiny.toml", "command=stub", f"extra=lines={lines} end={end}"]


def cut(machine: Remote, which: str, size: int) -> Path:
    """Have the connection dropped after so many bytes."""
    path = machine.folder / f"cut-{which}"
    path.write_text(str(size), encoding="utf-8")
    return path


@contextlib.contextmanager
def stand_in(machine: Remote, text: str) -> Iterator[None]:
    """A program in the place of rsync there, for all but its help, which names the options of its version."""
    path = machine.root / ".tools" / "bin" / "rsync"
    program = path.with_name("stand-in")
    choice = f'[ "$1" != --help ] || exec {shutil.which("rsync")} --help'
    path.write_text(f'#!/bin/sh\n{choice}\nexec "$(dirname "$0")/stand-in" "$@"\n', encoding="utf-8")
    program.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    program.chmod(0o755)
    try:
        yield
    finally:
        path.unlink()
        program.unlink()


def partial_files(folder: Path) -> list[Path]:
    """Files that rsync keeps of interrupted transfers into a folder."""
    return sorted(path for path in folder.rglob(".rsync-partial/*") if path.is_file())
