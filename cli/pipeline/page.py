"""The page of a pipeline: its tables, loss curves and samples."""

from __future__ import annotations

from collections.abc import Sequence

from cli.pipeline.plan import RUN
from cli.pipeline.results import (
    BOUND_HEADER,
    HEADER,
    METRIC_HEADER,
    StageResult,
    list_bound_rows,
    list_metric_rows,
)
from logger.pages import Cell, Chart, Example, Examples, Link, Output, Page, Part, Table
from logger.pages.html import render_html
from logger.report.charts import build_curve
from logger.report.reading import read_run


def render_page(results: Sequence[StageResult], title: str) -> str:
    """Render the page. Reports of training runs are linked."""
    samples = [
        Example(sample.prompt, [Output(result.plan.name, sample.answer)])
        for result in results
        for sample in result.samples
    ]
    sections: dict[str, list[Part]] = {
        "Stages": [*_tabulate(HEADER, [result.cells for result in results]), *_list_links(results)],
        "Before and after": _tabulate(BOUND_HEADER, list_bound_rows(results)),
        "Tasks": _tabulate(METRIC_HEADER, list_metric_rows(results)),
        "Training loss": [*_loss_curves(results)],
        "Samples": [Examples(samples)] if samples else [],
    }
    done = sum(result.seconds is not None for result in results)
    return render_html(Page(title, sections, states=[f"{done} of {len(results)} stages done"]))


def _tabulate(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Part]:
    return [Table(header, rows)] if rows else []


def _list_links(results: Sequence[StageResult]) -> list[Part]:
    """List links to the reports of training runs and the replays of samples."""
    rows: list[list[Cell]] = [
        [result.plan.name, Link(name, f"{result.plan.name}/{name}")]
        for result in results
        for name in (f"{RUN}/report.html", "answers.html")
        if (result.plan.directory / name).is_file()
    ]
    return [Table(["Pages of stages", ""], rows)] if rows else []


def _loss_curves(results: Sequence[StageResult]) -> list[Chart]:
    """One chart for each training stage."""
    charts = []
    for result in results:
        if not (result.plan.directory / RUN / "metrics.jsonl").is_file():
            continue
        series = read_run(result.plan.directory / RUN).numbers.get("loss_smooth")
        if series is not None:
            curve = build_curve(result.plan.name, series)
            charts.append(Chart(result.plan.name, "nats per token", [curve], "Smoothed training loss.", log=False))
    return charts
