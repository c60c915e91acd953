"""Start and stop the process of a run, and read its log."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import config
from files.stop_signals import list_stop_signals
from profiling.torch_setup import drivers

VISIBLE_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
_LINE_LENGTH = 300
_TAIL_BYTES = 65_536


def build_command(module: str, config_path: Path, overrides: Sequence[str] = ()) -> list[str]:
    """Build the command line of a module of this project; ``-P`` ignores modules in the working directory."""
    arguments = [part for override in overrides for part in ("--set", override)]
    return [sys.executable, "-P", "-m", module, "--config", str(config_path), *arguments]


def build_environment() -> Mapping[str, str]:
    """The environment of this process, with this project on the path and unbuffered output."""
    root = str(Path(config.__file__ or "").parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


class RunProcess:
    """A process in its own session: Ctrl-C does not reach it directly, only through `send_signal`.

    Args:
        command: its command line.
        log: receives its output, behind that of earlier processes of the run.
        lock: file descriptor that it inherits.
        gpu: the GPU that it uses; None: all.

    Raises:
        OSError: the log cannot be written, or the process cannot be started.
    """

    def __init__(self, command: Sequence[str], log: Path, lock: int, gpu: str | None = None) -> None:
        self.gpu, self._log, self._started = gpu, log, time.monotonic()
        with log.open("ab") as file:
            self._log_start = file.tell()
            file.write(f"$ {shlex.join(command)}\n".encode())
            file.flush()
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**build_environment(), **({} if gpu is None else {VISIBLE_DEVICES_VARIABLE: gpu})},
                pass_fds=(lock,),
                start_new_session=True,
            )

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def poll(self) -> int | None:
        """Return the exit code (negative: the signal that ended it); None while the process is active."""
        return self._popen.poll()

    def send_signal(self, number: int) -> None:
        """Send a signal to the process group if the process is still active."""
        if self.poll() is None:
            try:
                os.killpg(self._popen.pid, number)
            except ProcessLookupError:
                return

    def wait_or_kill(self, seconds: float) -> None:
        """Wait for the end of the process, and kill it after ``seconds``."""
        try:
            self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self.send_signal(signal.SIGKILL)
            self._popen.wait()

    def last_lines(self, count: int) -> list[str]:
        """Read the last lines that this process wrote."""
        return last_lines(self._log, count, self._log_start)


def last_lines(log: Path, count: int, begin: int = 0) -> list[str]:
    """Read the last non-empty lines of a log from byte ``begin`` on, without command lines."""
    try:
        with log.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(begin, end - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = [line.rstrip() for line in text.replace("\r", "\n").split("\n")]
    lines = [line for line in lines if line and not line.startswith("$ ")]
    return [line if len(line) <= _LINE_LENGTH else f"{line[:_LINE_LENGTH]}..." for line in lines[-count:]]


def visible_gpus() -> list[str]:
    """List the GPUs as in CUDA_VISIBLE_DEVICES."""
    devices = os.environ.get(VISIBLE_DEVICES_VARIABLE)
    return [str(index) for index in range(len(drivers()))] if devices is None else [*filter(None, devices.split(","))]


class SignalQueue:
    """A context that queues the stop signals."""

    def __init__(self) -> None:
        self.first: int | None = None
        """The signal that ended the sweep."""
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
