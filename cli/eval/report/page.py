"""The HTML page of the report: one self-contained file."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from cli.eval.report.comparing import ExampleGroup, ExampleItem, compare_pairs, select_examples
from cli.eval.report.curve import build_curves, draw_curves, flatten_settings
from cli.eval.report.reading import EvaluationOrigin, ReportedTask, TaskReport
from cli.eval.report.tables import ReportTable, format_metric, tabulate_curves, tabulate_pairs, tabulate_results
from diffusionlm.evaluation.tasks.results import ItemResult
from files.terminal_text import escape_control_characters
from logger.pages.axes import format_number
from logger.pages.charts import draw_charts
from logger.pages.page import fill_page
from logger.pages.settings import render_settings
from logger.pages.tables import TableRow, join, table, terms

MAX_TEXT = 1_500
"""Characters of an answer on the page; the files contain all of it."""
MAX_HEADLINE = 8


def render_page(report: TaskReport) -> str:
    """Render the page."""
    charts: list[dict[str, Any]] = []
    sections = {
        "Results": join(_titled(task, report, render_table(tabulate_results(task))) for task in report.tasks),
        "Comparisons": join(_render_pairs(task, report) for task in report.tasks),
        "Speed and quality": join(_render_curves(task, charts) for task in report.tasks),
        "Answers": join(_render_examples(task, report) for task in report.tasks),
        "Protocol": join(_render_protocol(task, report) for task in report.tasks),
        "Commands": join(map(_render_origin, report.origins)),
    }
    num_variants = len({variant.label for task in report.tasks for variant in task.variants})
    states = [_plural(len(report.tasks), "task"), _plural(num_variants, "variant")]
    headline = _headline(report) if num_variants == 1 else None
    title = escape_control_characters(report.title)
    return fill_page(
        (title, title), sections, charts, list(map(escape_control_characters, report.notes)), states, headline
    )


def render_table(content: ReportTable) -> Markup:
    """Render a table with its note."""
    note = Markup('<p class="note">{}</p>').format(content.note) if content.note else Markup("")
    first, *heads = map(escape_control_characters, (content.first, *content.heads))
    rows: list[TableRow] = [(name, list(map(escape_control_characters, cells))) for name, cells in content.rows]
    return table(heads, rows, first=first, classes="scores") + note


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _titled(task: ReportedTask, report: TaskReport, html: Markup) -> Markup:
    """Put the task's name above, if there are several."""
    if len(report.tasks) == 1 or not html:
        return html
    return Markup("<h3>{}</h3>{}").format(escape_control_characters(task.name), html)


def _headline(report: TaskReport) -> list[tuple[str, str, str]]:
    entries = []
    for task in report.tasks:
        for rule, metric in task.variants[0].result.metrics.items():
            value, _, error = format_metric(metric, task.is_accuracy).partition(" ± ")
            entries.append((f"{task.name}, {rule}", value, f"± {error}" if error else ""))
        speed = task.variants[0].result.tokens_per_forward
        if speed is not None:
            entries.append((f"{task.name}, speed", format_number(speed), "tokens per forward"))
    return entries[:MAX_HEADLINE]


def _render_pairs(task: ReportedTask, report: TaskReport) -> Markup:
    pairs = compare_pairs(task)
    return _titled(task, report, render_table(tabulate_pairs(pairs))) if pairs else Markup("")


def _render_curves(task: ReportedTask, charts: list[dict[str, Any]]) -> Markup:
    curves = build_curves(task)
    if curves is None:
        return Markup("")
    chart = draw_charts([draw_curves(curves)], charts)
    return Markup('<div class="lone">{}{}</div>').format(chart, render_table(tabulate_curves(curves)))


def _render_examples(task: ReportedTask, report: TaskReport) -> Markup:
    return _titled(task, report, join(map(_render_group, select_examples(task))))


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


def describe_answer(answer: ItemResult) -> list[tuple[str, str]]:
    """Return names and values: what was extracted by each rule and whether it is right, how the answer ended."""
    facts = []
    for rule, is_right in answer.is_correct.items():
        if answer.chosen and rule in answer.chosen:
            found = f"option {answer.chosen[rule]}"
        elif rule in answer.extracted:
            value = answer.extracted[rule]
            found = "nothing" if value is None else cut_text(value, 80)
        else:
            found = ""
        facts.append((rule, f"{'right' if is_right else 'wrong'}{': ' * bool(found)}{found}"))
    if answer.option_log_likelihoods:
        facts.append(("log-likelihoods", ", ".join(f"{value:.2f}" for value in answer.option_log_likelihoods)))
    if answer.finish_reason is not None:
        ending = "stopped" if answer.finish_reason == "stop" else "cut by length"
        facts.append(("ended", f"{ending}, {answer.num_tokens:,} tokens, {answer.num_forwards:,} forwards"))
    facts += [
        (name, cut_text(text, 300)) for name, text in (("detail", answer.detail), ("error", answer.error)) if text
    ]
    return facts


def cut_text(text: str, length: int = MAX_TEXT) -> str:
    """Return at most so many characters with control characters as escapes, and say how many there are more."""
    rest = len(text) - length
    return escape_control_characters(text[:length]) + (f" ... ({rest:,} more characters)" if rest > 0 else "")


def _render_protocol(task: ReportedTask, report: TaskReport) -> Markup:
    columns = [(variant.label, protocol_of(task, index)) for index, variant in enumerate(task.variants)]
    return _titled(task, report, render_settings(columns, "protocols of these variants"))


def protocol_of(task: ReportedTask, index: int) -> dict[str, Any]:
    """Return the settings, model and fingerprints of a variant, flat."""
    result = task.variants[index].result
    fingerprints = {f"fingerprints.{name}": value for name, value in result.fingerprints.items()}
    return {"model": result.model, **flatten_settings(result.protocol), **fingerprints}


def _render_origin(origin: EvaluationOrigin) -> Markup:
    return Markup('<section class="card"><h3>{}</h3><pre>{}</pre>{}</section>').format(
        escape_control_characters(origin.name),
        escape_control_characters(origin.command),
        terms(origin.software.items(), "facts"),
    )
