"""The results of a sweep: a page of its runs, and the same numbers as JSON lines.

Files of a run that are missing or damaged are ignored, because it may be active.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cli.sweep.definition import ANSWERS_FILE, REPLAY_FILE, Sweep, is_logarithmic, parse_numbers, short_keys
from cli.sweep.study import SweepRun, importances
from config.spellings import read_key
from files.atomic import write_text_atomic
from files.json_files import read_text
from files.toml_text import parse_toml
from logger import format_duration
from logger.pages import (
    Cell,
    Chart,
    Code,
    Column,
    Curve,
    Example,
    Examples,
    Link,
    Number,
    Output,
    Page,
    Part,
    Table,
)
from logger.pages.html import write_page
from logger.report.charts import build_curve
from logger.report.reading import LoggedRun, Series, read_run
from logger.report.samples import mark_fills

EVALUATION_KEYS = {
    "bound": ("nats_per_token", "standard_error"),
    "bits_per_byte": ("bits_per_byte", "bits_per_byte_standard_error"),
}
"""Measurement -> its key, and that of its standard error, in an evaluation; metrics have them after ``val_``."""
TRAIN_COLUMNS = {
    "bound": Column("bound, nats per token", ".4f"),
    "bits_per_byte": Column("bits per byte", ".4f"),
    "tokens_per_second": Column("tokens/s", ",.0f"),
}
INFER_COLUMNS = {
    "tokens_per_second": Column("tokens/s", ",.0f"),
    "tokens_per_forward": Column("tokens per forward", ".2f"),
    "forwards": Column("forwards", ",.0f"),
    "mean_logprob": Column("mean log-probability", ".4f"),
}
"""Columns of the table by measurement."""


PAGE = "sweep.html"
JSON_LINES = "sweep.jsonl"
MAX_CURVES = 8
"""Loss curves on the page: of the first runs of the table."""
_OTHER_ROWS = ("data.", "validation.")


@dataclass(frozen=True)
class RunResult:
    """Numbers and texts of a run; those that do not exist yet are missing."""

    numbers: dict[str, Number] = field(default_factory=dict)
    """Measurements by column."""
    texts: tuple[tuple[str, str], ...] = ()
    """Pairs of a prompt, or a text with masked spans, and the output of the model."""
    curve: Series | None = None
    """The smoothed training loss by step."""
    step: int | None = None
    """The last step; None: an inference run, or no step yet."""
    is_final: bool = False


def read_result(command: str, directory: Path) -> RunResult:
    """Read the result of a run of this command."""
    return read_training_result(directory) if command == "train" else read_inference_result(directory)


def read_training_result(directory: Path) -> RunResult:
    """Read ``summary.json``, or the last validation in ``metrics.jsonl`` while the run is active."""
    try:
        run = read_run(directory)
    except ValueError:
        return RunResult()
    numbers: dict[str, Number] = {}
    for name, (key, error_key) in EVALUATION_KEYS.items():
        if run.summary:
            value, error = run.result("evaluation", key), run.result("evaluation", error_key)
        else:
            value, error = _last(run, f"val_{key}"), _last(run, f"val_{error_key}")
        if value is not None:
            numbers[name] = Number(value, error=error)
    tokens, seconds = run.result("tokens_seen"), run.result("seconds")
    rate = tokens / seconds if tokens and seconds else _last(run, "tokens_per_second")
    if rate is not None:
        numbers["tokens_per_second"] = Number(rate)
    samples = run.events_of("sample")
    pairs = [(event.values.get("given", ""), event.values.get("filled", event.text)) for event in samples
             if event.step == samples[-1].step]  # fmt: skip
    texts = tuple((str(given), str(filled)) for given, filled in pairs)
    curve = run.numbers.get("loss_smooth", run.numbers.get("loss"))
    step = run.last_step if run.numbers else None
    return RunResult(numbers, texts, None if curve is None or curve.is_empty else curve, step, bool(run.summary))


def _last(run: LoggedRun, key: str) -> float | None:
    series = run.numbers.get(key)
    return None if series is None or series.last is None else series.last[1]


def read_inference_result(directory: Path) -> RunResult:
    """Read the JSON lines of ``diffusionlm-infer``."""
    texts, logprobs = [], []
    tokens = forwards = seconds = 0.0
    for line in read_json_lines(directory / ANSWERS_FILE):
        text, metrics = line.get("text", {}), line.get("metrics", {})
        texts.append((str(text.get("prompt", "")), str(text.get("output", ""))))
        tokens += metrics.get("num_tokens", 0)
        forwards += metrics.get("num_forwards", 0)
        # Each answer of a batch states the seconds of the whole batch.
        seconds += metrics.get("seconds", 0.0) / max(1, metrics.get("batch_size", 1))
        if metrics.get("mean_logprob") is not None:
            logprobs.append((metrics["mean_logprob"], metrics.get("num_tokens", 0)))
    weight = sum(count for _, count in logprobs)
    numbers = {
        "forwards": forwards,
        "tokens_per_second": tokens / seconds if seconds else math.nan,
        "tokens_per_forward": tokens / forwards if forwards else math.nan,
        "mean_logprob": sum(a * b for a, b in logprobs) / weight if weight else math.nan,
    }
    finite = {name: Number(value) for name, value in numbers.items() if texts and math.isfinite(value)}
    return RunResult(finite, tuple(texts), is_final=bool(texts))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON lines file, except invalid lines; a missing file has none."""
    values = []
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                values.append(json.loads(line))
    return [value for value in values if isinstance(value, dict)]


@dataclass(frozen=True)
class Result:
    """A run, its values of all keys of the sweep, and what its files contain."""

    run: SweepRun
    values: dict[str, str]
    result: RunResult
    is_best: bool = False

    @property
    def status(self) -> str:
        """The status, of runs that are not complete with the last step, and of the best one."""
        step = self.result.step
        status = self.run.status if self.result.is_final or step is None else f"{self.run.status} at step {step:,}"
        return f"{status}, best" if self.is_best else status


def write_report(sweep: Sweep, runs: Sequence[SweepRun]) -> list[Part]:
    """Write the results so far, and return what a terminal shows of them.

    Raises:
        OSError: a file cannot be written.
    """
    results = read_results(sweep, runs)
    page = build_page(sweep, results, importances(runs))
    write_page(page, sweep.directory / PAGE)
    write_text_atomic(sweep.directory / JSON_LINES, "".join(f"{line}\n" for line in _format_json_lines(sweep, results)))
    paths = [sweep.directory / name for name in (PAGE, Path(PAGE).with_suffix(".md"), JSON_LINES)]
    return [_build_table(sweep, results, has_links=False), "", *page.notes, "", *map(str, paths)]


def read_results(sweep: Sweep, runs: Sequence[SweepRun]) -> list[Result]:
    """Read the results of runs: training runs with the best first, inference runs in the order of the grid."""
    keys = list(dict.fromkeys(key for run in runs for key in run.values))
    results = []
    for run in runs:
        result = read_result(sweep.command_name, sweep.run_path(run.name))
        if run.value is not None and sweep.objective not in result.numbers:  # a run of another machine
            result = replace(result, numbers={**result.numbers, sweep.objective: Number(run.value)})
        results.append(Result(run, _read_values(sweep, run, keys), result))
    if sweep.command_name != "train":
        return results
    no_number = Number(math.inf)

    def sort_key(result: Result) -> tuple[bool, float]:
        return result.run.status != "done", result.result.numbers.get(sweep.objective, no_number).value

    results = sorted(results, key=sort_key)
    if results and results[0].run.status == "done" and sweep.objective in results[0].result.numbers:
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


def build_page(sweep: Sweep, results: Sequence[Result], shares: Mapping[str, float]) -> Page:
    """Build the page.

    Args:
        sweep: of the runs; existing files of runs are linked.
        results: in display order.
        shares: importances of the axes, by key; they sum to 1, or there are none.
    """
    statuses = [result.run.status for result in results]
    errors = [Code("\n".join(result.run.error), result.run.name) for result in results if result.run.error]
    return Page(
        f"Sweep {sweep.directory.resolve().name}",
        {
            "Runs": [_build_table(sweep, results), *errors],
            "History": [*_history(sweep, results), *_importances(results, shares)],
            "Training loss": _loss_curves(results),
            "Samples" if sweep.command_name == "train" else "Outputs": _examples(results),
        },
        notes=list(_notes(sweep, results)),
        states=[f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)],
    )


def _build_table(sweep: Sweep, results: Sequence[Result], *, has_links: bool = True) -> Table:
    columns = TRAIN_COLUMNS if sweep.command_name == "train" else INFER_COLUMNS
    short = short_keys(results[0].values if results else ())
    rows = [
        [
            *(result.values[key] for key in short),
            *(result.result.numbers.get(name) for name in columns),
            format_duration(result.run.seconds) if result.run.seconds else "",
            (result.status, *(_links(sweep.directory, result.run.name) if has_links else ())),
        ]
        for result in results
    ]
    heads = [*(Column(name) for name in short.values()), *columns.values(), Column("time"), "status"]
    best = {index: "best" for index, result in enumerate(results) if result.is_best}
    return Table(heads, rows, styles=best, is_sortable=True)  # type: ignore[arg-type]


def _links(directory: Path, name: str) -> list[Link]:
    """Link the existing files of a run."""
    files = {
        "report": f"runs/{name}/report.html",
        "replay": f"runs/{name}/{REPLAY_FILE}",
        "config": f"configs/{name}.toml",
        "log": f"logs/{name}.log",
    }
    return [Link(label, file) for label, file in files.items() if (directory / file).is_file()]


def _label(result: Result) -> str:
    return ", ".join(f"{name} {result.values[key]}" for key, name in short_keys(result.values).items())


def _history(sweep: Sweep, results: Sequence[Result]) -> list[Part]:
    """Build the charts of the objective: by the order of the runs, and by each key."""
    if sweep.command_name != "train":
        return []
    results = sorted(results, key=lambda result: result.run.number)
    results = [
        result
        for result in results
        if result.run.status in ("done", "pruned") and sweep.objective in result.result.numbers
    ]
    values_N = np.array([result.result.numbers[sweep.objective].value for result in results])
    is_done_N = np.array([result.run.status == "done" for result in results], dtype=bool)
    if not is_done_N.any():
        return []
    order_N = np.arange(1.0, len(results) + 1)
    best_N = np.minimum.accumulate(np.where(is_done_N, values_N, np.inf))
    best = Curve("best so far", order_N[np.isfinite(best_N)], best_N[np.isfinite(best_N)], 1)
    unit = TRAIN_COLUMNS[sweep.objective].name
    charts: list[Part] = [Chart("History", unit, [*_dots(order_N, values_N, is_done_N), best], x_name="run")]
    log_keys = {axis.key for axis in sweep.axes if axis.range is not None and axis.range.log}
    for key, name in short_keys(results[0].values).items():
        texts = [result.values[key] for result in results]
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


def _importances(results: Sequence[Result], shares: Mapping[str, float]) -> list[Part]:
    short = short_keys(results[0].values if results else ())
    note = "Share of each key in what the best tenth of the runs has in common (PED-ANOVA); few runs say little."
    rows: list[list[Cell]] = [[short[key], share] for key, share in shares.items()]
    return [Table(["key", Column("importance", ".0%")], rows, note=note)] if rows else []


def _loss_curves(results: Sequence[Result]) -> list[Part]:
    shown = [(result, series) for result in results if (series := result.result.curve) is not None][:MAX_CURVES]
    curves = [build_curve(_label(result), series, index, len(shown)) for index, (result, series) in enumerate(shown)]
    note = f"The first {MAX_CURVES} runs of the table." if len(results) > MAX_CURVES else ""
    return [Chart("Smoothed training loss", "nats per token", curves, note)] if curves else []


def _examples(results: Sequence[Result]) -> list[Part]:
    """Build the outputs of all runs for each prompt; spans that the model filled are marked."""
    outputs: dict[str, list[Output]] = {}
    for result in results:
        for prompt, output in result.result.texts:
            label = f"{_label(result)}{', best' if result.is_best else ''}"
            outputs.setdefault(prompt, []).append(Output(label, mark_fills(prompt, output)))
    return [Examples([Example(prompt, texts) for prompt, texts in outputs.items()])] if outputs else []


def _notes(sweep: Sweep, results: Sequence[Result]) -> Iterator[str]:
    keys = [key for result in results[:1] for key in result.values]
    is_training = sweep.command_name == "train"
    if not is_training and "model.path" in keys:
        yield "Different models: log-probabilities and token counts compare only with the same tokenizer."
    if is_training and sweep.objective == "bits_per_byte":
        yield "The runs have different tokenizers, so they are sorted by bits per byte."
    if is_training and any(key.startswith(_OTHER_ROWS) for key in keys):
        yield "The runs differ in [data] or [validation]: bounds on different texts cannot be compared."
    close = sum(_is_within_two_errors(sweep, result, results[0]) for result in results[1:])
    if close:
        which = "1 other is" if close == 1 else f"{close} others are"
        yield (
            f"{which} within two standard errors of the best: the order may change with another seed "
            "(--set run.seed=0,1,2)."
        )
    if is_training and any(result.run.status != "done" and result.result.numbers.get("bound") for result in results):
        yield "The numbers of unfinished and pruned runs are those of their last validation."
    jobs = max((result.run.jobs for result in results), default=1)
    if jobs > 1:
        yield f"Up to {jobs} runs shared the machine: tokens/s and time include their contention."


def _is_within_two_errors(sweep: Sweep, other: Result, best: Result) -> bool:
    measured, least = other.result.numbers.get(sweep.objective), best.result.numbers.get(sweep.objective)
    if measured is None or least is None or not best.is_best or other.run.status != "done":
        return False
    return measured.value - least.value <= 2.0 * math.hypot(measured.error or 0.0, least.error or 0.0)


def _format_json_lines(sweep: Sweep, results: Sequence[Result]) -> Iterator[str]:
    """Format one JSON object per run, in the order of the table."""
    for result in results:
        numbers: dict[str, float | None] = {}
        for name in TRAIN_COLUMNS if sweep.command_name == "train" else INFER_COLUMNS:
            measured = result.result.numbers.get(name)
            numbers[name] = None if measured is None else measured.value
            if name in EVALUATION_KEYS:
                numbers[f"{name}_standard_error"] = None if measured is None else measured.error
        record = {
            "name": result.run.name,
            "values": result.values,
            **numbers,
            "seconds": round(result.run.seconds, 3),
            "status": result.run.status,
            "is_best": result.is_best,
            "step": result.result.step,
            "jobs": result.run.jobs,
            "error": list(result.run.error),
        }
        yield json.dumps(record, ensure_ascii=False)
