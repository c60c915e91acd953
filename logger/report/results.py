"""Tables of a report: results, last values, events and environment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Literal

from logger.console import format_duration
from logger.pages import Cell, Column, Number, Part, Table, format_cell
from logger.report.charts import BITS_PER_BYTE, NATS_PER_TOKEN, ValidationMetric
from logger.report.reading import LoggedRun, RunEvent

MAX_EVENTS = 200
"""Events listed for each run; all are in metrics.jsonl."""

FAILURE_EVENTS = ("failed", "skipped", "report")


def tabulate_results(runs: Sequence[LoggedRun]) -> Table:
    """Tabulate all results, with a column for each run."""
    rows = [[name, *cells] for name, cells in _result_rows(runs) if any(cell is not None for cell in cells)]
    return _table_by_run("", runs, rows)


def _table_by_run(first: str, runs: Sequence[LoggedRun], rows: Sequence[Sequence[Cell]]) -> Table:
    return Table([first, *(Column(run.name) for run in runs)] if len(runs) > 1 else (), rows)


def _result_rows(runs: Sequence[LoggedRun]) -> Iterator[tuple[str, list[Cell]]]:
    for metric in (NATS_PER_TOKEN, BITS_PER_BYTE):
        yield f"Validation, {metric.unit}", [_validation_result(run, metric) for run in runs]
    yield "Kind of bound", [_kind(run) if run.summary else None for run in runs]
    others = [run.summary.get("other_block_lengths") for run in runs]
    for index in range(max(len(value) if isinstance(value, list) else 0 for value in others)):
        yield "Also trained for, nats per token", [_other_bound(run, index) for run in runs]
    yield "Entropy of the source, nats per document", _column(runs, "source_entropy")
    yield "Unigram entropy, nats per token", _column(runs, "evaluation", "unigram_entropy")
    ngrams = [run.summary.get("ngrams") for run in runs]
    for name in dict.fromkeys(name for entropies in ngrams if isinstance(entropies, dict) for name in entropies):
        yield f"{name}, nats per token", _column(runs, "ngrams", name)
    for index in range(2):
        fraction = _first(runs, "evaluation", "fills", index, "fraction")
        for rank in (1, 5) if fraction is not None else ():
            cells = _column(runs, "evaluation", "fills", index, f"top{rank}_accuracy", style=".1%")
            yield f"Top-{rank} accuracy, {fraction:.0%} masked", cells
    for index in count():
        low, high = (_first(runs, "evaluation", "by_masked_fraction", index, column) for column in range(2))
        if low is None or high is None:
            break
        cells = _column(runs, "evaluation", "by_masked_fraction", index, 2)
        yield f"Loss, {low:.0%} to {high:.0%} masked", cells
    yield "Training loss, averaged", [_number(_last(run, "loss_smooth")) for run in runs]
    yield "Parameters", _column(runs, "parameters", style=",.0f")
    yield "Tokens seen", [_number(_tokens(run), ",.0f") for run in runs]
    yield "Steps", [describe_steps(run) for run in runs]
    yield "Skipped steps", [_number(_last(run, "skipped_steps") or None, ",.0f") for run in runs]
    yield "Time of training steps", [None if (s := _seconds(run)) is None else format_duration(s) for run in runs]
    if any((run.result("padding_share") or 0.0) >= 0.0005 for run in runs):
        yield "Padding of the training rows", _column(runs, "padding_share", style=".1%")


def _number(value: float | None, style: str = ".3f") -> Cell:
    return None if value is None else Number(value, style)


def _first(runs: Sequence[LoggedRun], *keys: str | int) -> float | None:
    """Return a number of the first summary that has it."""
    return next((value for run in runs if (value := run.result(*keys)) is not None), None)


def _column(runs: Sequence[LoggedRun], *keys: str | int, style: str = ".3f") -> list[Cell]:
    """Return a number of each run's summary; ``style`` is its format specification."""
    return [_number(run.result(*keys), style) for run in runs]


def _other_bound(run: LoggedRun, index: int) -> Cell:
    keys = ("nats_per_token", "standard_error", "block_length")
    value, error, blocks = (run.result("other_block_lengths", index, key) for key in keys)
    pattern = "bidirectional" if blocks is None else f"blocks of {blocks:.0f}"
    return None if value is None else f"{format_cell(Number(value, '.3f', error))}, {pattern}"


def _validation_result(run: LoggedRun, metric: ValidationMetric) -> Cell:
    """Return the final value with its error, or the run's last value and its step."""
    value, error = (run.result("evaluation", key) for key in metric.summary_keys)
    if value is not None:
        return Number(value, ".3f", error)
    series, errors = run.numbers.get(metric.key), run.numbers.get(metric.error_key)
    if series is None or series.last is None:
        return None
    step, value = series.last
    error = errors.last[1] if errors is not None and errors.last is not None and errors.last[0] == step else None
    return f"{format_cell(Number(value, '.3f', error))} at step {step:,.0f}"


def _kind(run: LoggedRun) -> str:
    blocks = run.result("evaluation", "block_length")
    if blocks is None:
        return "bound"
    return "loss, token by token" if blocks == 1 else f"bound, blocks of {blocks:.0f}"


def describe_steps(run: LoggedRun) -> str:
    """Return the steps that are done, of how many."""
    return f"{run.last_step:,}" + (f" of {run.max_steps:,}" if run.max_steps else "")


def _last(run: LoggedRun, key: str) -> float | None:
    series = run.numbers.get(key)
    return None if series is None or series.last is None else series.last[1]


def _tokens(run: LoggedRun) -> float | None:
    return _last(run, "tokens_seen") if run.result("tokens_seen") is None else run.result("tokens_seen")


def _seconds(run: LoggedRun) -> float | None:
    if run.result("seconds") is not None:
        return run.result("seconds")
    tokens, speed = _last(run, "tokens_seen"), _last(run, "tokens_per_second")
    seconds = tokens / speed if tokens is not None and speed else math.nan
    return seconds if math.isfinite(seconds) else None


def tabulate_last_values(runs: Sequence[LoggedRun], keys: Sequence[str]) -> list[Part]:
    """Tabulate the last values of metrics without a chart."""
    rows = [[key, *(_last_value(run, key) for run in runs)] for key in keys]
    return [_table_by_run("Last value of", runs, rows)] if rows else []


def _last_value(run: LoggedRun, key: str) -> Cell:
    if key not in run.numbers:
        return run.texts.get(key)
    value = _last(run, key)
    return math.nan if value is None else value


def list_events(runs: Sequence[LoggedRun]) -> list[Part]:
    """Tabulate the events of each run, the newest first."""
    parts: list[Part] = []
    for run in runs:
        events = [event for event in run.events if event.kind != "sample"]
        newest = events[::-1][:MAX_EVENTS]
        rows: list[list[Cell]] = [[event.step, event.kind, _without_step(event)] for event in newest]
        styles: dict[int, Literal["best", "bad"]] = {
            index: "bad" for index, event in enumerate(newest) if event.kind in FAILURE_EVENTS
        }
        num_omitted = len(events) - len(newest)
        note = f"{num_omitted:,} earlier ones are in metrics.jsonl." if num_omitted else ""
        title = run.name if len(runs) > 1 else ""
        if rows:
            parts.append(Table([Column("Step", ",", "left"), "Kind", "Event"], rows, title, note, styles))
    return parts


def _without_step(event: RunEvent) -> str:
    """Return the text without prefixes that repeat the other columns."""
    return event.text.removeprefix(f"step {event.step}: ").removeprefix(f"{event.kind}: ")


def tabulate_environment(runs: Sequence[LoggedRun]) -> Table:
    """Tabulate the environment of each run since its last start, an event: ``name value; name value``."""
    columns: list[dict[str, str]] = []
    for run in runs:
        text = "; ".join(event.text for event in run.events_of("environment")[-1:])
        items = [item for item in text.removeprefix("environment: ").split("; ") if item]
        columns.append({**dict(item.partition(" ")[::2] for item in items), "directory": str(run.path)})
    names = dict.fromkeys(name for column in columns for name in column)
    return _table_by_run("", runs, [[name, *(column.get(name) for column in columns)] for name in names])
