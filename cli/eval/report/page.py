"""The page of the report: built once, for the terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Sequence

from cli.eval.report.comparing import compare_pairs, select_examples
from cli.eval.report.curve import draw_curves
from cli.eval.report.reading import ReportedTask, TaskReport
from diffusionlm.evaluation.tasks.results import MetricValue, VariantResult
from logger.console import format_duration
from logger.pages import Cell, Code, Column, Number, Page, Part, Table
from logger.pages.settings import tabulate_settings

_ResultColumn = tuple[Column, list[Cell]]


def build_page(report: TaskReport) -> Page:
    """Build the page of one evaluation, or of several compared."""
    sections: dict[str, list[Part]] = {}
    for task in report.tasks:
        parts: dict[str, Sequence[Part]] = {
            "Results": tabulate_results(task),
            "Comparisons": compare_pairs(task),
            "Speed and quality": draw_curves(task),
            "Answers": select_examples(task),
            "Protocol": tabulate_settings(
                [(variant.label, variant.settings) for variant in task.variants], "protocols"
            ),
        }
        for name, own in parts.items():
            title: list[Part] = [task.name] if len(report.tasks) > 1 and own else []
            sections.setdefault(name, []).extend([*title, *own])
    commands = [Code(_describe_origin(command, software), name) for name, command, software in report.origins]
    num_variants = len({variant.label for task in report.tasks for variant in task.variants})
    states = [_plural(len(report.tasks), "task"), _plural(num_variants, "variant")]
    return Page(report.title, {**sections, "Commands": [*commands]}, report.notes, states)


def summarize(report: TaskReport) -> list[Part]:
    """Return the results and comparisons of each task, and the notes, for a terminal."""
    parts: list[Part] = []
    for task in report.tasks:
        parts += [task.name, *tabulate_results(task), *compare_pairs(task), ""]
    return [*parts[:-1], *report.notes]


def tabulate_results(task: ReportedTask) -> list[Table]:
    """Tabulate accuracies with pass@k, and how answers ended and what they cost; a row for each variant."""
    results = [variant.result for variant in task.variants]
    accuracies: list[_ResultColumn] = [
        (Column(name), [_metric(result.metrics.get(name), name in task.rules) for result in results])
        for name in task.metrics
    ]
    samples = dict.fromkeys(
        (rule, k) for result in results for rule in result.pass_at_k for k in result.pass_at_k[rule] if k > 1
    )  # pass@1 is the accuracy
    for rule, k in samples:
        name = f"pass@{k}" if len({rule for rule, _ in samples}) == 1 else f"pass@{k}, {rule}"
        accuracies.append((Column(name), [_metric(result.pass_at_k.get(rule, {}).get(k), True) for result in results]))
    accuracies.append((Column("items"), [_count_items(result) for result in results]))
    answers: list[_ResultColumn] = [
        (Column("tokens per forward", ".2f"), [result.tokens_per_forward for result in results])
    ]
    for share in ("stopped", "length", "empty", "invalid"):
        shares = [None if result.shares is None else getattr(result.shares, share) for result in results]
        answers.append((Column("cut by length" if share == "length" else share, ".1%"), shares))
    answers += [
        (Column("grading errors", ","), [result.num_grading_errors or None for result in results]),
        (Column("tokens"), [result.num_tokens or None for result in results]),
        (Column("forwards"), [result.num_forwards or None for result in results]),
        (Column("time"), [format_duration(result.seconds) if result.seconds else None for result in results]),
    ]
    note = "± is one standard error over items, whose repeats are averaged first." if task.rules else ""
    tables = [_build_table(task, accuracies, note), _build_table(task, answers)]
    return [table for table in tables if len(table.columns) > 1]


def _build_table(task: ReportedTask, columns: Sequence[_ResultColumn], note: str = "") -> Table:
    """Build a table of the columns that have a value."""
    columns = [(column, cells) for column, cells in columns if any(cell is not None for cell in cells)]
    rows = [[variant.label, *(cells[index] for _, cells in columns)] for index, variant in enumerate(task.variants)]
    return Table(["variant", *(column for column, _ in columns)], rows, note=note)


def _metric(metric: MetricValue | None, is_accuracy: bool) -> Cell:
    return None if metric is None else Number(metric.value, ".1%" if is_accuracy else "", metric.standard_error)


def _count_items(result: VariantResult) -> Cell:
    repeats = f" x {result.num_repeats}" if result.num_repeats > 1 else ""
    return f"{result.num_items:,}{repeats}" if result.num_items else None


def _describe_origin(command: str, software: dict[str, str]) -> str:
    return "\n".join([command, "", *(f"{name}: {value}" for name, value in software.items())]).rstrip()


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
