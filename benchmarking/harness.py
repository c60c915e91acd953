"""What benchmarks share: timing in turns, comparison, the environment, tables. Without torch."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from profiling.cores import usable_cores

_Measured = TypeVar("_Measured")

Seconds = dict[str, list[float]]
"""Measured times of each contestant, round by round."""


def time_in_turns(
    implementations: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int,
    after_round: Callable[[int, Mapping[str, float]], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Seconds:
    """Time one call of each contestant in turn, A B A B ..., so that all meet the same weather on the machine.

    A call must not return before its work is done. The first ``warmup`` rounds do not count; ``after_round`` gets the
    number of each other one, from 1, and its seconds.
    """
    seconds: Seconds = {name: [] for name in implementations}
    for index in range(warmup + rounds):
        for name, call in implementations.items():
            start = clock()
            call()
            elapsed = clock() - start
            if index >= warmup:
                seconds[name].append(elapsed)
        if index >= warmup and after_round is not None:
            after_round(index - warmup + 1, {name: times[-1] for name, times in seconds.items()})
    return seconds


def run_in_fresh_process(
    measure: Callable[..., _Measured], *arguments: object, description: str, key: str
) -> _Measured:
    """``measure(*arguments)`` in a process of its own, whose memory nothing else has used.

    Args:
        measure: a function of a module, with arguments that can be pickled.
        what: is measured, for the error.
        key: of the config or command line, to be lowered where memory runs out.

    Raises:
        ValueError: the process was killed.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(measure, *arguments).result()
        except BrokenProcessPool:
            raise ValueError(
                f"{description} was killed while its memory was measured; if the machine ran out of memory, lower {key}"
            ) from None


@dataclass(frozen=True)
class Speedup:
    """How many times as fast one contestant is as another."""

    ratio_of_medians: float
    """Ratio of the median times."""
    median_ratio: float
    """Median of the ratios within each round: what slows a whole round cancels."""
    low: float
    """First quartile of these."""
    high: float
    """Third quartile."""

    def format_ratio(self) -> str:
        """The paired ratio with its quartiles, for a table."""
        return f"{self.median_ratio:.2f} [{self.low:.2f}, {self.high:.2f}]"


def speedup(ours: Sequence[float], theirs: Sequence[float]) -> Speedup:
    """Speed of ``ours`` over that of ``theirs``, from the seconds of at least two rounds."""
    ratios = [slow / fast for fast, slow in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Speedup(statistics.median(theirs) / statistics.median(ours), middle, low, high)


def read_cpu_model() -> str:
    """Name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported for that."""
    return importlib.util.find_spec(package) is not None


def format_command_line() -> str:
    """The command that runs, as one would type it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["python", "-m", spec.name.removesuffix(".__main__")] if spec else [Path(sys.argv[0]).name]
    return shlex.join([*program, *sys.argv[1:]])


def version(package: str) -> str:
    """Version of an installed package; of an imported one with its build, as in 2.9.0+cpu."""
    return getattr(sys.modules.get(package), "__version__", None) or importlib.metadata.version(package)


def collect_environment(*, threads: int, packages: Iterable[str], accelerator: str | None = None) -> dict[str, str]:
    """What a number needs beside it to be measured again."""
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    versions = [f"{package} {version(package)}" for package in packages]
    return {
        "command": f"`{format_command_line()}`",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "CPU": read_cpu_model(),
        **({} if accelerator is None else {"accelerator": accelerator}),
        "threads": f"{threads} of torch; the process may use {usable_cores()} cores; load average at the start {load}",
        "software": ", ".join([f"Python {platform.python_version()}", *versions, platform.platform(terse=True)]),
    }


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers and stand to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def markdown_list(items: Mapping[str, str]) -> str:
    """A Markdown list of names and values."""
    return "\n".join(f"- {name}: {value}" for name, value in items.items())


def print_message(text: str) -> None:
    """A line of progress on stderr."""
    print(text, file=sys.stderr, flush=True)
