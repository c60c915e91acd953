"""The HTML page of a pipeline: its tables, loss curves and samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from cli.pipeline.plan import RUN
from cli.pipeline.results import (
    BOUND_HEADER,
    HEADER,
    METRIC_HEADER,
    StageResult,
    list_bound_rows,
    list_metric_rows,
)
from logger.pages import Chart, Curve
from logger.pages.charts import draw_charts
from logger.pages.page import fill_page
from logger.pages.tables import join, table
from logger.report.reading import read_run
from logger.report.series import downsample

CURVE_BUCKETS = 200


def render_page(results: Sequence[StageResult], title: str) -> str:
    """Render the page. Reports of training runs are linked."""
    data: list[dict[str, Any]] = []
    done = sum(result.seconds is not None for result in results)
    sections = {
        "Stages": _render_table(HEADER, [result.cells for result in results]) + _render_links(results),
        "Before and after": _render_table(BOUND_HEADER, list_bound_rows(results)),
        "Tasks": _render_table(METRIC_HEADER, list_metric_rows(results)),
        "Training loss": draw_charts(_loss_curves(results), data),
        "Samples": _render_samples(results),
    }
    return fill_page((title, title), sections, data, [], [f"{done} of {len(results)} stages done"])


def _render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    if not rows:
        return Markup("")
    return table(header[1:], [(row[0], list(row[1:])) for row in rows], first=header[0])


def _render_links(results: Sequence[StageResult]) -> Markup:
    """Render links to the reports of training runs and the replays of samples."""
    files = [
        (result.plan.name, f"{result.plan.name}/{name}")
        for result in results
        for name in (f"{RUN}/report.html", "answers.html")
        if (result.plan.directory / name).is_file()
    ]
    links = join(Markup(' · <a href="{}">{}</a>').format(quote(path), name) for name, path in files)
    return Markup("<p>Pages of stages{}</p>").format(links) if files else Markup("")


def _loss_curves(results: Sequence[StageResult]) -> list[Chart]:
    """One chart for each training stage."""
    charts = []
    for result in results:
        if not (result.plan.directory / RUN / "metrics.jsonl").is_file():
            continue
        series = read_run(result.plan.directory / RUN).numbers.get("loss_smooth")
        if series is None:
            continue
        indices = downsample(series.values_N, CURVE_BUCKETS)
        x_N, y_N = series.steps_N[indices], series.values_N[indices]
        curve = Curve(result.plan.name, x_N, y_N, has_dots=len(x_N) == 1)
        charts.append(Chart(result.plan.name, "nats per token", [curve], "Smoothed training loss.", log=False))
    return charts


def _render_samples(results: Sequence[StageResult]) -> Markup:
    article = Markup(
        '<article class="sample card"><pre class="given" dir="auto">{}</pre><h4>{}</h4>'
        '<pre dir="auto">{}</pre></article>'
    )
    cards = join(
        article.format(
            sample.prompt or "Without a prompt",
            result.plan.name,
            sample.answer if sample.answer.strip() else "(only whitespace)",
        )
        for result in results
        for sample in result.samples
    )
    return Markup('<div class="samples">{}</div>').format(cards) if cards else cards
