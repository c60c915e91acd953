"""The report of a pipeline: what its stages did, as text, Markdown and a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cli.pipeline.page import render_page
from cli.pipeline.results import (
    BOUND_HEADER,
    HEADER,
    METRIC_HEADER,
    StageResult,
    list_bound_rows,
    list_metric_rows,
    read_results,
)
from cli.tables import make_table
from config.finetune.pipeline import MARKDOWN, PAGE
from files.atomic import write_text_atomic
from logger.pages import Part

if TYPE_CHECKING:
    from cli.pipeline.plan import StagePlan
    from cli.pipeline.state import StageState


def describe_states(states: Sequence[StageState]) -> list[Part]:
    """What each stage would do, for ``--dry-run``."""
    rows = [["stage", "kind", "from", "action", "why"]]
    for state in states:
        stage = state.plan.stage
        rows.append([stage.name, stage.kind, stage.input or "", state.status, state.reason])
    stale = sum(state.status == "stale" for state in states)
    note = f"{stale} stale: --force removes their results and runs them again" if stale else "nothing was started"
    return [make_table(rows, has_header=True), note]


def write_report(directory: Path, plans: Sequence[StagePlan]) -> list[Part]:
    """Write the report of the current results as Markdown and HTML, and return its tables.

    Raises:
        OSError: a file cannot be written.
    """
    results = read_results(plans)
    title = f"Pipeline {directory.resolve().name}"
    write_text_atomic(directory / MARKDOWN, render_markdown(results, title))
    write_text_atomic(directory / PAGE, render_page(results, title))
    parts: list[Part] = []
    for header, rows in list_tables(results).values():
        parts += [make_table([list(header), *rows], has_header=True), ""]
    return [*parts, *(str(directory / name) for name in (PAGE, MARKDOWN))]


def list_tables(results: Sequence[StageResult]) -> dict[str, tuple[Sequence[str], list[list[str]]]]:
    """Header and rows of the tables that have rows, by heading."""
    tables: dict[str, tuple[Sequence[str], list[list[str]]]] = {
        "Stages": (HEADER, [result.cells for result in results]),
        "Before and after": (BOUND_HEADER, list_bound_rows(results)),
        "Tasks": (METRIC_HEADER, list_metric_rows(results)),
    }
    return {heading: table for heading, table in tables.items() if table[1]}


def render_markdown(results: Sequence[StageResult], title: str) -> str:
    """Render the tables and the samples."""
    lines = [f"# {title}"]
    for heading, (header, rows) in list_tables(results).items():
        lines += ["", f"## {heading}", "", _markdown_row(header), "|" + " --- |" * len(header)]
        lines += map(_markdown_row, rows)
    for result in results:
        if result.samples:
            lines += ["", f"## Samples: {result.plan.name}", "", "| prompt | answer |", "| --- | --- |"]
            lines += [_markdown_row([sample.prompt, sample.answer]) for sample in result.samples]
    return "\n".join([*lines, ""])


def _markdown_row(cells: Sequence[str]) -> str:
    escaped = (cell.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>") for cell in cells)
    return f"| {' | '.join(escaped)} |"
