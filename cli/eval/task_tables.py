"""The printed results of tasks."""

from __future__ import annotations

from cli.tables import make_table
from diffusionlm.evaluation.tasks.results import EvaluationResults, MetricValue, VariantComparison, VariantResult
from logger.pages import Part

TEXT_METRICS = ("nats_per_token", "bits_per_byte", "perplexity")
"""Metrics that are no shares."""


def format_results(results: EvaluationResults) -> list[Part]:
    """A table for each task, its paired differences from the first variant, and the notes."""
    parts: list[Part] = []
    for task in dict.fromkeys(result.task for result in results.results):
        rows = [result for result in results.results if result.task == task]
        parts.append(_format_task(rows))
        comparisons = [item for item in results.comparisons if item.task == task and item.first == rows[0].variant]
        if comparisons:
            parts += ["", _format_comparisons(comparisons)]
        parts.append("")
    return [*parts[:-1], *results.notes]


def _format_task(results: list[VariantResult]) -> Part:
    metrics = list(dict.fromkeys(name for result in results for name in result.metrics))
    samples = [(rule, size) for result in results for rule, values in result.pass_at_k.items() for size in values]
    samples = [entry for entry in dict.fromkeys(samples) if entry[1] > 1]
    is_generated = any(result.shares is not None for result in results)
    header = [results[0].task, "items", *metrics, *(f"{rule} pass@{size}" for rule, size in samples)]
    header += ["tokens/forward", "stopped", "cut", "empty", "invalid"] if is_generated else ["forwards"]
    rows = [header]
    for result in results:
        cells = [result.variant, f"{result.num_items:,}"]
        cells += [_format_metric(name, result.metrics.get(name)) for name in metrics]
        cells += [_format_metric(rule, result.pass_at_k.get(rule, {}).get(size)) for rule, size in samples]
        forwards = f"{result.num_forwards:,}" if result.num_forwards else ""
        rows.append([*cells, *(_format_answers(result) if is_generated else [forwards])])
    return make_table(rows, has_header=True, right=range(1, len(header)))


def _format_answers(result: VariantResult) -> list[str]:
    shares, speed = result.shares, result.tokens_per_forward
    if shares is None:
        return ["", "", "", "", ""]
    parts = [f"{share:.1%}" for share in (shares.stopped, shares.length, shares.empty, shares.invalid)]
    if result.num_grading_errors:
        parts[-1] += f" ({result.num_grading_errors:,} failed to be graded)"
    return ["" if speed is None else f"{speed:.2f}", *parts]


def _format_metric(name: str, metric: MetricValue | None) -> str:
    if metric is None:
        return ""
    pattern = ".3f" if name in TEXT_METRICS else ".1%"
    error = "" if metric.standard_error is None else f" +- {metric.standard_error:{pattern}}"
    return f"{metric.value:{pattern}}{error}"


def _format_comparisons(comparisons: list[VariantComparison]) -> Part:
    rows = [["paired differences", "rule", "difference", "only first", "only second", "p"]]
    for item in comparisons:
        error = "" if item.standard_error is None else f" +- {item.standard_error:.1%}"
        rows.append(
            [
                f"{item.second} - {item.first}",
                item.rule,
                f"{item.difference:+.1%}{error}",
                f"{item.num_only_first:,}",
                f"{item.num_only_second:,}",
                f"{item.p_value:.3f}",
            ]
        )
    return make_table(rows, has_header=True, right=range(2, 6))
