"""The HTML page of a sweep: the table, the history, the loss curves and the texts of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from cli.sweep.commands import REPLAY_FILE
from cli.sweep.grid import is_logarithmic, parse_numbers, short_keys
from cli.sweep.plan import SweepPlan, objective
from cli.sweep.results import TRAIN_COLUMNS
from cli.sweep.table import SweepTable, SweepTableRow, format_cells
from logger.pages import Chart, Curve
from logger.pages.charts import draw_bars, draw_charts
from logger.pages.page import fill_page
from logger.pages.parts import Floats
from logger.pages.tables import join, scrolling_table
from logger.report.samples import render_fills, render_masked_spans
from logger.report.series import downsample

_TEXT_LENGTH = 4_000
"""Maximum length of a text on the page; the files contain all of it."""
MAX_CURVES = 8
"""Loss curves on the page: of the first runs of the table."""
CURVE_BUCKETS = 100


def render_page(sweep: SweepTable, title: str, plan: SweepPlan, importances: Mapping[str, float]) -> str:
    """Render the page.

    Args:
        sweep: the runs in display order.
        title: title of the page.
        plan: of the sweep; existing files of runs are linked.
        importances: of the axes, by key; they sum to 1, or there are none.
    """
    data: list[dict[str, Any]] = []
    short = short_keys(sweep.keys)
    bars = [(short[key], share, f"{share:.0%}") for key, share in importances.items()]
    note = "Share of each key in what the best tenth of the runs has in common (PED-ANOVA); few runs say little."
    importance = draw_bars("Importance", "share", bars, note) if bars else Markup("")
    statuses = [row.run.status for row in sweep.rows]
    states = [f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)]
    sections = {
        "Runs": _render_runs(sweep, plan.directory),
        "History": draw_charts(_history(sweep, plan), data, importance),
        "Training loss": draw_charts(_loss_curves(sweep), data),
        "Samples" if sweep.command == "train" else "Outputs": _render_texts(sweep),
    }
    return fill_page((title, title), sections, data, list(sweep.notes), states)


def _render_runs(sweep: SweepTable, directory: Path) -> Markup:
    sorted_by = TRAIN_COLUMNS[objective(sweep.keys)] if sweep.command == "train" else None
    heads = join(
        Markup('<th scope="col"{}><button type="button">{}</button></th>').format(
            Markup(' aria-sort="ascending"' * (heading == sorted_by)), heading
        )
        for heading in sweep.headings
    )
    body = join(_render_row(sweep, row, directory) for row in sweep.rows)
    content = Markup("<thead><tr>{}</tr></thead><tbody>{}</tbody>").format(heads, body)
    errors = join(
        Markup('<pre class="errors">{}</pre>').format("\n".join([f"{row.run.name}:", *row.run.error]))
        for row in sweep.rows
        if row.run.error
    )
    return scrolling_table(content, "runs") + errors


def _render_row(sweep: SweepTable, row: SweepTableRow, directory: Path) -> Markup:
    *texts, _ = format_cells(sweep, row)
    numbers = [row.result.numbers.get(name) for name in sweep.columns]
    keys = [
        *(row.values[key] for key in sweep.keys),
        *("" if number is None else repr(number.value) for number in numbers),
    ]
    cells = join(
        Markup('<td data-key="{}">{}</td>').format(key, text.replace("+-", "±"))
        for key, text in zip([*keys, repr(row.run.seconds)], texts, strict=True)
    )
    best = Markup(' <b class="tag">best</b>' * row.is_best)
    status = Markup('<td data-key="{0}">{0}{1}{2}</td>').format(row.status, best, _render_links(row, directory))
    return Markup("<tr{}>{}{}</tr>").format(Markup(' class="best"' * row.is_best), cells, status)


def _render_links(row: SweepTableRow, directory: Path) -> Markup:
    """Render links to the existing files of a run."""
    name = row.run.name
    files = {
        "report": f"runs/{name}/report.html",
        "replay": f"runs/{name}/{REPLAY_FILE}",
        "config": f"configs/{name}.toml",
        "log": f"logs/{name}.log",
    }
    links = [(quote(file), label) for label, file in files.items() if (directory / file).is_file()]
    return join(Markup(' · <a href="{}">{}</a>').format(*link) for link in links)


def _label(sweep: SweepTable, row: SweepTableRow) -> str:
    short = short_keys(sweep.keys)
    return ", ".join(f"{short[key]} {row.values[key]}" for key in sweep.keys)


def _history(sweep: SweepTable, plan: SweepPlan) -> list[Chart]:
    """Build the charts of the objective: by the order of the runs, and by each key."""
    if sweep.command != "train":
        return []
    number = objective(sweep.keys)
    rows = sorted(sweep.rows, key=lambda row: row.run.number)
    rows = [row for row in rows if row.run.status in ("done", "pruned") and number in row.result.numbers]
    values_N = np.array([row.result.numbers[number].value for row in rows])
    is_done_N = np.array([row.run.status == "done" for row in rows], dtype=bool)
    if not is_done_N.any():
        return []
    order_N = np.arange(1.0, len(rows) + 1)
    best_N = np.minimum.accumulate(np.where(is_done_N, values_N, np.inf))
    best = Curve("best so far", order_N[np.isfinite(best_N)], best_N[np.isfinite(best_N)], 1)
    unit = TRAIN_COLUMNS[number]
    charts = [Chart("History", unit, [*_dots(order_N, values_N, is_done_N), best], x_name="run")]
    log_keys = {axis.key for axis in plan.axes if axis.range is not None and axis.range.is_log}
    for key, name in short_keys(sweep.keys).items():
        texts = [row.values[key] for row in rows]
        numbers = parse_numbers(texts)
        labels = () if numbers is not None else tuple(dict.fromkeys(texts))
        at_N = np.array([float(labels.index(text)) for text in texts] if numbers is None else numbers)
        is_log = numbers is not None and (key in log_keys or is_logarithmic(numbers))
        dots = _dots(at_N, values_N, is_done_N)
        charts.append(Chart(f"By {name}", unit, dots, x_name=name, x_is_log=is_log, x_labels=labels))
    return charts


def _dots(x_N: Floats, y_N: Floats, is_done_N: NDArray[np.bool_]) -> list[Curve]:
    groups = {"done": is_done_N, "pruned, at the last validation": ~is_done_N}
    order_N = np.argsort(x_N, kind="stable")
    return [
        Curve(name, x_N[order_N][is_N[order_N]], y_N[order_N][is_N[order_N]], 2 * color, has_dots=True, has_line=False)
        for color, (name, is_N) in enumerate(groups.items())
        if is_N.any()
    ]


def _loss_curves(sweep: SweepTable) -> list[Chart]:
    curves: list[Curve] = []
    for row in sweep.rows:
        if row.result.curve is not None and len(curves) < MAX_CURVES:
            series = row.result.curve
            indices = downsample(series.values_N, CURVE_BUCKETS)
            x_N, y_N = series.steps_N[indices], series.values_N[indices]
            curve = Curve(_label(sweep, row), x_N, y_N, len(curves), has_dots=len(x_N) == 1)
            curves.append(curve)
    note = f"The first {MAX_CURVES} runs of the table." if len(sweep.rows) > MAX_CURVES else ""
    return [Chart("Smoothed training loss", "nats per token", curves, note, log=False)] if curves else []


def _render_texts(sweep: SweepTable) -> Markup:
    """Render the outputs of all runs for each prompt; spans that the model filled are marked."""
    texts: dict[str, Markup] = {}
    for row in sweep.rows:
        best = Markup(' <b class="tag">best</b>' * row.is_best)
        for prompt, output in row.result.texts:
            filled = render_fills(prompt, output) if len(output) <= _TEXT_LENGTH else f"{output[:_TEXT_LENGTH]} ..."
            text = filled if output.strip() else "(only whitespace)"
            head = Markup("<h4>{}{}</h4>").format(_label(sweep, row), best)
            texts[prompt] = texts.get(prompt, Markup("")) + head + Markup('<pre dir="auto">{}</pre>').format(text)
    article = Markup('<article class="sample card"><pre class="given" dir="auto">{}</pre>{}</article>')
    cards = join(
        article.format(render_masked_spans(prompt[:_TEXT_LENGTH]) or "Without a prompt", outputs)
        for prompt, outputs in texts.items()
    )
    return Markup('<div class="samples">{}</div>').format(cards) if cards else cards
