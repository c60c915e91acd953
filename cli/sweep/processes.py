"""A run as a process: started, asked to stop, and what it left in its log."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import config
from profiling.torch_setup import drivers

ERROR_LINES = 5
_LINE_LENGTH = 300
_TAIL_BYTES = 65_536


def build_command(module: str, config_path: Path, overrides: Sequence[str] = ()) -> list[str]:
    """The same Python, and a command of this project, whatever lies in the working directory."""
    settings = [part for override in overrides for part in ("--set", override)]
    return [sys.executable, "-P", "-m", module, "--config", str(config_path), *settings]


def build_environment() -> Mapping[str, str]:
    """That of the sweep, so that the runs use its code, write at once, and draw no bars into a log."""
    root = str(Path(config.__file__ or "").parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


@dataclass
class RunProcess:
    """A run under way, in a session of its own: a Ctrl-C in the terminal reaches it through `send_signal` alone."""

    name: str
    log: Path
    log_start: int
    """Bytes of the log that earlier parts of the run wrote."""
    popen: subprocess.Popen[bytes]
    started: float
    gpu: str | None = None
    """The one that it was given; None: all there are."""

    @property
    def elapsed(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self.started

    def send_signal(self, number: int = signal.SIGINT) -> None:
        """A signal to the run and all its processes; one that has ended gets none."""
        if self.popen.poll() is None:
            try:
                os.killpg(self.popen.pid, number)
            except ProcessLookupError:
                return

    def wait_or_kill(self, seconds: float) -> None:
        """Wait for its end; kill it if that takes longer."""
        try:
            self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self.send_signal(signal.SIGKILL)
            self.popen.wait()

    def last_lines(self, count: int = ERROR_LINES) -> list[str]:
        """Of what this part of the run wrote."""
        return last_lines(self.log, count, self.log_start)


def start(name: str, command: Sequence[str], log: Path, extra_environment: Mapping[str, str]) -> RunProcess:
    """Start a run; its output goes to the end of a log.

    Args:
        name: of the run.
        command: of the process.
        log: of all its parts.
        more: what its environment has beside that of the sweep.

    Raises:
        OSError: the log cannot be written, or there is no memory for a process.
    """
    with log.open("ab") as file:
        begin = file.tell()
        file.write(f"$ {shlex.join(command)}\n".encode())
        file.flush()
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**build_environment(), **extra_environment},
            start_new_session=True,
        )
    return RunProcess(name, log, begin, popen, time.monotonic(), extra_environment.get(VISIBLE_DEVICES_VARIABLE))


def last_lines(log: Path, count: int, begin: int = 0) -> list[str]:
    """The last lines of a log that are not empty, from byte ``begin`` on, without the line of the command."""
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
    """As CUDA_VISIBLE_DEVICES would name them; empty where there are none."""
    named = os.environ.get(VISIBLE_DEVICES_VARIABLE)
    return [str(index) for index in range(len(drivers()))] if named is None else [*filter(None, named.split(","))]


VISIBLE_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"


class SignalQueue:
    """A context in which SIGINT, SIGTERM, SIGHUP and SIGUSR1 are remembered, one by one."""

    HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

    def __init__(self) -> None:
        self.first: int | None = None
        """The one that the sweep ends for."""
        self._waiting: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalQueue:
        self._before = {number: signal.signal(number, self._remember) for number in self.HANDLED}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take(self) -> int | None:
        """The next one that came, if any."""
        return self._waiting.pop(0) if self._waiting else None

    def _remember(self, number: int, frame: object) -> None:
        self.first = self.first or number
        self._waiting.append(number)
