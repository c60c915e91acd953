"""Tables of a report: results, config, events and environment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from markupsafe import Markup

from logger.console import format_duration
from logger.pages.parts import format_number
from logger.pages.settings import render_settings
from logger.pages.tables import TableRow, join, scrolling_table, table, terms
from logger.report.plots import BITS_PER_BYTE, NATS_PER_TOKEN, ValidationMetric
from logger.report.reading import LoggedRun, RunEvent

MAX_EVENTS = 200
"""Events listed for each run; all are in metrics.jsonl."""

EVENTS_WITH_OWN_SECTION = ("sample", "environment")

FAILURE_EVENTS = ("failed", "skipped", "report")

STATES = {
    "complete": "complete",
    "going": "still going",
    "stopped": "stopped by a signal",
    "failed": "failed",
    "ended": "ended early",
}


def results(runs: Sequence[LoggedRun]) -> Markup:
    """Render all results: a list for one run, a table with a column for each of several."""
    rows = [row for row in _result_rows(runs) if any(row[1])]
    if len(runs) > 1:
        return table([run.name for run in runs], rows)
    return Markup('<div class="card">{}</div>').format(terms(((name, cells[0]) for name, cells in rows), "lines"))


def headline(run: LoggedRun) -> list[tuple[str, str, str]]:
    """Return the main numbers of a run: name, value and a line below."""
    bound, step = _validation_result(run, NATS_PER_TOKEN)
    bits, _ = _validation_result(run, BITS_PER_BYTE)
    guess = run.result("evaluation", "fills", 0, "top1_accuracy")
    share = run.result("evaluation", "fills", 0, "fraction")
    loss = _last(run, "loss_smooth") or _last(run, "loss")
    parameters, tokens, seconds = run.result("parameters"), _tokens(run), _seconds(run)
    entries = [
        (f"Validation {_kind(run)}", bound, f"nats per token{step}"),
        ("Bits per byte", bits, f"of the validation text{step}"),
        ("Top-1 accuracy", "" if guess is None else f"{guess:.1%}", "" if share is None else f"{share:.0%} masked"),
        ("Training loss", "" if bound or loss is None else format_number(loss), "nats per token, averaged"),
        ("Parameters", "" if parameters is None else format_number(parameters), ""),
        ("Tokens", "" if tokens is None else format_number(tokens), f"in {run.last_step:,} steps"),
        ("Time", "" if seconds is None else format_duration(seconds), "of training steps"),
    ]
    return [entry for entry in entries if entry[1]]


def _result_rows(runs: Sequence[LoggedRun]) -> Iterator[TableRow]:
    for metric in (NATS_PER_TOKEN, BITS_PER_BYTE):
        yield f"Validation, {metric.unit}", ["".join(_validation_result(run, metric)) for run in runs]
    kinds = [_kind(run) if run.summary else "" for run in runs]
    if set(kinds) - {"", "bound"}:
        yield "Kind of bound", kinds
    yield from _other_blocks(runs)
    yield "Entropy of the source, nats per document", _column(runs, "source_entropy")
    yield "Unigram entropy, nats per token", _column(runs, "evaluation", "unigram_entropy")
    ngrams = [run.summary.get("ngrams") for run in runs]
    for name in dict.fromkeys(name for entropies in ngrams if isinstance(entropies, dict) for name in entropies):
        yield f"{name}, nats per token", _column(runs, "ngrams", name)
    for index in range(2):
        fractions = [run.result("evaluation", "fills", index, "fraction") for run in runs]
        masked_fraction = next((fraction for fraction in fractions if fraction is not None), None)
        if masked_fraction is not None:
            for rank in (1, 5):
                cells = _column(runs, "evaluation", "fills", index, f"top{rank}_accuracy", style=".1%")
                yield f"Top-{rank} accuracy, {masked_fraction:.0%} masked", cells
    yield "Training loss, averaged", [_format(_last(run, "loss_smooth"), ".3f") for run in runs]
    yield "Parameters", _column(runs, "parameters", style=",.0f")
    yield "Tokens seen", [_format(_tokens(run), ",.0f") for run in runs]
    yield "Steps", [f"{run.last_step:,}" + (f" of {run.max_steps:,}" if run.max_steps else "") for run in runs]
    if any(_last(run, "skipped_steps") for run in runs):
        yield "Skipped steps", [_format(_last(run, "skipped_steps"), ",.0f") for run in runs]
    yield "Time of training steps", ["" if (s := _seconds(run)) is None else format_duration(s) for run in runs]
    if any((run.result("padding_share") or 0.0) >= 0.0005 for run in runs):
        yield "Padding of the training rows", _column(runs, "padding_share", style=".1%")


def _other_blocks(runs: Sequence[LoggedRun]) -> Iterator[TableRow]:
    bounds = [run.summary.get("other_block_lengths") for run in runs]
    for index in range(max(len(value) if isinstance(value, list) else 0 for value in bounds)):
        cells = []
        for run in runs:
            value, error = (
                run.result("other_block_lengths", index, key) for key in ("nats_per_token", "standard_error")
            )
            blocks = run.result("other_block_lengths", index, "block_length")
            pattern = "bidirectional" if blocks is None else f"blocks of {blocks:.0f}"
            cells.append("" if value is None else f"{_with_error(value, error)}, {pattern}")
        yield "Also trained for, nats per token", cells


def _column(runs: Sequence[LoggedRun], *keys: str | int, style: str = ".3f") -> list[str]:
    """Format a number of each run's summary; ``style`` is its format specification."""
    return [_format(run.result(*keys), style) for run in runs]


def _validation_result(run: LoggedRun, metric: ValidationMetric) -> tuple[str, str]:
    """Return the final value with its error and "", or the run's last value and its step."""
    value, error = (run.result("evaluation", key) for key in metric.summary_keys)
    if value is not None:
        return _with_error(value, error), ""
    series, errors = run.numbers.get(metric.key), run.numbers.get(metric.error_key)
    if series is None or series.last is None:
        return "", ""
    step, value = series.last
    error = errors.last[1] if errors is not None and errors.last is not None and errors.last[0] == step else None
    return _with_error(value, error), f" at step {step:,.0f}"


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


def _kind(run: LoggedRun) -> str:
    blocks = run.result("evaluation", "block_length")
    if blocks is None:
        return "bound"
    return "loss, token by token" if blocks == 1 else f"bound, blocks of {blocks:.0f}"


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


def _format(value: float | None, style: str) -> str:
    return "" if value is None else format(value, style)


def last_values(runs: Sequence[LoggedRun], keys: Sequence[str]) -> Markup:
    """Render a table of the last values of metrics without a chart."""
    rows = [(key, [_last_value(run, key) for run in runs]) for key in keys]
    return table([run.name for run in runs], rows, first="Last value of", classes="last") if rows else Markup("")


def _last_value(run: LoggedRun, key: str) -> str:
    if key in run.numbers:
        value = _last(run, key)
        return "not finite" if value is None else format_number(value)
    return run.texts.get(key, "")


def config(runs: Sequence[LoggedRun]) -> Markup:
    """Render the config: differences between runs highlighted, common values folded."""
    configured = [run for run in runs if run.config]
    if not configured:
        return Markup("")
    columns = [
        (run.name, {key: value for key, value in run.config.items() if key != "run.directory"}) for run in configured
    ]
    return render_settings(columns, "configs of these runs")


def events(runs: Sequence[LoggedRun]) -> Markup:
    """Render the events of each run, the newest first."""
    html = Markup("")
    head = Markup(
        '<thead><tr><th scope="col">Step</th><th scope="col">Kind</th><th scope="col">Event</th></tr></thead>'
    )
    for run in runs:
        run_events = [event for event in run.events if event.kind not in EVENTS_WITH_OWN_SECTION]
        if not run_events:
            continue
        newest = list(reversed(run_events))[:MAX_EVENTS]
        if len(runs) > 1:
            html += Markup("<h3>{}</h3>").format(run.name)
        html += scrolling_table(Markup("{}<tbody>{}</tbody>").format(head, join(map(_event, newest))), "events")
        if num_omitted := len(run_events) - len(newest):
            html += Markup('<p class="note">{} earlier ones are in metrics.jsonl.</p>').format(f"{num_omitted:,}")
    return html


def _event(event: RunEvent) -> Markup:
    cells = join(Markup("<td>{}</td>").format(cell) for cell in (f"{event.step:,}", event.kind, _without_step(event)))
    return Markup('<tr class="{}">{}</tr>').format("bad" if event.kind in FAILURE_EVENTS else "", cells)


def _without_step(event: RunEvent) -> str:
    """Return the text without prefixes that repeat the other columns."""
    return event.text.removeprefix(f"step {event.step}: ").removeprefix(f"{event.kind}: ")


def environment(runs: Sequence[LoggedRun]) -> Markup:
    """Render the environment of each part of a run, from ``environment`` events: ``name value; name value``."""
    columns: list[tuple[str, dict[str, str]]] = []
    for run in runs:
        texts = list(dict.fromkeys(event.text for event in run.events_of("environment")))
        for number, text in enumerate(texts, 1):
            pieces = dict(piece.partition(" ")[::2] for piece in text.removeprefix("environment: ").split("; "))
            part = f", part {number}" if len(texts) > 1 else ""
            columns.append((run.name + part if len(runs) > 1 or part else run.name, pieces))
    if not columns:
        return table(
            [], [(f"directory of {run.name}" if len(runs) > 1 else "directory", [str(run.path)]) for run in runs]
        )
    names = dict.fromkeys(name for _, pieces in columns for name in pieces)
    rows = [(name, [pieces.get(name, "") for _, pieces in columns]) for name in names]
    if len(runs) == 1:
        rows.append(("directory", [str(runs[0].path)] * len(columns)))
    return table([name for name, _ in columns], rows)
