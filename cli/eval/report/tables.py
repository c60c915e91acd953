"""The tables of the report, as text that both HTML and Markdown show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cli.eval.report.comparing import VariantPair
from cli.eval.report.curve import TaskCurves
from cli.eval.report.reading import ReportedTask
from diffusionlm.evaluation.tasks.results import MetricValue, VariantResult
from logger.console import format_duration
from logger.pages.parts import format_number
from logger.pages.tables import TableRow


@dataclass(frozen=True)
class ReportTable:
    """A table: headings, and rows that begin with a name."""

    first: str
    """Heading of the names."""
    heads: tuple[str, ...]
    rows: tuple[TableRow, ...]
    note: str = ""


def tabulate_results(task: ReportedTask) -> ReportTable:
    """Accuracy by rule and pass@k, which for one sample is the accuracy; a row for each variant."""
    results = [variant.result for variant in task.variants]
    columns: list[tuple[str, list[str]]] = [
        (name, [format_metric(result.metrics.get(name), name in task.rules) for result in results])
        for name in task.metrics
    ]
    samples = dict.fromkeys(
        (rule, k) for result in results for rule in result.pass_at_k for k in result.pass_at_k[rule] if k > 1
    )
    for rule, k in samples:
        values = [result.pass_at_k.get(rule, {}).get(k) for result in results]
        name = f"pass@{k}" if len({rule for rule, _ in samples}) == 1 else f"pass@{k}, {rule}"
        columns.append((name, [format_metric(value, is_accuracy=True) for value in values]))
    columns.append(("items", [_count_items(result) for result in results]))
    note = "± is one standard error over items, whose repeats are averaged first." if task.rules else ""
    return _build_table(task, columns, note)


def tabulate_answers(task: ReportedTask) -> ReportTable:
    """How answers ended and what they cost; a row for each variant."""
    results = [variant.result for variant in task.variants]
    columns = [("tokens per forward", [_format_speed(result.tokens_per_forward) for result in results])]
    for name in ("stopped", "length", "empty", "invalid"):
        shares = [None if result.shares is None else float(getattr(result.shares, name)) for result in results]
        columns.append((SHARE_NAMES[name], [format_share(share) for share in shares]))
    columns += [
        (
            "grading errors",
            [f"{result.num_grading_errors:,}" if result.num_grading_errors else "" for result in results],
        ),
        ("tokens", [format_number(result.num_tokens) if result.num_tokens else "" for result in results]),
        ("forwards", [format_number(result.num_forwards) if result.num_forwards else "" for result in results]),
        ("time", [format_duration(result.seconds) if result.seconds else "" for result in results]),
    ]
    return _build_table(task, columns)


def _build_table(task: ReportedTask, columns: Sequence[tuple[str, list[str]]], note: str = "") -> ReportTable:
    """Build a table of the columns that have a value."""
    columns = [column for column in columns if any(column[1])]
    rows = [(variant.label, [cells[index] for _, cells in columns]) for index, variant in enumerate(task.variants)]
    return ReportTable("variant", tuple(name for name, _ in columns), tuple(rows), note)


SHARE_NAMES = {"stopped": "stopped", "length": "cut by length", "empty": "empty", "invalid": "invalid"}


def tabulate_pairs(pairs: Sequence[VariantPair]) -> ReportTable:
    """Paired differences; a row for each pair and rule."""
    rows = []
    bases = {pair.first for pair in pairs}
    base = bases.pop() if len(bases) == 1 and len({pair.second for pair in pairs}) > 1 else None
    for pair in pairs:
        result = pair.difference
        error = f" ± {100 * result.standard_error:.1f}" if math.isfinite(result.standard_error) else ""
        cells = [
            pair.rule,
            f"{100 * result.difference:+.1f}{error}",
            format_p_value(result.p_value),
            f"{result.num_a_better:,}",
            f"{result.num_b_better:,}",
            f"{result.num_items:,}" + (f" ({pair.num_left_out:,} left out)" if pair.num_left_out else ""),
        ]
        rows.append((pair.second if base else f"{pair.second} - {pair.first}", cells))
    heads = ("rule", "points", "p", "only B right", "only A right", "items in both")
    note = (
        "Difference of accuracies in percentage points on the same items, ± one standard error; p: exact two-sided "
        f"sign test on the items that differ, not corrected for the number of comparisons ({len(rows)} here)."
    )
    return ReportTable("B" if base else "B - A", heads, tuple(rows), f"A is {base}. {note}" if base else note)


def tabulate_curves(curves: TaskCurves) -> ReportTable:
    """The points of the curves, and the AUP of each."""
    rows: list[TableRow] = []
    for curve in curves.curves:
        for index, point in enumerate(curve.points):
            error = "" if point.standard_error is None else f" ± {point.standard_error:.1f}"
            aup = "" if index or curve.aup is None else f"{curve.aup:.1f}"
            rows.append(
                (point.label, [curve.label, f"{point.tokens_per_forward:.2f}", f"{point.accuracy:.1f}{error}", aup])
            )
    y_max = f"{curves.best_accuracy:.1f}"
    note = (
        f"AUP: accuracy under parallelism with y_max = {y_max} %, the best accuracy of this table. Compare it only "
        "with values of the same y_max."
    )
    heads = ("curve", "tokens per forward", f"{curves.rule}, %", f"AUP, y_max = {y_max}")
    if not curves.best_accuracy:
        return ReportTable(
            "variant", heads[:3], tuple((name, cells[:3]) for name, cells in rows), "No answer is right."
        )
    return ReportTable("variant", heads, tuple(rows), note)


def format_metric(metric: MetricValue | None, is_accuracy: bool) -> str:
    """Format a metric with its error: in percent, or as a number."""
    if metric is None:
        return ""
    if not math.isfinite(metric.value):
        return "not finite"
    error = metric.standard_error
    has_error = error is not None and math.isfinite(error)
    if is_accuracy:
        return f"{100 * metric.value:.1f} %" + (f" ± {100 * (error or 0.0):.1f}" if has_error else "")
    return format_number(metric.value) + (f" ± {format_number(error or 0.0, 2)}" if has_error else "")


def format_share(share: float | None) -> str:
    """Format a share in percent; rare ones are not rounded to zero."""
    if share is None or not math.isfinite(share):
        return ""
    return "< 0.1 %" if 0.0 < share < 0.001 else f"{100 * share:.1f} %"


def format_p_value(value: float) -> str:
    """Format with two significant digits; very small ones as a bound."""
    return "< 0.0001" if value < 1e-4 else f"{value:.2g}"


def _count_items(result: VariantResult) -> str:
    if not result.num_items:
        return ""
    return f"{result.num_items:,}" + (f" x {result.num_repeats}" if result.num_repeats > 1 else "")


def _format_speed(tokens_per_forward: float | None) -> str:
    return "" if tokens_per_forward is None else f"{tokens_per_forward:.2f}"
