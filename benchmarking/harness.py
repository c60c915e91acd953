"""The harness of all benchmarks: interleaved timing, comparison, reports and the command line.

A benchmark is a function that takes a config, or the options of `make_parser`, and returns a page. Torch is imported
only where it is used.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
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
from typing import Any, Literal, TypeVar

from config.bench.training import BenchFileSection
from config.model import Architecture
from files.paths import check_can_write
from files.terminal_text import print_message
from files.usage_error import UsageError
from logger.pages import Column, Page, Part, Table
from logger.pages.markdown import render_markdown
from logger.pages.terminal import list_parts, print_parts
from profiling.cores import usable_cores
from profiling.machine import read_processor_model

Measurement = TypeVar("Measurement")

Clock = Literal["wall", "process"]
CLOCKS: dict[Clock, Callable[[], float]] = {
    "wall": time.perf_counter,
    "process": time.process_time,
}
"""Wall time, or CPU time of the process, which other processes on the machine affect less."""

MEBIBYTE = 1 << 20
SPEEDUP_COLUMN = "per round [quartiles]"
"""Header of `Comparison.format_speedup` beside a column of the ratio of medians."""
INSTALL_HINT = "install the dependency group bench: uv sync --group bench"


def make_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of formatted cells; all columns but the first are aligned to the right."""
    return Table([header[0], *map(Column, header[1:])], rows)


def make_speed_table(
    header: Sequence[str],
    rows: Iterable[tuple[Sequence[str], float, Comparison]],
    names: Sequence[str],
    *,
    unit: str,
    style: str,
) -> Table:
    """A table of the rates of implementations, and of the speedup of the first one over each other.

    Args:
        rows: first cells, work of a call in units, and times; an implementation that was not timed has no rate.
    """
    ours, *peers = names
    header = [*header, *(f"{name} {unit}" for name in names)]
    header += [cell for peer in peers for cell in (f"speedup over {peer}", SPEEDUP_COLUMN)]
    lines = []
    for cells, work, times in rows:
        rates = [f"{work / times.median(name):{style}}" if name in times.seconds else "-" for name in names]
        speedups = [times.speedup_cells(ours, peer) if peer in times.seconds else ["-", "-"] for peer in peers]
        lines.append([*cells, *rates, *itertools.chain.from_iterable(speedups)])
    return make_table(header, lines)


def make_report(title: str, parts: Sequence[Part], facts: Mapping[str, str]) -> Page:
    """A report: results, and the conditions of the measurement."""
    return Page(title, {"Results": list(parts), "Conditions": [Table((), list(facts.items()))]})


@dataclass(frozen=True)
class ResultFiles:
    """``NAME.jsonl``, to which each case is appended when it is measured, and the report ``NAME.md``.

    Both replace existing files. Without a directory nothing is written.
    """

    directory: Path | None
    name: str

    def __post_init__(self) -> None:
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._path("jsonl").write_text("", encoding="utf-8")

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        if self.directory is not None:
            with self._path("jsonl").open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)

    def write_report(self, report: Page) -> None:
        if self.directory is not None:
            self._path("md").write_text(render_markdown(report), encoding="utf-8")

    def _path(self, suffix: str) -> Path:
        assert self.directory is not None
        return self.directory / f"{self.name}.{suffix}"


def prepare_output_file(output: BenchFileSection) -> Path | None:
    """Create the folder of ``output.path`` before the work begins; returns the path.

    Raises:
        UsageError: the file cannot be written.
    """
    path = output.path
    if path is not None:
        if path.is_dir():
            raise UsageError(f"output.path = {path} is a directory: name a file in it")
        check_can_write(path.parent, f"output.path = {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
    return path


def compare(
    implementations: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 0,
    clock: Clock = "wall",
    label: str = "",
    check: Callable[[Mapping[str, Any]], None] | None = None,
) -> Comparison:
    """Time one call of each implementation in turn; progress goes to stderr.

    Args:
        implementations: a call must not return before its work is done, also on a GPU.
        rounds: measured rounds; at least 2.
        warmup: rounds before them that are not measured.
        label: names the case in the progress lines; empty: no progress lines.
        check: gets the outputs of each measured round, outside the clock, and raises if they are not equal. Without
            it no output is kept.
    """
    read_clock = CLOCKS[clock]
    seconds: dict[str, list[float]] = {name: [] for name in implementations}
    for number in range(1 - warmup, rounds + 1):
        outputs: dict[str, Any] = {}
        for name, call in implementations.items():
            start = read_clock()
            output = call()
            elapsed = read_clock() - start
            if number >= 1:
                seconds[name].append(elapsed)
            if check is not None:
                outputs[name] = output
        if number < 1:
            continue
        if check is not None:
            check(outputs)
        if label:
            text = ", ".join(f"{name} {values[-1]:.3g} s" for name, values in seconds.items())
            print_message(f"{label}: round {number}/{rounds}: {text}")
    return Comparison(seconds)


@dataclass(frozen=True)
class Comparison:
    """Seconds of each implementation, round by round."""

    seconds: Mapping[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def format_ms(self, name: str) -> str:
        """Milliseconds of the median call."""
        return f"{1e3 * self.median(name):,.2f}"

    def format_speedup(self, name: str, over: str) -> str:
        """The speed of one implementation over that of another, from at least two rounds: the median and the quartiles
        of the ratios within each round, in which noise that slows a whole round cancels."""
        ratios = [slow / fast for fast, slow in zip(self.seconds[name], self.seconds[over], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return f"{middle:.2f} [{low:.2f}, {high:.2f}]"

    def speedup_cells(self, name: str, over: str) -> list[str]:
        """Cells for the ratio of medians and for `SPEEDUP_COLUMN`."""
        return [f"{self.median(over) / self.median(name):.2f}", self.format_speedup(name, over)]


def run_in_fresh_process(
    measure: Callable[..., Measurement], *arguments: object, description: str, key: str
) -> Measurement:
    """Call ``measure(*arguments)`` in a new process, whose allocator no other measurement has used.

    Args:
        measure: a function of a module; its arguments and its result must be picklable.
        description: names the measurement in the error.
        key: config key or option that lowers the memory use, for the error.

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


def is_installed(package: str) -> bool:
    """Look a package up without importing it."""
    return importlib.util.find_spec(package) is not None


def check_installed(packages: Iterable[str]) -> None:
    """Check that the packages of ``bench.peers`` are installed.

    Raises:
        ValueError: one is not.
    """
    for package in packages:
        if not is_installed(package):
            raise ValueError(
                f"bench.peers need {package}, which is not installed; {INSTALL_HINT}, or measure without them: "
                "--set bench.peers=[]"
            )


def version(package: str) -> str:
    """Version of an installed package; an imported one states its build as well, as in 2.9.0+cpu."""
    return getattr(sys.modules.get(package), "__version__", None) or importlib.metadata.version(package)


def format_command_line() -> str:
    """The running command as one would type it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["python", "-m", spec.name.removesuffix(".__main__")] if spec else [Path(sys.argv[0]).name]
    return shlex.join([*program, *sys.argv[1:]])


def describe_model(shape: Architecture) -> str:
    """The shape of a model in words."""
    return (
        f"{shape.num_hidden_layers} layers, hidden {shape.hidden_size}, {shape.num_attention_heads} heads "
        f"({shape.num_key_value_heads} of keys and values) of {shape.head_dim}, SwiGLU {shape.intermediate_size}"
    )


def collect_environment(
    *, threads: int, packages: Iterable[str], rounds: int, warmup: int, device: str = "cpu"
) -> dict[str, str]:
    """Facts that are needed to repeat a measurement; packages that are not installed are left out."""
    import torch

    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    versions = [f"{package} {version(package)}" for package in packages if is_installed(package)]
    return {
        "command": format_command_line(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "CPU": read_processor_model(),
        **({"accelerator": torch.cuda.get_device_name()} if device == "cuda" else {}),
        "threads": f"{threads} of torch; the process may use {usable_cores()} cores; load average at the start {load}",
        "software": ", ".join([f"Python {platform.python_version()}", *versions, platform.platform(terse=True)]),
        "rounds": f"{rounds} after {warmup} of warm-up",
    }


def at_least(lowest: int) -> Callable[[str], int]:
    """A type of arguments: integers from ``lowest`` on."""

    def integer(text: str) -> int:
        if (value := int(text)) < lowest:
            raise argparse.ArgumentTypeError(f"{value} must be at least {lowest}")
        return value

    return integer


def make_parser(description: str, *, rounds: int, threads: int) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark that has no config; their defaults are given."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    note = f"measured calls of each implementation, at least 2 (default: {rounds})"
    parser.add_argument("--rounds", type=at_least(2), default=rounds, help=note)
    parser.add_argument("--threads", type=at_least(1), default=threads, help=f"CPU threads (default: {threads})")
    return parser


def run_benchmark(run: Callable[[argparse.Namespace], Page], options: argparse.Namespace) -> int:
    """Run a benchmark and print its report. Returns 1 if it failed."""
    import torch

    torch.set_num_threads(options.threads)
    try:
        report = run(options)
    except ValueError as error:
        print_message(f"error: {error}")
        return 1
    print_parts(list_parts(report))
    return 0
