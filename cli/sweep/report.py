"""The results of a sweep: a page of its runs, and the same numbers as JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cli.sweep.definition import Sweep, short_keys
from cli.sweep.results import EVALUATION_KEYS, SweepRun, read_files
from files.atomic import write_text_atomic
from logger import format_duration
from logger.pages import Cell, Code, Column, Link, Number, Page, Part, Table
from logger.pages.html import write_page
from logger.report.charts import main_charts
from logger.report.reading import LoggedRun
from logger.report.samples import collect_samples

PAGE = "sweep.html"
JSON_LINES = "sweep.jsonl"
COLUMNS = {
    "bound": Column("bound, nats per token", ".4f"),
    "bits_per_byte": Column("bits per byte", ".4f"),
    "tokens_per_second": Column("tokens/s", ",.0f"),
}
"""Columns of the table by measurement."""
MAX_CURVES = 8
"""Runs whose curves and samples are on the page: the first ones of the table."""
_OTHER_ROWS = ("data.", "validation.")


def write_report(sweep: Sweep, runs: Sequence[SweepRun]) -> list[Part]:
    """Write the results so far, and return what a terminal shows of them.

    Raises:
        OSError: a file cannot be written.
    """
    runs = read_results(sweep, runs)
    page = build_page(sweep, runs)
    write_page(page, sweep.directory / PAGE)
    lines = "".join(f"{json.dumps(_to_json(run), ensure_ascii=False)}\n" for run in runs)
    write_text_atomic(sweep.directory / JSON_LINES, lines)
    paths = [sweep.directory / name for name in (PAGE, Path(PAGE).with_suffix(".md"), JSON_LINES)]
    return [_build_table(sweep, runs, has_links=False), "", *page.notes, "", *map(str, paths)]


def read_results(sweep: Sweep, runs: Sequence[SweepRun]) -> list[SweepRun]:
    """Read the results of runs, and sort them by the objective; those that are done come first."""
    results = []
    for run in runs:
        logged, numbers = read_files(sweep.run_path(run.name))
        if run.value is not None:  # also of a run of another machine, without files here
            numbers.setdefault(sweep.objective, Number(run.value))
        results.append(replace(run, logged=logged, numbers=numbers))
    no_number = Number(math.inf)
    results.sort(key=lambda run: (run.status != "done", run.numbers.get(sweep.objective, no_number).value))
    if results and results[0].status == "done" and sweep.objective in results[0].numbers:
        results[0] = replace(results[0], is_best=True)
    return results


def build_page(sweep: Sweep, runs: Sequence[SweepRun]) -> Page:
    """Build the page of runs in display order; their existing files are linked."""
    shown = [_last_samples(run.logged, _label(run)) for run in runs if run.logged][:MAX_CURVES]
    note = [f"The first {MAX_CURVES} runs of the table."] if len(runs) > MAX_CURVES else []
    sections: dict[str, list[Part]] = {
        "Runs": [_build_table(sweep, runs), *(Code("\n".join(run.error), run.name) for run in runs if run.error)],
        "Curves": [*main_charts(shown), *note] if shown else [],
        "Samples": collect_samples(shown),
    }
    statuses = [run.status for run in runs]
    states = [f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)]
    return Page(f"Sweep {sweep.directory.resolve().name}", sections, list(_notes(sweep, runs)), states)


def _last_samples(logged: LoggedRun, label: str) -> LoggedRun:
    """The run under this name, of its events only the last samples."""
    samples = logged.events_of("sample")
    return replace(logged, name=label, events=[event for event in samples if event.step == samples[-1].step])


def _build_table(sweep: Sweep, runs: Sequence[SweepRun], *, has_links: bool = True) -> Table:
    short = short_keys([axis.key for axis in sweep.axes])
    rows: list[list[Cell]] = [
        [
            *(run.values.get(key) for key in short),
            *(run.numbers.get(name) for name in COLUMNS),
            format_duration(run.seconds) if run.seconds else "",
            (_describe_status(run), *(_links(sweep.directory, run.name) if has_links else ())),
        ]
        for run in runs
    ]
    heads: list[Column | str] = [*map(Column, short.values()), *COLUMNS.values(), Column("time"), "status"]
    return Table(heads, rows, best_row=0 if runs and runs[0].is_best else None)


def _describe_status(run: SweepRun) -> str:
    """The status, of runs that are not complete with the last step, and of the best one."""
    is_final = run.logged is not None and run.logged.summary
    step = "" if is_final or run.step is None else f" at step {run.step:,}"
    return f"{run.status}{step}{', best' if run.is_best else ''}"


def _links(directory: Path, name: str) -> list[Link]:
    """Link the existing files of a run."""
    files = {"report": f"runs/{name}/report.html", "config": f"configs/{name}.toml", "log": f"logs/{name}.log"}
    return [Link(label, file) for label, file in files.items() if (directory / file).is_file()]


def _label(run: SweepRun) -> str:
    values = ", ".join(f"{name} {run.values[key]}" for key, name in short_keys(run.values).items())
    return f"{values}{', best' if run.is_best else ''}"


def _notes(sweep: Sweep, runs: Sequence[SweepRun]) -> Iterator[str]:
    if sweep.objective == "bits_per_byte":
        yield "The runs have different tokenizers, so they are sorted by bits per byte."
    if any(axis.key.startswith(_OTHER_ROWS) for axis in sweep.axes):
        yield "The runs differ in [data] or [validation]: bounds on different texts cannot be compared."
    close = sum(_is_within_two_errors(sweep, run, runs[0]) for run in runs[1:])
    if close:
        yield (
            f"Within two standard errors of the best: {close}. The order may change with another seed "
            "(--set run.seed=0,1,2)."
        )
    if any(run.status != "done" and run.numbers.get("bound") for run in runs):
        yield "The numbers of unfinished and pruned runs are those of their last validation."
    if sweep.jobs > 1:
        yield f"Up to {sweep.jobs} runs shared the machine: tokens/s and time include their contention."


def _is_within_two_errors(sweep: Sweep, other: SweepRun, best: SweepRun) -> bool:
    measured, least = other.numbers.get(sweep.objective), best.numbers.get(sweep.objective)
    if measured is None or least is None or not best.is_best or other.status != "done":
        return False
    return measured.value - least.value <= 2.0 * math.hypot(measured.error or 0.0, least.error or 0.0)


def _to_json(run: SweepRun) -> dict[str, Any]:
    """A run as a line of `JSON_LINES`."""
    numbers: dict[str, float | None] = {}
    for name in COLUMNS:
        measured = run.numbers.get(name)
        numbers[name] = None if measured is None else measured.value
        if name in EVALUATION_KEYS:
            numbers[f"{name}_standard_error"] = None if measured is None else measured.error
    return {
        "name": run.name,
        "values": run.values,
        **numbers,
        "seconds": round(run.seconds, 3),
        "status": run.status,
        "is_best": run.is_best,
        "step": run.step,
        "error": list(run.error),
    }
