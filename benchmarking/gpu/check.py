"""Check a machine with GPUs in at most nine minutes: tests, training, resuming, ranks, decoding, speed.

    python -m benchmarking.gpu.check --output docs/results/gpu.md

Each part is a process with a time limit, so a failure, a hang or a crash of one hides nothing of the others. The report
has for each part whether it passed or failed, and its result beside its goal. A limit is no verdict: it includes cold
imports and compiling, so a part that it ends has shown nothing. Ends with 1 if a part has not passed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarking.gpu.judges import PartVerdict
from benchmarking.gpu.parts import REHEARSAL_FACTOR, ROOT, TOTAL_SECONDS, Part, Site, build_parts
from benchmarking.harness import Report, Table, collect_environment
from files.atomic import write_text_atomic
from files.terminal_text import print_line, print_message
from profiling.cores import usable_cores

MARK_VARIABLE = "GPU_CHECK_PART"
"""Environment variable of all processes of a part, with another value for each part."""
TERMINATION_SECONDS = 3.0
"""From asking a command to end until it is killed: a launcher ends its ranks in this time."""
SHOWN_LINES = 25
"""Last lines of a failed part's output in the report."""


@dataclass(frozen=True)
class PartResult:
    part: Part
    status: str
    """``passed``; ``goal missed``; ``failed``; ``no verdict``: its limit ended it; ``not run``: no time was left."""
    result: str
    seconds: float
    output: str

    @property
    def has_passed(self) -> bool:
        return self.status == "passed"


def run_part(part: Part, limit: float) -> PartResult:
    """Run a part in the root of the repository and end it after ``limit`` seconds; its output is kept."""
    start = time.monotonic()

    def finish(status: str, result: str, output: str = "") -> PartResult:
        return PartResult(part, status, result, time.monotonic() - start, output)

    try:
        if part.prepare is not None:
            part.prepare()
        code, output = _run_process(part.command, limit)
    except Exception as error:  # what a part needs may be missing or broken in any way: the part's failure
        return finish("failed", f"{type(error).__name__}: {error}")
    if code is None:
        return finish("no verdict", f"ended after {limit:.0f} s, with imports and compiling: run it alone", output)
    if code != 0:
        return finish("failed", f"exit code {code}", output)
    try:
        verdict = part.judge(output)
    except Exception as error:  # an output or a file that is not as expected: the part's failure
        verdict = PartVerdict(False, f"unexpected output: {type(error).__name__}: {error}")
    return finish("passed" if verdict.is_met else "goal missed", verdict.result, output)


def _run_process(command: Sequence[str], limit: float) -> tuple[int | None, str]:
    """Exit code, None after the limit, and output of a command."""
    mark = f"{MARK_VARIABLE}={uuid.uuid4()}"
    name, _, value = mark.partition("=")
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=ROOT,
            env={**os.environ, name: value},
        )
        code: int | None
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # also after Ctrl-C
            _end_process(process, mark)
        file.seek(0)
        return code, file.read()


def _end_process(process: subprocess.Popen[bytes], mark: str) -> None:
    """Ask a command to end, then kill it and all processes that it left behind.

    Ranks have sessions of their own, and the launcher's end orphans them: they are found by their environment.
    """
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=TERMINATION_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + TERMINATION_SECONDS
    while (left := find_processes(mark)) and time.monotonic() < deadline:  # again, for those that they had just started
        for number in left:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.05)


def find_processes(mark: str) -> list[int]:
    """Numbers of this user's processes that were started with ``NAME=value`` in their environment (Linux)."""
    numbers = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if mark.encode() in path.read_bytes().split(b"\0"):
                numbers.append(int(path.parent.name))
    return numbers


def run_parts(
    parts: Sequence[Part], total_seconds: float, on_result: Callable[[Sequence[PartResult]], None] | None = None
) -> list[PartResult]:
    """Run all parts in order, each within its limit and within what is left of the total.

    ``on_result`` is called after each part with the results of all, so that those of an interrupted check are kept.
    """
    deadline = time.monotonic() + total_seconds
    results = [PartResult(part, "not run", "the check was interrupted", 0.0, "") for part in parts]
    for index, part in enumerate(parts):
        limit = min(float(part.seconds), deadline - time.monotonic())
        if limit <= 0:
            results[index] = PartResult(part, "not run", "no time was left", 0.0, "")
        else:
            print_message(f"{part.name}: at most {limit:.0f} s")
            results[index] = run_part(part, limit)
        print_message(f"{part.name}: {results[index].status}, {results[index].result}")
        if on_result is not None:
            on_result(results)
    return results


def format_page(results: Sequence[PartResult], site: Site, environment: dict[str, str]) -> str:
    """The page of the results: a table, and the last lines of what did not pass."""
    rows = [[each.part.name, each.status, each.result, each.part.goal, f"{each.seconds:.0f}"] for each in results]
    table = Table(["part", "status", "result", "goal", "seconds"], rows)
    passed = sum(each.has_passed for each in results)
    facts = {"device": f"{site.num_gpus} x {site.device_name}" if site.num_gpus else site.device_name}
    page = ["# Check of a GPU machine", "    just gpu-check", f"{passed} of {len(results)} parts passed."]
    left_out = [part.name for part in build_parts(site) if part.name not in {each.part.name for each in results}]
    if left_out:
        page.append(f"Not asked for: {', '.join(left_out)}.")
    if site.is_rehearsal:
        page.append("A rehearsal without a GPU, with tiny models: it shows that the check works, and nothing of a GPU.")
    page.append(Report([table], facts).to_markdown(environment))
    for each in results:
        if not each.has_passed and each.output:
            lines = each.output.splitlines()[-SHOWN_LINES:]
            page.append(f"## {each.part.name}\n\n    {shlex.join(each.part.command)}")
            page.append("\n".join(["```text", *(line.replace("```", "'''") for line in lines), "```"]))
    return "\n\n".join(page) + "\n"


def read_site(directory: Path, device: str) -> Site:
    """The devices of this machine.

    Raises:
        ValueError: ``cuda`` is asked for, and torch finds no device.
    """
    import torch

    if device == "cpu":
        return Site(directory, device, "cpu", 0)
    if not torch.cuda.is_available():
        raise ValueError("torch finds no CUDA device: run `diffusionlm-doctor`, or rehearse with --device cpu")
    return Site(directory, device, torch.cuda.get_device_name(), torch.cuda.device_count())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check and write its report. Returns 0 if all parts passed."""
    parser = argparse.ArgumentParser(description="Check a machine with GPUs in nine minutes.", allow_abbrev=False)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal with tiny models")
    parser.add_argument("--output", type=Path, help="Markdown file that gets the report")
    parser.add_argument("--parts", nargs="+", help="names of the parts (default: all)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        try:
            site = read_site(Path(scratch), arguments.device)
        except ValueError as error:
            parser.error(str(error))
        parts = build_parts(site)
        names = [part.name for part in parts]
        unknown = [name for name in arguments.parts or () if name not in names]
        if unknown:
            parser.error(f"--parts: {unknown[0]!r} is not one of {', '.join(names)}")
        chosen = [part for part in parts if arguments.parts is None or part.name in arguments.parts]
        environment = collect_environment(threads=usable_cores(), packages=("torch", "triton"))

        def write_page(results: Sequence[PartResult]) -> None:
            if arguments.output is not None:
                write_text_atomic(arguments.output, format_page(results, site, environment))

        total_seconds = TOTAL_SECONDS * (REHEARSAL_FACTOR if site.is_rehearsal else 1)
        results = run_parts(chosen, total_seconds, write_page)
        print_line(format_page(results, site, environment))
    return 0 if all(each.has_passed for each in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
