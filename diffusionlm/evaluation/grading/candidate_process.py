"""The processes that check a program: a supervisor with the tests and a worker with the program.

Standard library only: `code_execution` starts this file by ``python -I -S -c CODE supervise``. The supervisor isolates
itself as far as the kernel allows (new namespaces, a root directory of its own; only on Linux), starts ``... CODE
work`` with less rights, and runs the tests, in which the program's functions are proxies: arguments and results travel
as plain data, a line of JSON each. So the program never is in one process with the tests or the pipe of the answer. The
functions that isolate return whether they succeeded.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import struct
import subprocess
import sys
import types
from collections.abc import Callable
from typing import IO, Any

MAX_MESSAGE_BYTES = 8 << 20
MAX_DETAIL_CHARACTERS = 500
MAX_ITERATOR_ITEMS = 100_000
START_SECONDS = 20.0
"""Time until the worker has started; it does not count as time of the program."""
PATIENCE_SECONDS = 0.2

FIRST_WORKER_UID = 1_000_000_000
"""Started by root, each worker has a user number from here on: its limit of processes is its own."""

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH = 2
SYS_MOUNT_SETATTR = 442
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store")
"""What an interpreter may need beside its own prefix."""

DENIED_CALLS = {
    # Processes and signals.
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "kill": (62, 129),
    "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "prlimit64": (302, 261), "setpriority": (141, 140),
    # Network and communication.
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "io_uring_setup": (425, 425),
    # Memory beside the address space.
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "memfd_create": (319, 279),
    # Parts of the kernel that programs seldom need.
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
}  # fmt: skip
"""System calls that fail with EPERM for a filtered process: name -> numbers on x86-64 and on 64-bit ARM."""
MACHINES = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}
"""Machine -> column in `DENIED_CALLS`, number of the architecture in <linux/audit.h>, number of ``clone``."""
CLONE_THREAD, CLONE3, FIRST_X32_CALL = 0x10000, 435, 0x40000000
EPERM, ENOSYS = 1, 38


class TimeLimitReached(BaseException):
    """The time of the program is over. Not an `Exception`, so that tests do not catch it."""


class WorkerGone(BaseException):
    """The worker has ended, or has sent what is no answer."""


class CandidateError(Exception):
    """The program raised what is no builtin exception."""


BUILDERS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "iterator": iter,
    "complex": lambda parts: complex(*parts), "range": lambda edges: range(*edges),
}  # fmt: skip
"""Kinds of values that travel as a list."""


def encode_value(value: Any) -> Any:
    """Encode plain data for JSON; other objects become their type's name and truth."""
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return {"int": hex(value)}  # of any length
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, range):
        return {"range": [encode_value(edge) for edge in (value.start, value.stop, value.step)]}
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
        ValueError, TypeError, KeyError, RecursionError: it is no code.
    """
    if code is None or isinstance(code, bool | float | str):
        return code
    if not isinstance(code, dict) or len(code) != 1:
        raise ValueError("no code of a value")
    [(kind, content)] = code.items()
    if kind == "dict":
        return {decode_value(key): decode_value(item) for key, item in content}
    if kind == "opaque":
        return OpaqueValue(str(content[0]), bool(content[1]))
    if kind in ("int", "bytes"):
        return int(content, 16) if kind == "int" else bytes.fromhex(content)
    return BUILDERS[kind]([decode_value(item) for item in content])


class OpaqueValue:
    """Stands for an object that is no plain data: it equals nothing else."""

    def __init__(self, type_name: str, truth: bool) -> None:
        self.type_name, self.truth = type_name, truth

    def __bool__(self) -> bool:
        return self.truth

    def __repr__(self) -> str:
        return f"<{self.type_name}>"


def send_message(file: IO[bytes], message: Any) -> None:
    """Write a line of JSON."""
    file.write(json.dumps(message).encode() + b"\n")
    file.flush()


def receive_message(file: IO[bytes]) -> Any:
    """Read a message of `send_message`.

    Raises:
        EOFError: the other side has closed the pipe.
        ValueError: it is too long, or no JSON.
    """
    line = file.readline(MAX_MESSAGE_BYTES)
    if not line.endswith(b"\n"):
        raise ValueError("it is too long") if len(line) == MAX_MESSAGE_BYTES else EOFError
    return json.loads(line)


def work(request_file: int, answer_file: int) -> None:
    """Run the program, then call its functions as asked. Exits when the supervisor closes the pipe."""
    requests, answers = os.fdopen(request_file, "rb"), os.fdopen(answer_file, "wb")
    send_message(answers, {"is_filtered": filter_system_calls()})
    module = types.ModuleType("candidate")
    sys.modules["candidate"] = module
    while True:
        try:
            request = receive_message(requests)
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
        send_message(answers, answer)


def _describe(error: BaseException) -> str:
    try:
        return str(error)[:MAX_DETAIL_CHARACTERS]
    except Exception:
        return ""


class Worker:
    """The worker's process, as the supervisor sees it. Its answers are awaited until `TimeLimitReached` is raised."""

    def __init__(self, process: subprocess.Popen[bytes], requests: IO[bytes], answers: IO[bytes]) -> None:
        self.process, self.requests, self.answers = process, requests, answers
        self.failure: BaseException | None = None
        """Why the worker cannot be asked any more."""

    def await_start(self) -> bool:
        """Wait until the interpreter has started; return whether it has filtered its system calls."""
        try:
            return bool(receive_message(self.answers)["is_filtered"])
        except EOFError:
            raise WorkerGone(f"the interpreter of the program did not start ({self.end()})") from None

    def ask(self, request: dict[str, Any]) -> Any:
        """Send a request and return the decoded value of its answer; raise the exception of the program."""
        try:
            if self.failure is not None:
                raise self.failure
            send_message(self.requests, request)
            answer = receive_message(self.answers)
            if "error" not in answer:
                return decode_value(answer["value"])
            name, text = map(str, answer["error"])
        except TimeLimitReached as error:
            self.failure = error
            raise
        except (EOFError, BrokenPipeError):
            self.failure = WorkerGone(f"the program ended its process ({self.end()})")
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

    def end(self) -> str:
        """Kill the process, unless it ends by itself at once, and say how it ended."""
        try:
            code = self.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


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
        worker = start_worker(job, uid if has_user else None)
        outcome = check_program(job, worker, isolation)
        worker.process.kill()
        worker.process.wait()
    with open(answer_file, "w") as answers:
        json.dump({**outcome, "isolation": isolation}, answers)
    os._exit(0)


def check_program(job: dict[str, Any], worker: Worker, isolation: dict[str, bool]) -> dict[str, Any]:
    """Run the program and its tests. The nonce is in the outcome only if all tests have passed.

    The worker's filter of system calls is added to ``isolation``.
    """
    signal.signal(signal.SIGALRM, _end_time)
    namespace: dict[str, Any] = {"__name__": "tests"}
    try:
        signal.setitimer(signal.ITIMER_REAL, START_SECONDS)
        if worker.await_start():
            isolation.update(network=True, processes=True)
        elif not isolation["processes"]:
            return {"status": "refused", "detail": "it could kill and start processes"}
        # Again and again, because tests may catch everything.
        signal.setitimer(signal.ITIMER_REAL, job["seconds"], PATIENCE_SECONDS)
        try:
            tests = compile(job["tests"], "tests.py", "exec")
            exec(compile(job["setup"], "setup.py", "exec"), namespace)
        except Exception as error:
            return {"status": "unusable", "detail": _format(error)}
        worker.ask({"program": job["program"]})
        namespace[job["entry_point"]] = worker.proxy(job["entry_point"])
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


def _end_time(*_: object) -> None:
    raise TimeLimitReached


def _format(error: BaseException) -> str:
    return f"{type(error).__name__}: {_describe(error)}".removesuffix(": ").removeprefix("CandidateError: ")


def start_worker(job: dict[str, Any], uid: int | None) -> Worker:
    """Start the worker with its limits, in the working directory, as a user of its own if ``uid`` is given."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    request_reader, request_writer = os.pipe()
    answer_reader, answer_writer = os.pipe()

    def limit() -> None:
        control_process(PR_SET_NO_NEW_PRIVS, 1)
        control_process(PR_SET_PDEATHSIG, signal.SIGKILL)
        for name, value in job["limits"].items():
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(getattr(resource, name), (value, value))

    process = subprocess.Popen(
        [job["python"], "-I", "-S", "-c", job["text"], "work", str(request_reader), str(answer_writer)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(request_reader, answer_writer),
        preexec_fn=limit,
        env={},
        start_new_session=True,
        user=uid,
        group=uid,
        extra_groups=None if uid is None else [],
    )
    os.close(request_reader)
    os.close(answer_writer)
    return Worker(process, os.fdopen(request_writer, "wb"), os.fdopen(answer_reader, "rb"))


def enter_namespaces() -> tuple[bool, bool]:
    """Enter new namespaces of network, processes, files and, unless root may do without, users.

    Returns:
        Whether the others were entered, and whether that of users was.
    """
    flags = CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNS
    if os.geteuid() == 0 and _call("unshare", flags):
        return True, False
    user, group = os.geteuid(), os.getegid()
    if not _call("unshare", CLONE_NEWUSER | flags):
        return False, False
    for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return True, True


def continue_as_first_process() -> None:
    """Fork into the new namespace of processes, in which the end of the first process kills all others.

    Returns in the child, which ends with its parent. The parent waits for it, and exits like it.
    """
    process = os.fork()
    if not process:
        control_process(PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    _, status = os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def enter_root(folder: str, prefix: str, size: int) -> bool:
    """Change to a root directory with the system's programs and ``prefix``, read-only, and an empty ``/work``.

    Args:
        folder: where the root directory is put together; nothing of it outlives the namespace.
        prefix: folder of the interpreter.
        size: bytes of all files in ``/work``.
    """
    if not _call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None):
        return False
    if not _call("mount", b"tmpfs", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, b"size=1m,mode=755"):
        return False
    try:
        paths = [*SYSTEM_FOLDERS, "/dev/null", "/dev/urandom", prefix]
        is_built = all(_bind(path, folder + path) for path in paths if os.path.lexists(path))
        os.mkdir(f"{folder}/work")
    except OSError:
        is_built = False
    options = f"size={size},nr_inodes=1000,mode=777".encode()
    if (
        not is_built
        or not _set_read_only(folder)
        or not _call("mount", b"tmpfs", f"{folder}/work".encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options)
    ):
        _call("umount2", folder.encode(), MNT_DETACH)
        return False
    os.chroot(folder)
    os.chdir("/work")
    return True


def _bind(path: str, target: str) -> bool:
    """Show a file or folder at the same place in the new root; a link is copied."""
    if os.path.lexists(target):
        return True  # inside a folder that is there already
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return True
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT, 0o666))
    return _call("mount", path.encode(), target.encode(), None, MS_BIND | MS_REC, None)


def _set_read_only(folder: str) -> bool:
    """Make all mounts below a folder read-only (mount_setattr, Linux 5.12)."""
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    return _call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, folder.encode(), AT_RECURSIVE, ctypes.byref(attributes), 32)


def filter_system_calls() -> bool:
    """Deny `DENIED_CALLS` to this process, for good: it starts no processes, signals none and opens no sockets."""
    machine = MACHINES.get(platform.machine())
    if machine is None:
        return False
    column, architecture, clone = machine
    numbers = [pair[column] for pair in DENIED_CALLS.values() if pair[column] is not None]
    # Instructions of the Berkeley packet filter: code, jumps if true and if false, operand.
    load, jump_equal, jump_not_less, jump_bits, leave = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, deny, missing = 0x7FFF0000, 0x50000 | EPERM, 0x50000 | ENOSYS
    steps = [(load, 0, 0, 4), (jump_equal, 1, 0, architecture), (leave, 0, 0, deny), (load, 0, 0, 0)]
    steps += [(jump_not_less, 0, 1, FIRST_X32_CALL), (leave, 0, 0, deny)]
    steps += [(jump_equal, 0, 1, CLONE3), (leave, 0, 0, missing)]  # so that threads are started by clone
    for number in numbers:
        steps += [(jump_equal, 0, 1, number or 0), (leave, 0, 0, deny)]
    steps += [(jump_equal, 1, 0, clone), (leave, 0, 0, allow)]
    steps += [(load, 0, 0, 16), (jump_bits, 1, 0, CLONE_THREAD), (leave, 0, 0, deny), (leave, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
    if not control_process(PR_SET_NO_NEW_PRIVS, 1):
        return False
    return _call("prctl", PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0)


def control_process(option: int, value: int) -> bool:
    """Set an option of this process by ``prctl``; False: the kernel refuses."""
    return _call("prctl", option, value, 0, 0, 0)


def _call(name: str, *arguments: Any) -> bool:
    """Call a function of the C library; return whether it exists and succeeds."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is None:
        return False
    typed = [ctypes.c_ulong(value) if isinstance(value, int) and value >= 0 else value for value in arguments]
    return bool(function(*typed) == 0)


def is_public(path: str) -> bool:
    """Whether every user of the machine can reach and run the file."""
    while os.stat(path).st_mode & 0o001:
        if path == "/":
            return True
        path = os.path.dirname(path)
    return False


if __name__ == "__main__":
    work(*map(int, sys.argv[2:])) if sys.argv[1] == "work" else supervise()
