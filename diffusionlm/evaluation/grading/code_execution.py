"""Run programs that a model wrote against tests, in processes of their own.

A program is not trusted. It runs in a fresh interpreter (``-I -S``, no environment, closed standard input) with
limits of time, memory, files and processes. The tests run in another process and see only the plain data that the
program's functions return, so that a program cannot read the tests, fake an equality or write the answer; it counts
as passed only if a random nonce comes back on the pipe of that process. A filter of system calls denies the program
other processes, signals and sockets. Where the kernel allows it (`probe_isolation`), both are in new namespaces as
well: no network, no other processes, no files but the interpreter's and an empty folder in memory, and all that was
started is killed at the end.

This is no sandbox against a determined program: it may exploit the kernel or the interpreter, and without namespaces
it can read and write the files of its user, the memory of the process that runs the evaluation among them. Run
untrusted models in a container or a virtual machine without network. Nothing is run where neither filter nor
namespaces are possible, or where a program would have the rights of root.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from importlib import resources
from typing import Any, Literal

from diffusionlm.evaluation.grading.candidate_process import START_SECONDS

ExecutionStatus = Literal["passed", "failed", "timeout", "ended"]
"""failed: the program or a test raised. timeout: not done in time. ended: the process ended before the tests."""

REMEDY = (
    "Allow namespaces of users or a filter of system calls (Linux on x86-64 or 64-bit ARM), do not run as root, "
    "or run in a container"
)
GRACE_SECONDS = 5.0
"""Time for the supervisor to end after the time limit, before it is killed."""


@dataclass(frozen=True)
class CandidateProgram:
    """A program with its tests."""

    program: str
    """Code that is not trusted: what the model wrote, with the code before it."""
    tests: str
    """Trusted code that calls the entry point; an exception means that the program is wrong."""
    entry_point: str
    """The program's function that the tests call. Arguments and results are copied as plain data: numbers, texts,
    bytes, lists, tuples, sets, dicts and iterators; any other object equals nothing."""
    setup: str = ""
    """Trusted code before the tests, in their namespace, such as helper functions of the prompt."""


@dataclass(frozen=True)
class Isolation:
    """What programs are cut off from."""

    network: bool = False
    processes: bool = False
    """They see no other processes, and none of theirs outlives them."""
    files: bool = False
    """They see no files but those of the interpreter, read-only, and an empty folder in memory."""
    user: bool = False
    """They run as a user of their own; only where root starts them."""

    def describe(self) -> str:
        """Describe what is isolated and what is not, in one line."""
        names = asdict(self)
        parts = [", ".join(name for name in names if names[name] is state) for state in (True, False)]
        return f"isolated: {parts[0] or 'nothing'}; not isolated: {parts[1] or 'nothing'}"


@dataclass(frozen=True)
class ExecutionResult:
    """How a program did."""

    status: ExecutionStatus
    detail: str
    """Why it did not pass; empty if it did."""
    isolation: Isolation = field(default_factory=Isolation)


def run_candidate(
    candidate: CandidateProgram,
    *,
    seconds: float = 5.0,
    memory_bytes: int = 512 << 20,
    file_bytes: int = 16 << 20,
    namespaces: bool = True,
) -> ExecutionResult:
    """Check a program by its tests. None of its processes is left when this returns, as far as `Isolation` says.

    Args:
        seconds: wall-clock time of the program and its tests; the time of its processors has the same limit, rounded
            up.
        memory_bytes: address space of each of its processes.
        file_bytes: size of each file and, in an isolated folder, of all files together.
        namespaces: isolate the program by namespaces of the kernel, where it allows that.

    Raises:
        ValueError: the tests or the setup are no valid code.
        RuntimeError: the supervisor of the program could not run on this machine.
    """
    nonce = secrets.token_hex(16)
    job = {
        **asdict(candidate),
        "nonce": nonce,
        "text": _process_code(),
        "python": os.path.realpath(sys.executable),
        "prefix": os.path.realpath(sys.base_prefix),
        "namespaces": namespaces,
        "seconds": seconds,
        "folder_bytes": file_bytes,
        "limits": {
            "RLIMIT_CPU": int(seconds) + 1,
            "RLIMIT_AS": memory_bytes,
            "RLIMIT_FSIZE": file_bytes,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_NPROC": 4,  # with threads; root without a user of its own for the program has no limit
            "RLIMIT_CORE": 0,
        },
    }
    answer = _run_supervisor(job)
    status, detail = answer["status"], answer["detail"]
    if status == "refused":
        raise RuntimeError(f"no program is run here: {detail}. {REMEDY}")
    if status == "unusable":
        raise ValueError(f"the tests or their setup are no valid code: {detail}")
    if status == "passed" and not secrets.compare_digest(str(answer.get("nonce")), nonce):
        status = "failed"
    return ExecutionResult(status, detail, Isolation(**answer.get("isolation", {})))


@functools.cache
def probe_isolation() -> Isolation:
    """Run a trivial program and return what it was isolated from on this machine.

    Raises:
        RuntimeError: programs cannot be run here.
    """
    candidate = CandidateProgram("def answer(): return 42", "assert answer() == 42", "answer")
    result = run_candidate(candidate, seconds=20.0)
    if result.status != "passed":
        raise RuntimeError(f"a trivial program fails here ({result.status}): {result.detail}")
    return result.isolation


@functools.cache
def _process_code() -> str:
    """Return the code of the processes, a module that an isolated interpreter cannot import."""
    return resources.files(__package__).joinpath("candidate_process.py").read_text(encoding="utf-8")


def _run_supervisor(job: dict[str, Any]) -> dict[str, Any]:
    """Run the supervisor, whose end kills its processes, in a folder of its own, and return its answer, or why there is
    none.
    """
    with tempfile.TemporaryDirectory(prefix="diffusionlm-code-") as folder:
        try:
            process = subprocess.run(
                [job["python"], "-I", "-S", "-c", job["text"], "supervise"],
                input=json.dumps({**job, "folder": folder}).encode(),
                capture_output=True,
                cwd=folder,
                env={},
                start_new_session=True,
                timeout=START_SECONDS + job["seconds"] + GRACE_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return {"status": "timeout", "detail": f"not done within {job['seconds']:g} seconds"}
    try:
        answer: dict[str, Any] = json.loads(process.stdout)
        return answer
    except ValueError:
        if process.returncode == 1:
            message = process.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise RuntimeError(f"the supervisor of programs failed: {message}") from None
        return {"status": "ended", "detail": f"the supervisor ended without an answer (exit code {process.returncode})"}
