"""Build the charts of a report from the metrics of its runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from logger.pages import Chart, Curve, Floats
from logger.report.reading import LoggedRun

MAX_POINTS_PER_CHART = 2400
"""Points of all curves of a chart; more would not be visible on a wide screen."""


@dataclass(frozen=True)
class ChartSpec:
    """The metrics of a chart and their presentation."""

    title: str
    unit: str
    keys: str
    """Regular expression for whole metric names; its first group, if any, names the curve."""
    scale: float = 1.0
    """Factor from the metric to the unit."""
    is_log: bool = False
    from_zero: bool = False
    is_smoothed: bool = False
    note: str = ""
    errors: str = ""
    """Name of the metric of the standard errors."""


CHART_SPECS = (
    ChartSpec("Reward", "of answers, mean and best of a group", r"rl/(reward|best_of_group)", is_smoothed=True),
    ChartSpec("Training loss", "nats per token", "loss", is_smoothed=True),
    ChartSpec("Validation", "nats per token", "val_nats_per_token", errors="val_standard_error"),
    ChartSpec("Validation, by bytes", "bits per byte", "val_bits_per_byte", errors="val_bits_per_byte_standard_error"),
    ChartSpec("Balance loss of the routers", "with its weight", "balance_loss", is_smoothed=True),
    ChartSpec(
        "Top-1 accuracy", "% of masked tokens, by masked share", r"val_top1_accuracy/(.+)", 100.0, from_zero=True
    ),
    ChartSpec("Accuracy on tasks", "%", r"tasks/(.+)", 100.0, from_zero=True),
    ChartSpec(
        "Loss by masked share, over the run",
        "nats per masked token",
        r"loss_by_masked_fraction/(.+)",
        is_smoothed=True,
    ),
    ChartSpec("Gradient norm", "before clipping", "grad_l2_norm", is_log=True, is_smoothed=True),
    ChartSpec("Gradient clipping", "factor on the gradient", "grad_clip_ratio", from_zero=True, is_smoothed=True),
    ChartSpec("Masked tokens", "share of the targets", "mask_ratio", is_smoothed=True),
    ChartSpec("Learning rate", "", r"lr/(.+)", from_zero=True),
    ChartSpec(
        "Throughput", "tokens per second", "tokens_per_second", from_zero=True, note="Mean since the start of the run."
    ),
    ChartSpec("Time of a step", "seconds", "step_seconds", from_zero=True, is_smoothed=True),
    ChartSpec("Model FLOPs utilisation", "% of the peak", "mfu", 100.0, from_zero=True, is_smoothed=True),
    ChartSpec("Memory of the device", "GiB", r"memory/(.+)", 2.0**-30, from_zero=True),
    ChartSpec("Norms of weights", "L2, of all parameters", r"weight_norms/(mean|min|max)"),
    ChartSpec("Norms of activations", "L2, mean over positions", r"activation_norms/(?!mean$|min$|max$)(.+)"),
)


METRICS_WITHOUT_CHART = (
    "loss_smooth", "lr", "tokens_seen", "seconds_left", "skipped_steps", "final_.+", "weight_norms/.+", "activation_.+",
)  # fmt: skip
"""Regular expressions for metrics in another chart, in the table of results, or of which there are hundreds."""


def main_charts(runs: Sequence[LoggedRun]) -> list[Chart]:
    """Return the charts of known metrics, in order, without empty ones."""
    return [chart for spec in CHART_SPECS for chart in _build_charts(spec, runs)]


def other_charts(runs: Sequence[LoggedRun]) -> list[Chart]:
    """Return a chart for each other metric, except for the norms of single parameters and modules."""
    known = [*METRICS_WITHOUT_CHART, *(spec.keys for spec in CHART_SPECS), *(spec.errors for spec in CHART_SPECS)]
    charted = re.compile("|".join(f"(?:{keys})" for keys in known))
    keys = dict.fromkeys(key for run in runs for key in run.numbers if not charted.fullmatch(key))
    return [chart for key in keys for chart in _build_charts(ChartSpec(key, "", re.escape(key)), runs)]


def _build_charts(spec: ChartSpec, runs: Sequence[LoggedRun]) -> list[Chart]:
    """Build a chart of all metrics of one run, or a chart for each metric of several runs; empty ones are left out."""
    keys = list(dict.fromkeys(key for run in runs for key in run.numbers if re.fullmatch(spec.keys, key)))
    matches = {key: re.fullmatch(spec.keys, key) for key in keys}
    labels = {key: match[1].replace("_", " ") if match and match.groups() else "" for key, match in matches.items()}
    if len(runs) == 1:
        charts = [(spec.title, [(labels[key] or runs[0].name, runs[0], key) for key in keys])]
    else:
        titles = {key: f"{spec.title}, {label}" if label else spec.title for key, label in labels.items()}
        charts = [(titles[key], [(run.name, run, key) for run in runs]) for key in keys]
    x_end = float(max(run.last_step for run in runs))  # the axis of steps is as long as the longest run
    built = [_build_chart(spec, title, metrics, x_end) for title, metrics in charts]
    return [chart for chart in built if chart.lines]


def _build_chart(spec: ChartSpec, title: str, metrics: Sequence[tuple[str, LoggedRun, str]], x_end: float) -> Chart:
    """Build a chart of metrics: name of the curve, run and key."""
    chart = Chart(title, spec.unit, [], is_log=spec.is_log, from_zero=spec.from_zero, x_end=x_end)
    notes, num_missing = [spec.note], 0
    for color, (name, run, key) in enumerate(metrics):
        logged, errors = run.numbers.get(key), run.numbers.get(spec.errors)
        if logged is None or logged.last is None:
            continue
        values_N = logged.values_N * spec.scale
        at = downsample(values_N, max(40, MAX_POINTS_PER_CHART // (2 * len(metrics))))
        smooth_N = moving_average(values_N)[at] if spec.is_smoothed else None
        is_aligned = errors is not None and np.array_equal(errors.steps_N, logged.steps_N)
        error_N = errors.values_N[at] if errors is not None and is_aligned else None
        chart.lines.append(Curve(name, logged.steps_N[at], values_N[at], color, smooth_N, error_N, len(at) <= 30))
        num_missing += int((~np.isfinite(values_N)).sum())
    if any(line.error_N is not None for line in chart.lines):
        notes.append("Bars: one standard error.")
    if num_missing:
        notes.append(f"Values that are not finite: {num_missing:,}.")
    chart.note = " ".join(filter(None, notes))
    return chart


def downsample(values_N: Floats, num_buckets: int) -> NDArray[np.int64]:
    """Return indices of points that draw the same curve.

    These are the minimum and maximum of each bucket, the first and the last point. A bucket without finite values keeps
    one index, as a gap. Short series keep all indices.
    """
    number = len(values_N)
    if number <= 2 * num_buckets + 2:
        return np.arange(number)
    least_N = np.where(np.isfinite(values_N), values_N, np.inf)
    greatest_N = np.where(np.isfinite(values_N), values_N, -np.inf)
    edges = np.linspace(0, number, num_buckets + 1).astype(np.int64)
    indices = {0, number - 1}
    for start, end in pairwise(edges.tolist()):
        indices |= {start + int(least_N[start:end].argmin()), start + int(greatest_N[start:end].argmax())}
    return np.array(sorted(indices))


def moving_average(values_N: Floats) -> Floats:
    """Return centered means over a fiftieth of the points, at least five; NaN is ignored.

    The window shrinks symmetrically at the start, where curves are steep, and is one-sided at the end.
    """
    number = len(values_N)
    reach = max(2, number // 100)
    is_there_N = np.isfinite(values_N)
    sums = np.concatenate([[0.0], np.cumsum(np.where(is_there_N, values_N, 0.0))])
    counts = np.concatenate([[0], np.cumsum(is_there_N)])
    indices_N = np.arange(number)
    reach_N = np.minimum(reach, indices_N)
    first_N, end_N = indices_N - reach_N, np.minimum(number, indices_N + reach_N + 1)
    counts_N = counts[end_N] - counts[first_N]
    means_N: Floats = (sums[end_N] - sums[first_N]) / np.maximum(1, counts_N)
    return np.where(is_there_N & (counts_N > 0), means_N, np.nan)
