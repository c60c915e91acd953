"""Commands that sweeps and pipelines run in processes of their own, which end with the process that started them.

A child has the read end of a pipe that its parent holds open and never writes to: the end of the pipe is the end of the
parent, also by kill -9. Otherwise two processes of one run would write into one directory.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import config
from files.stop_signals import list_stop_signals

_LINE_LENGTH = 300
_TAIL_BYTES = 65_536


def build_command(name: str, config_path: Path, overrides: Sequence[str] = ()) -> list[str]:
    """Build the command line of the command ``diffusionlm-NAME``; ``-P`` ignores modules in the working directory."""
    arguments = [part for override in overrides for part in ("--set", override)]
    return [sys.executable, "-P", "-m", "cli.child_process", name, "--config", str(config_path), *arguments]


def build_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process with these variables, this project on the path and unbuffered output."""
    root = str(Path(config.__file__ or "").parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **variables}


class ChildProcess:
    """A command in its own session: Ctrl-C does not reach it directly, only through `send_signal`.

    Args:
        command: its command line.
        log: receives its output, after that of earlier processes; None: it prints where this process does.
        variables: variables of its environment, besides those of this process.
        lock: file descriptor of a lock that it inherits.

    Raises:
        OSError: the log cannot be written, or the process cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path | None = None,
        variables: Mapping[str, str] | None = None,
        lock: int | None = None,
    ) -> None:
        self._log, self._log_start, self._started = log, 0, time.monotonic()
        output = None if log is None else log.open("ab")
        read_end, self._write_end = os.pipe()
        try:
            if output is not None:
                self._log_start = output.tell()
                output.write(f"$ {shlex.join(command)}\n".encode())
                output.flush()
            self._process = subprocess.Popen(
                command,
                stdin=read_end,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                env=build_environment(variables or {}),
                pass_fds=() if lock is None else (lock,),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._write_end)
            raise
        finally:
            os.close(read_end)
            if output is not None:
                output.close()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def poll(self) -> int | None:
        """Return the exit code (negative: the signal that ended it); None while the process is active."""
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        """Send a signal to the process if it is still active; a launcher of several ranks forwards it."""
        self._process.send_signal(number)

    def close(self, timeout_seconds: float = 0.0) -> None:
        """Wait for the end of the process, and kill it and its own processes after ``timeout_seconds``."""
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        finally:
            os.close(self._write_end)

    def last_lines(self, count: int) -> list[str]:
        """Read the last non-empty lines that this process wrote to its log."""
        assert self._log is not None
        with self._log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
        lines = [line.rstrip() for line in text.replace("\r", "\n").split("\n")]
        lines = [line for line in lines if line and not line.startswith("$ ")]
        return [line if len(line) <= _LINE_LENGTH else f"{line[:_LINE_LENGTH]}..." for line in lines[-count:]]


class SignalQueue:
    """A context that queues the stop signals."""

    def __init__(self) -> None:
        self.first: int | None = None
        """The first signal that arrived."""
        self._waiting: list[int] = []
        self._original_handlers: dict[int, Any] = {}

    def __enter__(self) -> SignalQueue:
        self._original_handlers = {number: signal.signal(number, self._enqueue) for number in list_stop_signals()}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._original_handlers.items():
            signal.signal(number, handler)

    def take(self) -> int | None:
        """Remove and return the next signal, if there is one."""
        return self._waiting.pop(0) if self._waiting else None

    def _enqueue(self, number: int, frame: object) -> None:
        self.first = self.first or number
        self._waiting.append(number)


def main() -> int:
    """Run the command in the first argument with the other arguments. Returns its exit code."""
    from cli.commands import COMMANDS

    pipe = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    return COMMANDS[sys.argv[1]](sys.argv[2:])


def _end_with_parent(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
