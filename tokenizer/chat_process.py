"""Render chat templates in a process of their own, whose memory and CPU time are limited; built-in ones in this one."""

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

MEMORY_BYTES = 1 << 29
"""Address space of the process that renders; Python and Jinja take 24 MiB of it."""

CPU_SECONDS = 10.0
"""CPU time of one rendering; templates of published models take milliseconds."""

_PROGRAM = Path(__file__).with_name("chat_sandbox.py")
_CHUNK_BYTES = 1 << 16


class TemplateProcess:
    """Renders templates, one at a time, in a child process that is started when it is needed and then reused.

    Threads may share it. A template that exceeds a limit ends the process; the next request starts another one.

    Args:
        memory_bytes: address space of the process.
        cpu_seconds: CPU time of one rendering.
    """

    def __init__(self, memory_bytes: int = MEMORY_BYTES, cpu_seconds: float = CPU_SECONDS) -> None:
        self._memory_bytes = memory_bytes
        self._cpu_seconds = cpu_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end_process: Callable[[], object]
        """Runs at most once, and at the latest when this object is deleted or Python ends."""

    def render(
        self, source: str, variables: Mapping[str, Any], now: datetime, generation_markers: tuple[str, str] = ("", "")
    ) -> str:
        """Render a template.

        Args:
            source: Jinja.
            variables: JSON values.
            now: the time that `strftime_now` formats.
            generation_markers: texts that are inserted before and after what `{% generation %}` encloses.

        Raises:
            ValueError: the template is invalid, raises an exception, does something forbidden, or exceeds a limit.
        """
        request = {
            "source": source,
            "variables": variables,
            "now": now.isoformat(),
            "generation_markers": generation_markers,
        }
        reply = self._request(json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        if "error" in reply:
            raise _template_error(reply["error"])
        return str(reply["text"])

    def _request(self, data: bytes) -> dict[str, Any]:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
            is_complete = False
            try:
                line = _exchange(self._process, data)
                is_complete = line.endswith(b"\n")
                status = 0 if is_complete else self._process.wait()
            finally:
                if not is_complete:  # also after Ctrl-C: the reply to come must not answer the next request
                    self._end_process()
        if not is_complete:
            return {"error": self._describe_exit(status)}
        reply: dict[str, Any] = json.loads(line.decode("utf-8", "surrogatepass"))
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            # -P: the modules beside the program must not hide those of Python.
            [sys.executable, "-P", str(_PROGRAM), str(self._memory_bytes), str(self._cpu_seconds)],
            bufsize=0,  # a fork has no unwritten data, which it would write a second time
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is for this process
        )
        self._end_process = weakref.finalize(self, _end, process)
        return process

    def _describe_exit(self, status: int) -> str:
        if status == os.EX_OSERR:
            return f"it needs more than {self._memory_bytes >> 20} MiB of memory"
        if status == -signal.SIGPROF:
            return f"it takes more than {self._cpu_seconds:g} seconds of CPU time"
        return f"the process that renders it ended with status {status}"


def run_template(
    source: str, variables: Mapping[str, Any], now: datetime, generation_markers: tuple[str, str] = ("", "")
) -> str:
    """Render a template in the child process that all threads share (`TemplateProcess.render`)."""
    return _shared_process(os.getpid()).render(source, variables, now, generation_markers)


def run_trusted_template(source: str, variables: Mapping[str, Any], now: datetime) -> str:
    """Render a template of this package, without `{% generation %}`, in this process.

    It does what `run_template` does, without limits and without the round trip to another process.

    Raises:
        ValueError: it raises an exception.
    """
    from tokenizer.chat_sandbox import describe_error, render  # loads Jinja

    try:
        return render(_compile_trusted_template(source), variables, now)
    except MemoryError:
        raise
    except Exception as error:
        raise _template_error(describe_error(error)) from None


@lru_cache(maxsize=8)
def _compile_trusted_template(source: str) -> Any:
    from tokenizer.chat_sandbox import compile_template

    return compile_template(source)


def _template_error(description: object) -> ValueError:
    return ValueError(f"the chat template cannot be applied: {description}")


@lru_cache(maxsize=1)
def _shared_process(process_id: int) -> TemplateProcess:
    """One per process: after a fork, two processes must not write to the same pipe."""
    return TemplateProcess()


def _exchange(process: subprocess.Popen[bytes], data: bytes) -> bytes:
    """Send a request and return the line of the reply, which is incomplete if the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    remaining = memoryview(data)
    with suppress(BrokenPipeError):
        while remaining:
            remaining = remaining[process.stdin.write(remaining) :]
    chunks = []
    while chunk := process.stdout.read(_CHUNK_BYTES):
        chunks.append(chunk)
        if chunk.endswith(b"\n"):  # JSON on one line has no other line end
            break
    return b"".join(chunks)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and close its pipes. In a fork, which is not its parent, only close them."""
    with process:
        process.kill()
