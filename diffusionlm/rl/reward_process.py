"""A Python function of the user that computes rewards, in a process of its own. Standard library only.

Requests and answers are JSON on a socket between the two processes. What the function prints is dropped, and its
standard input is empty.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import reprlib
import signal
import subprocess
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

START_SECONDS = 120.0
"""Time to import the file and what it imports."""
ORPHAN_SECONDS = 5
"""Time beyond the limit after which the process ends itself, if nobody has ended it."""
MAX_ERROR_CHARACTERS = 500
_CODE = "import sys; from diffusionlm.rl.reward_process import serve; serve(*sys.argv[1:])"


class RewardError(ValueError):
    """An answer has no reward: the function failed, or the item or a pattern does not fit."""


class RewardProcess:
    """Calls a function of a file in a process. One that has ended or was too slow is replaced at the next call.

    Args:
        seconds: time limit of a call.
    """

    def __init__(self, path: Path, function: str, seconds: float) -> None:
        self._path, self._function, self._seconds = path, function, seconds
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def start(self) -> None:
        """Start the process and import the file, unless that is done.

        Raises:
            RewardError: the file cannot be imported, or has no such function.
        """
        with self._lock:
            self._connect()

    def call(self, answer: Mapping[str, Any]) -> float | tuple[float, ...]:
        """Call the function with an answer, and return its number, or its numbers.

        Raises:
            RewardError: it raised, took too long, ended its process, or returned something else; or like `start`.
        """
        with self._lock:
            connection = self._connect()
            with contextlib.suppress(OSError):  # the process has ended, as receiving says
                connection.send_bytes(json.dumps(answer, default=str).encode())
            value = self._receive(connection, self._seconds)
        return tuple(value) if isinstance(value, list) else float(value)

    def _connect(self) -> Connection:
        if self._connection is None:
            own, other = Pipe()
            arguments = [str(other.fileno()), str(self._path), self._function, str(self._seconds)]
            with other:
                process = subprocess.Popen(
                    [sys.executable, "-c", _CODE, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[other.fileno()],
                    start_new_session=True,
                )
            self._end = weakref.finalize(self, _end_process, process, own)
            self._receive(own, START_SECONDS)
            self._connection = own
        return self._connection

    def _receive(self, connection: Connection, seconds: float) -> Any:
        """Receive a value. The process is ended if it sends none in time."""
        answer: dict[str, Any] | None = None
        problem = f"took more than {seconds:g} s, and was ended"
        try:
            if connection.poll(seconds):
                answer = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            problem = "ended its process"
        finally:
            if answer is None:
                self._connection, exit_code = None, self._end()
        if answer is None:
            raise RewardError(problem if "took" in problem else f"{problem} (exit code {exit_code})")
        if "error" in answer:
            raise RewardError(answer["error"])
        return answer["value"]


def _end_process(process: subprocess.Popen[bytes], connection: Connection) -> int:
    connection.close()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def serve(file: str, path: str, name: str, seconds: str) -> None:
    """Answer requests in the process of the function, until the other side closes the socket.

    Args:
        file: descriptor of the socket.
    """
    connection = Connection(int(file))
    signal.alarm(int(START_SECONDS) + ORPHAN_SECONDS)  # ends the process by default
    try:
        function = _load_function(path, name)
        answer: dict[str, Any] = {"value": 0.0}
    except BaseException as error:
        answer = {"error": f"cannot be imported: {_describe(error, path)}"}
    while True:
        signal.alarm(0)
        try:
            connection.send_bytes(json.dumps(answer).encode())
            request = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            return
        signal.alarm(math.ceil(float(seconds)) + ORPHAN_SECONDS)
        try:
            answer = _read_result(function(request))
        except BaseException as error:
            answer = {"error": f"raised {_describe(error, path)}"}


def _load_function(path: str, name: str) -> Any:
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    module = types.ModuleType("reward_file")
    module.__file__, sys.modules[module.__name__] = path, module
    with open(path, "rb") as file:
        exec(compile(file.read(), path, "exec"), module.__dict__)
    if not callable(getattr(module, name, None)):
        raise AttributeError(f"it has no function {name!r}")
    return getattr(module, name)


def _read_result(result: Any) -> dict[str, Any]:
    """The numbers of what the function has returned, or the error of what is none."""
    values = result.tolist() if hasattr(result, "tolist") else result  # of numpy, of torch
    try:
        is_list = isinstance(values, list | tuple)
        numbers = [float("nan" if isinstance(value, str) else value) for value in (values if is_list else [values])]
        if all(map(math.isfinite, numbers)):
            return {"value": numbers if is_list else numbers[0]}
    except Exception:
        pass
    return {"error": f"returned {reprlib.repr(result)}, expected a finite number, or a list with one per step"}


def _describe(error: BaseException, path: str) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    text = traceback.format_exception_only(error)[-1].strip()[:MAX_ERROR_CHARACTERS]
    return f"{text} (line {lines[-1]})" if lines else text
