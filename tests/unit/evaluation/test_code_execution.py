"""Running of untrusted programs: right ones pass, all others fail within their limits, and nothing is left of them."""

from __future__ import annotations

import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffusionlm.evaluation.grading import code_execution
from diffusionlm.evaluation.grading.candidate_process import decode_value, encode_value
from diffusionlm.evaluation.grading.code_execution import (
    CandidateProgram,
    ExecutionResult,
    probe_isolation,
    run_candidate,
)

MEMORY_BYTES = (192 << 20) + 4096 * os.getpid()
"""A limit that only processes started here have, so that they can be found."""
SECONDS, FILE_BYTES = 2.0, 1 << 20


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test, no process and no file is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.iterdir()) == []
    assert [path for path in Path("/proc").glob("[0-9]*/limits") if str(MEMORY_BYTES) in read_if_there(path)] == []


def read_if_there(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process has ended
        return ""


def check(program: str, seconds: float = SECONDS, tests: str = "assert f(1) == 2") -> ExecutionResult:
    candidate = CandidateProgram(program, tests, "f")
    return run_candidate(candidate, seconds=seconds, memory_bytes=MEMORY_BYTES, file_bytes=FILE_BYTES)


def test_a_right_program_passes() -> None:
    result = check("print('hello' * 10**6)\ndef f(x): print('called'); return x + 1")
    assert (result.status, result.detail) == ("passed", "")
    assert result.isolation == probe_isolation()


FAILING = {
    "wrong": ("def f(x): return x", "failed", "AssertionError"),
    "exit of the process": ("import os\nos._exit(0)", "ended", "exit code 0"),
    "number equal to everything": (
        "class Y(int):\n  def __eq__(s, o): return True\n  __hash__ = int.__hash__\ndef f(x): return Y(7)",
        "failed",
        "AssertionError",
    ),
    "child": ("import os\ndef f(x): return os.fork()", "failed", "PermissionError"),
    "nested answer": ("def f(x):\n  a = []\n  for _ in range(10**5): a = [a]\n  return a", "failed", "RecursionError"),
    "forged answers": (
        "import os, sys\nos.write(int(sys.argv[3]), b'\\xff' * 100)\ndef f(x): return 2",
        "ended",
        "cannot be read",
    ),
    "closed files": ("import os\nos.closerange(0, 99)\ndef f(x): return 2", "ended", "exit code"),
    "its own error": ("class E(BaseException): pass\ndef f(x): raise E('x' * 10**6)", "failed", "E: xxx"),
    "memory": ("def f(x): return len(bytearray(10**10))", "failed", "MemoryError"),
    "files": ("def f(x):\n  open('a', 'wb').write(bytes(2 << 20)); return 2", "failed", "OSError"),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_wrong_program_fails(name: str) -> None:
    program, status, detail = FAILING[name]
    result = check(program)
    assert result.status == status and detail in result.detail
    assert len(result.detail) < 600


def test_time_is_limited() -> None:
    result = check("import signal\nfor n in (1, 2, 14, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: pass", 0.3)
    assert (result.status, result.detail) == ("timeout", "not done within 0.3 seconds")
    sleeping = check("import time\ndef f(x): time.sleep(99)", 0.3, "try:\n  f(1)\nexcept BaseException:\n  pass")
    assert sleeping.status == "timeout", "also if the tests catch everything"


READING = """
import gc, os, sys
found = [repr(o) for o in gc.get_objects() if isinstance(o, dict) and ("nonce" in o or "tests" in o)]
frame = sys._getframe()
while frame:
    found += [name for name in (*frame.f_locals, *frame.f_globals) if name in ("nonce", "tests", "job")]
    frame = frame.f_back
files = []
for file in range(1000):
    try:
        os.fstat(file)
        files.append(file)
    except OSError:
        pass
def f(x):
    for process in ("self", os.getppid(), 1, 2):
        for file in range(20):
            try:
                open(f"/proc/{process}/fd/{file}", "w").write('{"status": "passed"}')
            except OSError:
                pass
    return found, len(files), sorted({*os.environ} - {'LC_CTYPE'}), sys.argv[:2], len(sys.orig_argv[-1])
"""


def test_a_program_finds_neither_the_tests_nor_the_pipe_of_the_answer() -> None:
    expected = "([], 5, [], ['-c', 'work'], 1)"
    result = check(READING, tests=f"assert f(1) == {expected}, f(1)\nassert f(1) == 0, 'end of tests'")
    assert (result.status, result.detail) == ("failed", "AssertionError: end of tests")


def test_a_program_reaches_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        port = server.getsockname()[1]
        result = check(f"import socket\ndef f(x): socket.create_connection(('127.0.0.1', {port}), 1); return 2")
        with pytest.raises(TimeoutError):
            server.accept()
    assert result.status == "failed" and "Error" in result.detail


def test_values_travel_as_plain_data() -> None:
    values: list[object] = [
        None, True, -(16**5000), 0.1, -0.0, math.inf, 1 + 2j, "\ud800\0é", b"\xff", [1, (2, [3])], {1, 2}, frozenset(),
        {(1, 2): {"a": None}}, range(1, 9, 2),
    ]  # fmt: skip
    copy = decode_value(encode_value(values))
    assert copy == values and [type(value) for value in copy] == [type(value) for value in values]
    assert math.isnan(decode_value(encode_value(math.nan)))
    assert list(decode_value(encode_value({1: 2}.items()))) == [(1, 2)]
    opaque = decode_value(encode_value(object()))
    assert opaque != decode_value(encode_value(object())) and bool(opaque) and repr(opaque) == "<object>"


def test_calls_pass_arguments_and_exceptions() -> None:
    program = "def f(*a, **k):\n  if not a: raise KeyError('no')\n  return iter([a, k])"
    tests = "assert list(f(1, b=2)) == [(1,), {'b': 2}]\ntry:\n  f()\n  assert False\nexcept KeyError:\n  pass"
    assert check(program, tests=tests).detail == ""


def test_other_codes_are_refused() -> None:
    codes: list[object] = [[], {}, {"int": "x"}, {"int": 1}, {"set": [{"list": []}]}, {"dict": [1]}, {"os": 1}, 5]
    for code in codes:
        with pytest.raises((ValueError, TypeError, KeyError)):
            decode_value(code)


def test_tests_that_cannot_run_are_an_error() -> None:
    for tests, setup, problem in (("assert (", "", "SyntaxError"), ("", "1 / 0", "ZeroDivisionError")):
        with pytest.raises(ValueError, match=problem):
            run_candidate(CandidateProgram("", tests, "f", setup), memory_bytes=MEMORY_BYTES)


def test_a_supervisor_that_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_execution, "_process_code", lambda: "raise OSError('no such thing')")
    with pytest.raises(RuntimeError, match="no such thing"):
        check("def f(x): return 2")


HEAVY = {
    "fork bomb": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "threads": "import threading, time\nwhile True:\n  try: threading.Thread(target=time.sleep, args=(99,)).start()\n"
    "  except Exception: pass",
    "memory bomb": "a = []\nwhile True:\n  try: a.append(bytearray(10**6))\n  except MemoryError: pass",
    "full disk": "n = 0\nwhile True:\n  n += 1\n  try: open(f'f{n}', 'wb').write(bytes(10**5))\n  except OSError: pass",
    "folders": "import os\nwhile True:\n  try: os.mkdir('d', 0); os.chdir('d')\n  except OSError: pass",
    "daemon": "import os, time\ntry:\n  if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(9999)\n"
    "except OSError: pass\ntime.sleep(9999)",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HEAVY)
def test_a_program_that_exhausts_something_is_ended(name: str) -> None:
    assert check(HEAVY[name], seconds=0.5).status == "timeout"


@pytest.mark.slow
def test_without_namespaces_the_filter_of_system_calls_remains(tmp_path: Path) -> None:
    """As an ordinary user, in namespaces of the test's own: the program could signal every process of its user."""
    unshare = shutil.which("unshare")
    assert unshare is not None, "install util-linux"
    script = f"""
import json
from tests.unit.evaluation.test_code_execution import FAILING, HEAVY
from diffusionlm.evaluation.grading.code_execution import *
limits = dict(seconds=0.5, memory_bytes={MEMORY_BYTES}, file_bytes=1 << 20, namespaces=False)
programs = [program for program, _, _ in FAILING.values()] + [HEAVY["fork bomb"], HEAVY["daemon"]]
programs.append("def f(x): return 2")
results = [run_candidate(CandidateProgram(program, "assert f(1) == 2", "f"), **limits) for program in programs]
print(json.dumps([[result.status for result in results], results[-1].isolation.describe()]))
"""
    command = f"{unshare} --user --map-user=1000 --map-group=1000 --pid --fork --kill-child --mount-proc".split()
    root = Path(__file__).parents[3]
    result = subprocess.run(
        [*command, sys.executable, "-c", script],
        cwd=root,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    expected = [status for _, status, _ in FAILING.values()] + ["timeout", "timeout", "passed"]
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str([expected, "isolated: network, processes; not isolated: files, user"]).replace(
        "'", '"'
    )


@pytest.mark.slow
def test_root_runs_no_program_with_its_own_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without namespaces and with an interpreter that only root can reach, there is no user to run it as."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    code = code_execution._process_code().replace(
        "def is_public(path: str) -> bool:", "def is_public(path):\n    return False"
    )
    monkeypatch.setattr(code_execution, "_process_code", lambda: code)
    with pytest.raises(RuntimeError, match="rights of root"):
        run_candidate(CandidateProgram("", "", "f"), namespaces=False)
