"""The HTML page of the report: one self-contained file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from markupsafe import Markup

from cli.eval.report.comparing import ExampleGroup, ExampleItem
from cli.eval.report.contents import TaskContents, cut_text, describe_answer
from cli.eval.report.curve import draw_curves
from cli.eval.report.reading import EvaluationOrigin, TaskReport
from cli.eval.report.tables import ReportTable, format_metric
from files.terminal_text import escape_control_characters
from logger.pages.charts import draw_charts
from logger.pages.page import fill_page
from logger.pages.parts import format_number
from logger.pages.settings import render_settings
from logger.pages.tables import TableRow, join, table, terms

MAX_HEADLINE = 8


def render_page(report: TaskReport, tasks: Sequence[TaskContents]) -> str:
    """Render the page.

    Args:
        report: the evaluations.
        tasks: contents of each task.
    """
    charts: list[dict[str, Any]] = []

    def render(part: Callable[[TaskContents], Markup]) -> Markup:
        return join(_titled(contents, part(contents), len(tasks)) for contents in tasks)

    sections = {
        "Results": render(lambda contents: render_table(contents.results) + render_table(contents.answers)),
        "Comparisons": render(lambda contents: render_table(contents.pairs) if contents.pairs else Markup("")),
        "Speed and quality": render(lambda contents: _render_curves(contents, charts)),
        "Answers": render(lambda contents: join(map(_render_group, contents.examples))),
        "Protocol": render(lambda contents: render_settings(contents.settings, "protocols of these variants")),
        "Commands": join(map(_render_origin, report.origins)),
    }
    num_variants = len({variant.label for contents in tasks for variant in contents.task.variants})
    states = [_plural(len(tasks), "task"), _plural(num_variants, "variant")]
    headline = _headline(report) if num_variants == 1 else None
    title = escape_control_characters(report.title)
    notes = list(map(escape_control_characters, report.notes))
    return fill_page((title, title), sections, charts, notes, states, headline)


def render_table(content: ReportTable) -> Markup:
    """Render a table with its note."""
    note = Markup('<p class="note">{}</p>').format(content.note) if content.note else Markup("")
    first, *heads = map(escape_control_characters, (content.first, *content.heads))
    rows: list[TableRow] = [(name, list(map(escape_control_characters, cells))) for name, cells in content.rows]
    return table(heads, rows, first=first, classes="scores") + note


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _titled(contents: TaskContents, html: Markup, num_tasks: int) -> Markup:
    """Put the task's name above, if there are several."""
    if num_tasks == 1 or not html:
        return html
    return Markup("<h3>{}</h3>{}").format(escape_control_characters(contents.task.name), html)


def _headline(report: TaskReport) -> list[tuple[str, str, str]]:
    entries = []
    for task in report.tasks:
        for name, metric in task.variants[0].result.metrics.items():
            value, _, error = format_metric(metric, name in task.rules).partition(" ± ")
            entries.append((f"{task.name}, {name}", value, f"± {error}" if error else ""))
        speed = task.variants[0].result.tokens_per_forward
        if speed is not None:
            entries.append((f"{task.name}, speed", format_number(speed), "tokens per forward"))
    return entries[:MAX_HEADLINE]


def _render_curves(contents: TaskContents, charts: list[dict[str, Any]]) -> Markup:
    if contents.curves is None or contents.points is None:
        return Markup("")
    chart = draw_charts([draw_curves(contents.curves)], charts)
    return Markup('<div class="lone">{}{}</div>').format(chart, render_table(contents.points))


def _render_group(group: ExampleGroup) -> Markup:
    shown = "" if group.total == len(group.items) else f", {len(group.items)} of them here"
    title = f"{group.title}: {_plural(group.total, 'item')}{shown}"
    return Markup("<details><summary>{}</summary>{}</details>").format(
        escape_control_characters(title), join(_render_item(item) for item in group.items)
    )


def _render_item(item: ExampleItem) -> Markup:
    answers = join(
        Markup("<h4>{}</h4>{}<pre>{}</pre>").format(
            label, terms(describe_answer(answer), "facts"), cut_text(answer.output)
        )
        for label, answer in item.answers
    )
    return Markup('<section class="card answer"><h3>{}</h3><p class="note">right answer: {}</p>{}</section>').format(
        escape_control_characters(item.id), cut_text(item.gold), answers
    )


def _render_origin(origin: EvaluationOrigin) -> Markup:
    return Markup('<section class="card"><h3>{}</h3><pre>{}</pre>{}</section>').format(
        escape_control_characters(origin.name),
        escape_control_characters(origin.command),
        terms(origin.software.items(), "facts"),
    )
