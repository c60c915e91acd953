"""Commands that sweeps and pipelines run in processes of their own, which end with the process that started them.

A child has the read end of a pipe that its parent holds open and never writes to: the end of the pipe is the end of the
parent, also by kill -9. Otherwise two processes of one run would write into one directory.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import config
from files.stop_signals import list_stop_signals

POLL_SECONDS = 0.1
SAVE_TIMEOUT_SECONDS = 120.0
"""Time for a child to save after an error of its parent."""
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


@contextlib.contextmanager
def collect_stop_signals() -> Iterator[list[int]]:
    """Context in which stop signals do not end this process, but are appended to a list."""
    received: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, frame: received.append(number)) for number in list_stop_signals()
    }
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run_child(
    command: Sequence[str],
    signals: Sequence[int],
    *,
    handles_all_signals: bool,
    log: Path | None = None,
    variables: Mapping[str, str] | None = None,
    lock: int | None = None,
    on_poll: Callable[[subprocess.Popen[bytes]], object] = lambda process: None,
) -> int:
    """Run a command in a session of its own: Ctrl-C reaches it only as one of ``signals``.

    Args:
        signals: a list of `collect_stop_signals`; each is sent to the process once.
        handles_all_signals: training saves at all of them; False: SIGINT is sent instead, at which other commands end
            in order.
        log: receives its output, after that of earlier processes; None: it prints where this process does.
        variables: of its environment, besides those of this process.
        lock: file descriptor of a lock that it inherits.
        on_poll: called every `POLL_SECONDS` and after its end. At an error the process gets SIGINT and time to save.

    Returns:
        Its exit code; negative: the signal that ended it.

    Raises:
        OSError: the log cannot be written, or the process cannot be started.
    """
    with contextlib.ExitStack() as stack:
        read_end, write_end = os.pipe()
        stack.callback(os.close, write_end)
        try:
            output = None if log is None else stack.enter_context(log.open("ab", buffering=0))
            if output is not None:
                output.write(f"$ {shlex.join(command)}\n".encode())
            process = subprocess.Popen(
                command,
                stdin=read_end,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                env=build_environment(variables or {}),
                pass_fds=() if lock is None else (lock,),
                start_new_session=True,
            )
        finally:
            os.close(read_end)
        stack.callback(_end, process)
        num_sent = 0
        while (code := process.poll()) is None:
            for number in signals[num_sent:]:
                process.send_signal(number if handles_all_signals else signal.SIGINT)
                num_sent += 1
            on_poll(process)
            time.sleep(POLL_SECONDS)
        on_poll(process)
        return code


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let a process save that is still active, and kill it and its own processes after `SAVE_TIMEOUT_SECONDS`."""
    process.send_signal(signal.SIGINT)  # nothing is sent to a process that has ended
    try:
        process.wait(SAVE_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_last_lines(log: Path, count: int) -> list[str]:
    """Read the last non-empty lines that the last process of a log has written."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    own = f"\n{text}".rpartition("\n$ ")[2].partition("\n")[2] if "\n$ " in f"\n{text}" else text
    lines = [line for line in map(str.rstrip, own.replace("\r", "\n").split("\n")) if line]
    return [line if len(line) <= _LINE_LENGTH else f"{line[:_LINE_LENGTH]}..." for line in lines[-count:]]


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
