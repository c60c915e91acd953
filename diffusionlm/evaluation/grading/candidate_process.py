"""The processes that check a program: a supervisor with the tests and a worker with the program.

Standard library only: `code_execution` starts this code by ``python -I -S -c CODE supervise``. The supervisor
isolates itself as far as the kernel allows, starts ``... CODE work`` with less rights, and runs the tests, in which
the program's functions are proxies: arguments and results travel as plain data. So the program never is in one
process with the tests, their expected values or the pipe of the answer.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

from diffusionlm.evaluation.grading.process_isolation import (
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    continue_as_first_process,
    control_process,
    enter_namespaces,
    enter_root,
    filter_system_calls,
    is_public,
)

MAX_MESSAGE_BYTES = 8 << 20
MAX_OUTPUT_BYTES = 64 << 10
MAX_DETAIL_CHARACTERS = 500
MAX_ITERATOR_ITEMS = 100_000
START_SECONDS = 20.0
"""Time until the worker has started; it does not count as time of the program."""

FIRST_WORKER_UID = 1_000_000_000
"""Started by root, workers have user numbers from here on, which nobody has: each its own, so that the limit of
processes counts those of one program."""


class TimeLimitReached(BaseException):
    """The time of the program is over. Not an `Exception`, so that tests do not catch it."""


class WorkerGone(BaseException):
    """The worker has ended, or has sent what is no answer."""


class CandidateError(Exception):
    """The program raised what is no builtin exception."""


def encode_value(value: Any) -> Any:
    """Encode plain data for JSON; other objects become their type's name and truth."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return {"int": hex(value)}
    if isinstance(value, float):
        return {"float": float.__repr__(value)}
    if isinstance(value, complex):
        return {"complex": [value.real.__repr__(), value.imag.__repr__()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, range):
        return {"range": [hex(value.start), hex(value.stop), hex(value.step)]}
    if isinstance(value, dict):
        return {"dict": [[encode_value(key), encode_value(item)] for key, item in value.items()]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode_value(item) for item in value]}
    if hasattr(value, "__next__") or isinstance(value, type({}.keys()) | type({}.values()) | type({}.items())):
        return {"iterator": [encode_value(item) for item, _ in zip(value, range(MAX_ITERATOR_ITEMS), strict=False)]}
    return {"opaque": [type(value).__name__, bool(value)]}


def decode_value(code: Any) -> Any:
    """Decode `encode_value`. The code may be anything a program sends.

    Raises:
        ValueError, TypeError, RecursionError: it is no code.
    """
    if code is None or isinstance(code, bool | str):
        return code
    if not isinstance(code, dict) or len(code) != 1:
        raise ValueError("no code of a value")
    [(kind, content)] = code.items()
    if kind == "dict":
        return {decode_value(key): decode_value(item) for key, item in content}
    if kind in ("list", "tuple", "set", "frozenset", "iterator"):
        return _COLLECTIONS[kind](decode_value(item) for item in content)
    if kind == "complex":
        return complex(*map(float, content))
    if kind == "range":
        return range(*(int(edge, 16) for edge in content))
    if kind == "opaque":
        return OpaqueValue(str(content[0]), bool(content[1]))
    return _SCALARS[kind](content)


def _iterate(items: Iterator[Any]) -> Iterator[Any]:
    return iter(list(items))


def _parse_hex(digits: str) -> int:
    return int(digits, 16)


_SCALARS: dict[str, Callable[[Any], Any]] = {"int": _parse_hex, "float": float, "bytes": bytes.fromhex}
_COLLECTIONS: dict[str, Callable[[Iterator[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "iterator": _iterate,
}


class OpaqueValue:
    """Stands for an object that is no plain data: it equals nothing else."""

    def __init__(self, type_name: str, truth: bool) -> None:
        self.type_name, self.truth = type_name, truth

    def __bool__(self) -> bool:
        return self.truth

    def __repr__(self) -> str:
        return f"<{self.type_name}>"


def send_message(file: int, message: Any) -> None:
    """Write a message with its length before it."""
    data = json.dumps(message).encode()
    data = len(data).to_bytes(8, "big") + data
    while data:
        data = data[os.write(file, data) :]


def receive_bytes(file: int, size: int, deadline: float | None) -> bytes:
    """Read exactly so many bytes.

    Raises:
        TimeLimitReached: the deadline, in seconds of `time.monotonic`, has passed.
        EOFError: the other side has closed the pipe.
    """
    parts, remaining = [], size
    while remaining:
        if deadline is not None and not select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeLimitReached
        part = os.read(file, min(remaining, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        remaining -= len(part)
    return b"".join(parts)


def receive_message(file: int, deadline: float | None = None) -> Any:
    """Read a message of `send_message`.

    Raises:
        ValueError: it is too long, or no JSON.
    """
    size = int.from_bytes(receive_bytes(file, 8, deadline), "big")
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size:,} bytes is over the limit of {MAX_MESSAGE_BYTES:,}")
    return json.loads(receive_bytes(file, size, deadline))


REQUESTS, ANSWERS = 3, 4
"""Files of the worker."""


def work() -> None:
    """Run the program, then call its functions as asked. Exits when the supervisor closes the pipe."""
    send_message(ANSWERS, {"is_filtered": filter_system_calls()})
    module = types.ModuleType("candidate")
    sys.modules["candidate"] = module
    while True:
        try:
            request = receive_message(REQUESTS)
        except EOFError:
            os._exit(0)
        try:
            answer: dict[str, Any]
            if "program" in request:
                exec(compile(request["program"], "program.py", "exec"), module.__dict__)
                answer = {"value": None}
            else:
                function = eval(request["name"], module.__dict__)
                arguments, named = decode_value(request["arguments"]), decode_value(request["named"])
                answer = {"value": encode_value(function(*arguments, **named))}
        except BaseException as error:
            answer = {"error": [type(error).__name__, _describe(error)]}
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        send_message(ANSWERS, answer)


def _describe(error: BaseException) -> str:
    try:
        return str(error)[:MAX_DETAIL_CHARACTERS]
    except Exception:
        return ""


class Worker:
    """The worker's process, as the supervisor sees it."""

    def __init__(self, process: int, requests: int, answers: int) -> None:
        self.process, self.requests, self.answers = process, requests, answers
        self.deadline = time.monotonic() + START_SECONDS
        self.failure: BaseException | None = None
        """Why the worker cannot be asked any more."""
        self.ending = ""
        """How its process has ended."""

    def await_start(self) -> bool:
        """Wait until the interpreter has started; return whether it has filtered its system calls."""
        try:
            return bool(receive_message(self.answers, self.deadline)["is_filtered"])
        except EOFError:
            raise WorkerGone(
                f"the interpreter of the program did not start ({self.kill(patience_seconds=0.2)})"
            ) from None

    def ask(self, request: dict[str, Any]) -> Any:
        """Send a request and return the decoded value of its answer; raise the exception of the program."""
        try:
            if self.failure is not None:
                raise self.failure
            send_message(self.requests, request)
            answer = receive_message(self.answers, self.deadline)
            if "error" not in answer:
                return decode_value(answer["value"])
            name, text = map(str, answer["error"])
        except TimeLimitReached as error:
            self.failure = error
            raise
        except (EOFError, BrokenPipeError):
            self.failure = WorkerGone(f"the program ended its process ({self.kill(patience_seconds=0.2)})")
            raise self.failure from None
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
            self.failure = WorkerGone(f"the program sent an answer that cannot be read ({error})")
            raise self.failure from None
        kind = getattr(builtins, name, None)
        is_builtin = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError)
        raise kind(text) if is_builtin else CandidateError(f"{name}: {text}")  # type: ignore[misc]

    def proxy(self, name: str) -> Callable[..., Any]:
        """Return a function that calls the program's function of this name."""

        def call(*arguments: Any, **named: Any) -> Any:
            return self.ask({"name": name, "arguments": encode_value(arguments), "named": encode_value(named)})

        return call

    def kill(self, patience_seconds: float = 0.0) -> str:
        """Kill the process, unless it ends by itself in time, and say how it ended."""
        if self.ending:
            return self.ending
        for _ in range(round(100 * patience_seconds)):
            process, status = os.waitpid(self.process, os.WNOHANG)
            if process:
                break
            time.sleep(0.01)
        else:
            os.kill(self.process, signal.SIGKILL)
            _, status = os.waitpid(self.process, 0)
        code = os.waitstatus_to_exitcode(status)
        self.ending = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return self.ending


def supervise() -> None:
    """Read the job from standard input, check the program and write the outcome to standard output."""
    job = json.loads(sys.stdin.buffer.read())
    os.umask(0o022)
    answer_file = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1):
        os.dup2(nothing, file)
    is_root, uid = os.geteuid() == 0, FIRST_WORKER_UID + os.getpid()
    has_namespaces, has_user_namespace = enter_namespaces() if job["namespaces"] else (False, False)
    if has_namespaces:
        continue_as_first_process()
    control_process(PR_SET_DUMPABLE, 0)
    has_root = has_namespaces and enter_root(job["folder"], job["prefix"], job["folder_bytes"])
    has_user = is_root and not has_user_namespace and (has_root or is_public(job["python"]))
    if not has_root:
        os.chdir(job["folder"])
        if has_user:
            os.chown(job["folder"], uid, uid)
    isolation = {"network": has_namespaces, "processes": has_namespaces, "files": has_root, "user": has_user}
    if is_root and not (has_root or has_user):
        outcome = {"status": "refused", "detail": "it would have the rights of root"}
    else:
        output_file = os.open("output", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        os.unlink("output")
        worker = start_worker(job, output_file, uid if has_user else None)
        outcome = check_program(job, worker, isolation)
        worker.kill()
        outcome["output"] = os.pread(output_file, MAX_OUTPUT_BYTES, 0).decode("utf-8", "replace")
    with open(answer_file, "w") as answers:
        json.dump({**outcome, "isolation": isolation}, answers)
    os._exit(0)


def check_program(job: dict[str, Any], worker: Worker, isolation: dict[str, bool]) -> dict[str, Any]:
    """Run the program and its tests. The nonce is in the outcome only if all tests have passed.

    The worker's filter of system calls is added to ``isolation``.
    """
    signal.signal(signal.SIGALRM, _raise_time_limit)
    namespace: dict[str, Any] = {"__name__": "tests"}
    try:
        if worker.await_start():
            isolation.update(network=True, processes=True)
        elif not isolation["processes"]:
            return {"status": "refused", "detail": "it could kill and start processes"}
        worker.deadline = time.monotonic() + job["seconds"]
        signal.setitimer(signal.ITIMER_REAL, job["seconds"])
        try:
            tests = compile(job["tests"], "tests.py", "exec")
            exec(compile(job["setup"], "setup.py", "exec"), namespace)
        except Exception as error:
            return {"status": "unusable", "detail": _format(error)}
        worker.ask({"program": job["program"]})
        for name in job["entry_points"]:
            namespace[name] = worker.proxy(name)
        exec(tests, namespace)
        if worker.failure is not None:
            raise worker.failure
        return {"status": "passed", "detail": "", "nonce": job["nonce"]}
    except TimeLimitReached:
        return {"status": "timeout", "detail": f"not done within {job['seconds']:g} seconds"}
    except WorkerGone as error:
        return {"status": "ended", "detail": str(error)}
    except BaseException as error:
        return {"status": "failed", "detail": _format(error)}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _raise_time_limit(*_: Any) -> None:
    raise TimeLimitReached


def _format(error: BaseException) -> str:
    return f"{type(error).__name__}: {_describe(error)}".removesuffix(": ").removeprefix("CandidateError: ")


def start_worker(job: dict[str, Any], output_file: int, uid: int | None) -> Worker:
    """Start the worker with its limits, in the working directory, as a user of its own if ``uid`` is given."""
    request_reader, request_writer = os.pipe()
    answer_reader, answer_writer = os.pipe()
    process = os.fork()
    if process:
        os.close(request_reader)
        os.close(answer_writer)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        return Worker(process, request_writer, answer_reader)
    try:
        os.setsid()
        files = [
            os.dup2(os.open(os.devnull, os.O_RDONLY), 100),
            output_file,
            output_file,
            request_reader,
            answer_writer,
        ]
        files = [os.dup2(file, 101 + index) for index, file in enumerate(files)]
        for index, file in enumerate(files):
            os.dup2(file, index)
        os.closerange(5, 1 << 16)
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        control_process(PR_SET_NO_NEW_PRIVS, 1)
        control_process(PR_SET_PDEATHSIG, signal.SIGKILL)
        for name, limit in job["limits"].items():
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(getattr(resource, name), (limit, limit))
        os.execve(job["python"], [job["python"], "-I", "-S", "-c", job["text"], "work"], {})
    finally:
        os._exit(127)


def main() -> None:
    """Run as the supervisor or as the worker."""
    {"supervise": supervise, "work": work}[sys.argv[1]]()
