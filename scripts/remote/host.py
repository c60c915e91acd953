"""The remote machine, and the execution of actions on it.

Settings come from the environment:

    REMOTE_HOST          user@name, or a host of ~/.ssh/config (alternatively PRIME_HOST)
    REMOTE_ROOT          remote folder, absolute or relative to the home directory (default: diffusionlm)
    REMOTE_PORT          port of the SSH server
    REMOTE_SSH_OPTIONS   options of ssh, split as by a shell: -i ~/.ssh/key -J gateway
    REMOTE_SESSION       name of the tmux session (default: diffusionlm)

All actions and copies share one connection (an OpenSSH master).
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

PROJECT_ROOT = Path(__file__).parents[2]
"""The source tree, which is sent, and which fetched files are written to."""

SCRIPT = Path(__file__).with_name("there.sh")
SSH_FAILED_EXIT_CODE = 255
SSH_OPTIONS = (
    "ConnectTimeout=10",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=4",
    "LogLevel=ERROR",
    "ControlMaster=no",
)
RETRY_DELAYS = (1, 2, 4, 8, 16, 32, 60)
"""Seconds before each attempt to reconnect."""

Result = TypeVar("Result")


class CommandError(Exception):
    """Ends the command with an exit code, and with a message unless the message is empty."""

    def __init__(self, text: str, code: int = 2) -> None:
        super().__init__(text)
        self.code = code


class ConnectionLostError(CommandError):
    """The connection to the host failed or ended early."""

    def __init__(self, text: str) -> None:
        super().__init__(text, SSH_FAILED_EXIT_CODE)


@dataclass(frozen=True)
class Host:
    """A remote machine, the root of the project on it, and the connection."""

    name: str
    root: str
    session: str
    options: tuple[str, ...]
    control: Path

    def ssh(self, *options: str) -> list[str]:
        """Build the ssh command of the connection; the user's options come first, because ssh uses the first value."""
        defaults = [word for option in (*SSH_OPTIONS, f"ControlPath={self.control}") for word in ("-o", option)]
        return ["ssh", *self.options, *options, *defaults, "--", self.name]

    def command(self, action: str, *arguments: object) -> str:
        """Build the remote command that executes an action of there.sh; no shell splits or expands its arguments."""
        text = SCRIPT.read_text(encoding="utf-8")
        return shlex.join(["bash", "-c", text, SCRIPT.name, self.root, self.session, action, *map(str, arguments)])

    def run(self, action: str, *arguments: object, stdin: bytes = b"", capture: bool = False) -> str:
        """Execute an action; its messages go to stderr. Returns its stdout if ``capture``.

        Raises:
            ConnectionLostError: the connection failed.
            CommandError: the action failed and has printed the reason.
        """
        command = [*self.ssh("-T"), self.command(action, *arguments)]
        done = subprocess.run(command, input=stdin, stdout=subprocess.PIPE if capture else None, check=False)
        self.check(done.returncode)
        return os.fsdecode(done.stdout or b"")

    def check(self, code: int) -> None:
        """Raise the error for an exit code of ssh."""
        if code == SSH_FAILED_EXIT_CODE:
            raise ConnectionLostError(f"the connection to {self.name} was lost")
        if code:
            raise CommandError("", code)

    def in_terminal(self, action: str, *arguments: object) -> int:
        """Execute an action with this terminal, if there is one, and return its exit code."""
        terminal = "-tt" if os.isatty(0) and os.isatty(1) else "-T"
        return subprocess.run([*self.ssh(terminal), self.command(action, *arguments)], check=False).returncode

    def control_connection(self, request: str) -> bool:
        """Send a request (``check`` or ``exit``) to the connection. Returns False if there is none."""
        return subprocess.run(self.ssh("-O", request), capture_output=True, check=False).returncode == 0

    def connect(self) -> None:
        """Open the connection.

        Raises:
            ConnectionLostError: the machine does not answer, or rejects the login.
        """
        self.control.unlink(missing_ok=True)  # of a connection that was lost
        # A file, because the connection stays in the background and would keep a pipe open.
        with tempfile.TemporaryFile() as messages:
            command = self.ssh("-o", "ControlMaster=yes", "-N", "-f", "-T")
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=messages, stderr=messages, check=False)
            messages.seek(0)
            lines = messages.read().decode(errors="replace").split("\n")
        if done.returncode:
            reason = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
            raise ConnectionLostError(
                f"{self.name} cannot be reached ({reason}): check REMOTE_HOST, REMOTE_PORT and REMOTE_SSH_OPTIONS"
            )

    def retry(self, function: Callable[[], Result], meanwhile: str) -> Result:
        """Call a function again after each loss of the connection.

        Args:
            function: what needs the connection, and continues where it stopped.
            meanwhile: message about the state of the remote work.

        Raises:
            ConnectionLostError: all attempts of about two minutes to reconnect failed.
        """
        while True:
            with contextlib.suppress(ConnectionLostError):
                return function()
            for delay in RETRY_DELAYS:
                print(f"the connection to {self.name} was lost, {meanwhile}; again in {delay} s", file=sys.stderr)
                time.sleep(delay)
                with contextlib.suppress(ConnectionLostError):
                    self.connect()
                    break
            else:
                raise ConnectionLostError(f"{self.name} does not answer: {meanwhile}")


@contextlib.contextmanager
def connected(environment: Mapping[str, str]) -> Iterator[Host]:
    """Connect to the machine that the environment selects; the connection is closed at the end.

    Raises:
        CommandError: a variable is missing or invalid, or the machine does not answer.
    """
    name = environment.get("REMOTE_HOST") or environment.get("PRIME_HOST") or ""
    if not name or re.search(r"\s", name):
        raise CommandError(f"REMOTE_HOST = {name!r}: export REMOTE_HOST=user@machine, and REMOTE_ROOT=folder there")
    root = (environment.get("REMOTE_ROOT") or "diffusionlm").removeprefix("~/").rstrip("/")
    if root in ("", "~", ".") or ".." in root.split("/") or "\n" in root:
        raise CommandError(f"REMOTE_ROOT = {environment['REMOTE_ROOT']!r} is no folder of its own: name a new one")
    session = environment.get("REMOTE_SESSION") or "diffusionlm"
    if not re.fullmatch(r"[\w-]+", session):
        raise CommandError(f"REMOTE_SESSION = {session!r} is no name for tmux: use letters, digits, - and _")
    port = ["-p", environment["REMOTE_PORT"]] if environment.get("REMOTE_PORT") else []
    try:
        options = shlex.split(environment.get("REMOTE_SSH_OPTIONS", ""))
    except ValueError as error:
        raise CommandError(f"REMOTE_SSH_OPTIONS = {environment['REMOTE_SSH_OPTIONS']!r}: {error}") from error
    with tempfile.TemporaryDirectory(prefix="remote-", ignore_cleanup_errors=True) as folder:
        host = Host(name, root, session, (*port, *options), Path(folder) / "ssh")
        host.connect()
        try:
            yield host
        finally:
            host.control_connection("exit")
