"""The results of a sweep: a page of its runs, and the same numbers as JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cli.sweep.definition import REPLAY_FILE, Sweep, is_logarithmic, parse_numbers, short_keys
from cli.sweep.results import COLUMNS, EVALUATION_KEYS, read_result
from cli.sweep.study import SweepRun, importances
from config.spellings import read_key
from files.atomic import write_text_atomic
from files.json_files import read_text
from files.toml_text import parse_toml
from logger import format_duration
from logger.pages import Cell, Chart, Code, Column, Curve, Example, Examples, Link, Number, Output, Page, Part, Table
from logger.pages.html import write_page
from logger.report.charts import main_charts
from logger.report.reading import LoggedRun
from logger.report.samples import collect_samples, mark_fills

PAGE = "sweep.html"
JSON_LINES = "sweep.jsonl"
MAX_CURVES = 8
"""Training runs whose curves and samples are on the page: the first ones of the table."""
_OTHER_ROWS = ("data.", "validation.")


def write_report(sweep: Sweep, runs: Sequence[SweepRun]) -> list[Part]:
    """Write the results so far, and return what a terminal shows of them.

    Raises:
        OSError: a file cannot be written.
    """
    runs = read_results(sweep, runs)
    page = build_page(sweep, runs)
    write_page(page, sweep.directory / PAGE)
    lines = "".join(f"{json.dumps(_to_json(sweep, run), ensure_ascii=False)}\n" for run in runs)
    write_text_atomic(sweep.directory / JSON_LINES, lines)
    paths = [sweep.directory / name for name in (PAGE, Path(PAGE).with_suffix(".md"), JSON_LINES)]
    return [_build_table(sweep, runs, has_links=False), "", *page.notes, "", *map(str, paths)]


def read_results(sweep: Sweep, runs: Sequence[SweepRun]) -> list[SweepRun]:
    """Read the values and results of runs: of training the best first, of inference in the order of the grid."""
    keys = list(dict.fromkeys(key for run in runs for key in run.values))
    results = []
    for run in runs:
        result = read_result(sweep.command_name, sweep.run_path(run.name))
        if run.value is not None:  # also of a run of another machine, without files here
            result.numbers.setdefault(sweep.objective, Number(run.value))
        results.append(replace(run, values=_read_values(sweep, run, keys), result=result))
    if sweep.command_name != "train":
        return results
    no_number = Number(math.inf)
    results.sort(key=lambda run: (run.status != "done", run.result.numbers.get(sweep.objective, no_number).value))
    if results and results[0].status == "done" and sweep.objective in results[0].result.numbers:
        results[0] = replace(results[0], is_best=True)
    return results


def _read_values(sweep: Sweep, run: SweepRun, keys: Sequence[str]) -> dict[str, str]:
    """Return the values of a run for these keys; those that it does not set come from its config."""
    try:
        config: Any = parse_toml(read_text(sweep.toml_path(run.name))) if {*keys} - {*run.values} else {}
    except ValueError:
        config = {}
    values = {}
    for key in keys:
        node = read_key(config, key)
        text = "none" if node is None else node if isinstance(node, str) else json.dumps(node)
        values[key] = run.values.get(key, text)
    return values


def build_page(sweep: Sweep, runs: Sequence[SweepRun]) -> Page:
    """Build the page of runs in display order; their existing files are linked."""
    statuses = [run.status for run in runs]
    sections: dict[str, list[Part]] = {
        "Runs": [_build_table(sweep, runs), *(Code("\n".join(run.error), run.name) for run in runs if run.error)]
    }
    if sweep.command_name == "train":
        shown = [_last_samples(run.result.logged, _label(run)) for run in runs if run.result.logged][:MAX_CURVES]
        note = [f"The first {MAX_CURVES} runs of the table."] if len(runs) > MAX_CURVES else []
        sections["History"] = [*_history(sweep, runs), *_importances(runs)]
        sections["Curves"] = [*main_charts(shown), *note] if shown else []
        sections["Samples"] = collect_samples(shown)
    else:
        sections["Outputs"] = _outputs(runs)
    title, states = f"Sweep {sweep.directory.resolve().name}", dict.fromkeys(statuses)
    states_with_counts = [f"{statuses.count(status)} {status}" for status in states]
    return Page(title, sections, notes=list(_notes(sweep, runs)), states=states_with_counts)


def _last_samples(logged: LoggedRun, label: str) -> LoggedRun:
    """The run under this name, of its events only the last samples."""
    samples = logged.events_of("sample")
    return replace(logged, name=label, events=[event for event in samples if event.step == samples[-1].step])


def _build_table(sweep: Sweep, runs: Sequence[SweepRun], *, has_links: bool = True) -> Table:
    columns = COLUMNS[sweep.command_name]
    short = short_keys(runs[0].values if runs else ())
    rows = [
        [
            *(run.values[key] for key in short),
            *(run.result.numbers.get(name) for name in columns),
            format_duration(run.seconds) if run.seconds else "",
            (_describe_status(run), *(_links(sweep.directory, run.name) if has_links else ())),
        ]
        for run in runs
    ]
    heads = [*(Column(name) for name in short.values()), *columns.values(), Column("time"), "status"]
    best = {index: "best" for index, run in enumerate(runs) if run.is_best}
    return Table(heads, rows, styles=best, is_sortable=True)  # type: ignore[arg-type]


def _describe_status(run: SweepRun) -> str:
    """The status, of runs that are not complete with the last step, and of the best one."""
    step = "" if run.result.is_final or run.result.step is None else f" at step {run.result.step:,}"
    return f"{run.status}{step}{', best' if run.is_best else ''}"


def _links(directory: Path, name: str) -> list[Link]:
    """Link the existing files of a run."""
    files = {
        "report": f"runs/{name}/report.html",
        "replay": f"runs/{name}/{REPLAY_FILE}",
        "config": f"configs/{name}.toml",
        "log": f"logs/{name}.log",
    }
    return [Link(label, file) for label, file in files.items() if (directory / file).is_file()]


def _label(run: SweepRun) -> str:
    values = ", ".join(f"{name} {run.values[key]}" for key, name in short_keys(run.values).items())
    return f"{values}{', best' if run.is_best else ''}"


def _history(sweep: Sweep, runs: Sequence[SweepRun]) -> list[Part]:
    """Build the charts of the objective: by the order of the runs, and by each key."""
    runs = [run for run in runs if run.status in ("done", "pruned") and sweep.objective in run.result.numbers]
    runs = sorted(runs, key=lambda run: run.number)
    values_N = np.array([run.result.numbers[sweep.objective].value for run in runs])
    is_done_N = np.array([run.status == "done" for run in runs], dtype=bool)
    if not is_done_N.any():
        return []
    order_N = np.arange(1.0, len(runs) + 1)
    best_N = np.minimum.accumulate(np.where(is_done_N, values_N, np.inf))
    best = Curve("best so far", order_N[np.isfinite(best_N)], best_N[np.isfinite(best_N)], 1)
    unit = COLUMNS["train"][sweep.objective].name
    charts: list[Part] = [Chart("History", unit, [*_dots(order_N, values_N, is_done_N), best], x_name="run")]
    log_keys = {axis.key for axis in sweep.axes if axis.range is not None and axis.range.log}
    for key, name in short_keys(runs[0].values).items():
        texts = [run.values[key] for run in runs]
        numbers = parse_numbers(texts)
        labels = () if numbers is not None else tuple(dict.fromkeys(texts))
        at_N = np.array([float(labels.index(text)) for text in texts] if numbers is None else numbers)
        is_log = numbers is not None and (key in log_keys or is_logarithmic(numbers))
        dots = _dots(at_N, values_N, is_done_N)
        charts.append(Chart(f"By {name}", unit, dots, x_name=name, x_is_log=is_log, x_labels=labels))
    return charts


def _dots(x_N: NDArray[np.float64], y_N: NDArray[np.float64], is_done_N: NDArray[np.bool_]) -> list[Curve]:
    groups = {"done": is_done_N, "pruned, at the last validation": ~is_done_N}
    order_N = np.argsort(x_N, kind="stable")
    return [
        Curve(name, x_N[order_N][is_N[order_N]], y_N[order_N][is_N[order_N]], 2 * color, has_dots=True, has_line=False)
        for color, (name, is_N) in enumerate(groups.items())
        if is_N.any()
    ]


def _importances(runs: Sequence[SweepRun]) -> list[Part]:
    short = short_keys(runs[0].values if runs else ())
    note = "Share of each key in what the best tenth of the runs has in common (PED-ANOVA); few runs say little."
    rows: list[list[Cell]] = [[short[key], share] for key, share in importances(runs).items()]
    return [Table(["key", Column("importance", ".0%")], rows, note=note)] if rows else []


def _outputs(runs: Sequence[SweepRun]) -> list[Part]:
    """Build the outputs of all runs for each prompt; spans that the model filled are marked."""
    outputs: dict[str, list[Output]] = {}
    for run in runs:
        for prompt, output in run.result.texts:
            outputs.setdefault(prompt, []).append(Output(_label(run), mark_fills(prompt, output)))
    return [Examples([Example(prompt, texts) for prompt, texts in outputs.items()])] if outputs else []


def _notes(sweep: Sweep, runs: Sequence[SweepRun]) -> Iterator[str]:
    keys = [key for run in runs[:1] for key in run.values]
    is_training = sweep.command_name == "train"
    if not is_training and "model.path" in keys:
        yield "Different models: log-probabilities and token counts compare only with the same tokenizer."
    if is_training and sweep.objective == "bits_per_byte":
        yield "The runs have different tokenizers, so they are sorted by bits per byte."
    if is_training and any(key.startswith(_OTHER_ROWS) for key in keys):
        yield "The runs differ in [data] or [validation]: bounds on different texts cannot be compared."
    close = sum(_is_within_two_errors(sweep, run, runs[0]) for run in runs[1:])
    if close:
        which = "1 other is" if close == 1 else f"{close} others are"
        yield (
            f"{which} within two standard errors of the best: the order may change with another seed "
            "(--set run.seed=0,1,2)."
        )
    if is_training and any(run.status != "done" and run.result.numbers.get("bound") for run in runs):
        yield "The numbers of unfinished and pruned runs are those of their last validation."
    jobs = max((run.jobs for run in runs), default=1)
    if jobs > 1:
        yield f"Up to {jobs} runs shared the machine: tokens/s and time include their contention."


def _is_within_two_errors(sweep: Sweep, other: SweepRun, best: SweepRun) -> bool:
    measured, least = other.result.numbers.get(sweep.objective), best.result.numbers.get(sweep.objective)
    if measured is None or least is None or not best.is_best or other.status != "done":
        return False
    return measured.value - least.value <= 2.0 * math.hypot(measured.error or 0.0, least.error or 0.0)


def _to_json(sweep: Sweep, run: SweepRun) -> Mapping[str, Any]:
    """A run as a line of `JSON_LINES`."""
    numbers: dict[str, float | None] = {}
    for name in COLUMNS[sweep.command_name]:
        measured = run.result.numbers.get(name)
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
        "step": run.result.step,
        "jobs": run.jobs,
        "error": list(run.error),
    }
