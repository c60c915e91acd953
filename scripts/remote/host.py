"""The remote machine, and the execution of scripts on it.

Settings come from the environment:

    REMOTE_HOST          user@name, or a host of ~/.ssh/config (alternatively PRIME_HOST)
    REMOTE_ROOT          remote folder, absolute or relative to the home directory (default: diffusionlm)
    REMOTE_PORT          port of the SSH server
    REMOTE_SSH_OPTIONS   options of ssh, split as by a shell: -i ~/.ssh/key -J gateway
    REMOTE_SESSION       name of the tmux session (default: diffusionlm)

All actions share one connection (an OpenSSH master).
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

PROJECT_ROOT = Path(__file__).parents[2]
"""The source tree, which is sent, and which fetched files are written to."""

SCRIPT = Path(__file__).with_name("there.sh")
SSH_FAILED_EXIT_CODE = 255
"""Exit code of ssh if the connection fails."""

SSH_OPTIONS = ("ConnectTimeout=10", "ServerAliveInterval=15", "ServerAliveCountMax=4", "LogLevel=ERROR")


class CommandError(Exception):
    """Ends the command with an exit code, and with a message unless the message is empty."""

    def __init__(self, text: str, code: int = 2) -> None:
        super().__init__(text)
        self.code = code


class ConnectionLostError(CommandError):
    """The connection to the host failed or ended early."""


@dataclass(frozen=True)
class Host:
    """A remote machine, the root of the project on it, and the connection."""

    name: str
    root: str
    session: str
    options: tuple[str, ...]
    control: Path

    def command(self, action: str, *arguments: object, terminal: bool = False) -> list[str]:
        """Build the local command that executes an action of there.sh; no shell splits or expands its arguments."""
        text = SCRIPT.read_text(encoding="utf-8")
        words = ["bash", "-c", text, SCRIPT.name, self.root, self.session, action, *map(str, arguments)]
        defaults = [word for option in SSH_OPTIONS for word in ("-o", option)]
        connection = ["-o", f"ControlPath={self.control}", "-o", "ControlMaster=no", "-tt" if terminal else "-T"]
        return ["ssh", *self.options, *defaults, *connection, "--", self.name, shlex.join(words)]

    def run(
        self, action: str, *arguments: object, stdin: int | IO[bytes] = subprocess.DEVNULL, capture: bool = False
    ) -> bytes:
        """Execute an action; its messages go to stderr. Returns its stdout if ``capture``.

        Raises:
            ConnectionLostError: the connection failed.
            CommandError: the action failed and has printed the reason.
        """
        output = subprocess.PIPE if capture else None
        done = subprocess.run(self.command(action, *arguments), stdin=stdin, stdout=output, check=False)
        self.check(done.returncode)
        return done.stdout or b""

    def check(self, code: int) -> None:
        """Raise the error for an exit code of ssh."""
        if code == SSH_FAILED_EXIT_CODE:
            raise ConnectionLostError(f"the connection to {self.name} was lost")
        if code:
            raise CommandError("", code)

    def in_terminal(self, action: str, *arguments: object) -> int:
        """Execute an action with this terminal, if there is one, and return its exit code."""
        terminal = os.isatty(0) and os.isatty(1)
        return subprocess.run(self.command(action, *arguments, terminal=terminal), check=False).returncode


def read_settings(environment: Mapping[str, str]) -> tuple[str, str, str, tuple[str, ...]]:
    """Read the host name, the root, the session and the options of ssh.

    Raises:
        CommandError: a variable is missing or invalid.
    """
    name = environment.get("REMOTE_HOST") or environment.get("PRIME_HOST") or ""
    if not name:
        raise CommandError("REMOTE_HOST is not set: export REMOTE_HOST=user@machine, and REMOTE_ROOT=folder there")
    if name.startswith("-") or re.search(r"\s", name):
        raise CommandError(f"REMOTE_HOST = {name!r} is no name of a machine: write user@machine")
    root = environment.get("REMOTE_ROOT") or "diffusionlm"
    root = root.removeprefix("~/").rstrip("/")
    if root in ("", "~", ".") or ".." in root.split("/") or "\n" in root:
        raise CommandError(f"REMOTE_ROOT = {environment['REMOTE_ROOT']!r} is no folder of its own: name a new one")
    session = environment.get("REMOTE_SESSION") or "diffusionlm"
    if not re.fullmatch(r"[\w-]+", session):
        raise CommandError(f"REMOTE_SESSION = {session!r} is no name for tmux: use letters, digits, - and _")
    try:
        options = shlex.split(environment.get("REMOTE_SSH_OPTIONS", ""))
    except ValueError as error:
        raise CommandError(f"REMOTE_SSH_OPTIONS = {environment['REMOTE_SSH_OPTIONS']!r}: {error}") from error
    port = environment.get("REMOTE_PORT", "")
    if port:
        if not port.isdecimal():
            raise CommandError(f"REMOTE_PORT = {port!r} is no number")
        options = ["-p", port, *options]
    return name, root, session, tuple(options)


@contextlib.contextmanager
def connected(environment: Mapping[str, str]) -> Iterator[Host]:
    """Connect to the machine that the environment selects; the connection is closed at the end.

    Raises:
        CommandError: the environment is incomplete, or the machine does not answer.
    """
    name, root, session, options = read_settings(environment)
    with tempfile.TemporaryDirectory(prefix="remote-", ignore_cleanup_errors=True) as folder:
        host = Host(name, root, session, options, Path(folder) / "ssh")
        connect(host)
        try:
            yield host
        finally:
            close = ["ssh", *options, "-o", f"ControlPath={host.control}", "-O", "exit", "--", name]
            subprocess.run(close, capture_output=True, check=False)


def connect(host: Host) -> None:
    """Open the connection that all actions share.

    Raises:
        ConnectionLostError: the machine does not answer, or rejects the login.
    """
    defaults = [word for option in SSH_OPTIONS for word in ("-o", option)]
    connection = ["-o", f"ControlPath={host.control}", "-o", "ControlMaster=yes", "-N", "-f", "-T"]
    host.control.unlink(missing_ok=True)  # of a connection that was lost
    # A file, because the connection stays in the background and would keep a pipe open.
    with tempfile.TemporaryFile() as messages:
        command = ["ssh", *host.options, *defaults, *connection, "--", host.name]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=messages, stderr=messages, check=False)
        except FileNotFoundError as error:
            raise CommandError("ssh is not here: install OpenSSH's client (openssh-client)") from error
        if done.returncode:
            messages.seek(0)
            lines = messages.read().decode(errors="replace").split("\n")
            reason = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
            raise ConnectionLostError(
                f"{host.name} cannot be reached ({reason}): check REMOTE_HOST, REMOTE_PORT and REMOTE_SSH_OPTIONS"
            )
