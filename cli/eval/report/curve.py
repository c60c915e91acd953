"""The speed-quality curve: accuracy over tokens per forward, for the variants of a task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cli.eval.report.reading import ReportedTask, ReportedVariant
from diffusionlm.evaluation.grading.speed_quality import accuracy_under_parallelism
from logger.pages import Cell, Chart, Column, Curve, Number, Part, Table


def draw_curves(task: ReportedTask) -> list[Part]:
    """Build the chart and the table of the variants that generate; empty if fewer than two have accuracy and speed."""
    rule = task.rules[0] if task.rules else ""
    points = {variant.label: point for variant in task.variants if (point := _point(variant, rule)) is not None}
    if len(points) < 2:
        return []
    settings = {variant.label: variant.settings for variant in task.variants if variant.label in points}
    groups: dict[str, list[str]] = {}
    for label, name in name_curves(settings).items():
        groups.setdefault(name, []).append(label)
    best = max(accuracy.value for _, accuracy in points.values())
    curves: list[Curve] = []
    rows: list[list[Cell]] = []
    for name, labels in groups.items():
        labels.sort(key=lambda label: points[label][0])
        speeds = [points[label][0] for label in labels]
        values = [100.0 * points[label][1].value for label in labels]
        errors = [math.nan if (e := points[label][1].error) is None else 100.0 * e for label in labels]
        curve = Curve(name, np.array(speeds), np.array(values), len(curves), error_N=np.array(errors), has_dots=True)
        curves.append(curve)
        area = accuracy_under_parallelism(list(zip(speeds, values, strict=True)), 100.0 * best) if best > 0.0 else None
        for label, aup in zip(labels, [area, *[None] * len(labels)], strict=False):
            rows.append([label, name, *points[label], aup])
    chart = Chart(
        f"{task.name}: accuracy over speed",
        f"% right ({rule}) by tokens per forward",
        curves,
        note="Bars: one standard error over items. Tokens count up to the stop, forwards as the decoder counts them.",
        x_name="tokens per forward",
        y_least=0.0,
        x_end=1.05 * max(speed for speed, _ in points.values()),
    )
    note = (
        f"AUP: accuracy under parallelism with y_max = {best:.1%}, the best accuracy of this table. Compare it only "
        "with values of the same y_max."
    )
    heads: list[Column | str] = ["variant", "curve", Column("tokens per forward", ".2f"), Column(rule)]
    heads.append(Column("AUP", ".1f"))
    if not best:
        heads, rows, note = heads[:-1], [row[:-1] for row in rows], "No answer is right."
    return [chart, Table(heads, rows, note=note)]


def _point(variant: ReportedVariant, rule: str) -> tuple[float, Number] | None:
    metric, speed = variant.result.metrics.get(rule), variant.result.tokens_per_forward
    if metric is None or speed is None or not math.isfinite(metric.value):
        return None
    return speed, Number(metric.value, ".1%", metric.standard_error)


def name_curves(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Name the curve of each variant.

    Variants with the same texts and switches (model, strategy, ...) belong together. If several numbers differ among
    them, the one with the most values runs along the curve, and each combination of the others has a curve of its own,
    except for numbers that follow from the first one.

    Args:
        settings: dotted key -> value, by variant.

    Returns:
        The name of the curve, by variant.
    """
    keys = list(dict.fromkeys(key for own in settings.values() for key in own))
    different = [key for key in keys if len({repr(own.get(key)) for own in settings.values()}) > 1]
    numbers = [key for key in different if all(_is_number(own.get(key)) for own in settings.values())]
    texts = [key for key in different if key not in numbers]
    groups: dict[tuple[str, ...], list[str]] = {}
    for label, own in settings.items():
        groups.setdefault(tuple(repr(own.get(key)) for key in texts), []).append(label)
    names = {}
    for members in groups.values():
        splitting = _splitting_numbers([settings[label] for label in members], numbers)
        for label in members:
            parts = [_describe(key, settings[label].get(key)) for key in (*texts, *splitting)]
            names[label] = ", ".join(filter(None, parts)) or "all variants"
    return names


def _splitting_numbers(members: Sequence[Mapping[str, Any]], numbers: Sequence[str]) -> list[str]:
    """Return the numbers that part the variants into curves: those that vary while the main number does not."""
    values = {key: [own.get(key) for own in members] for key in numbers}
    if not values:
        return []
    main = max(values, key=lambda key: len(set(values[key])))
    return [
        key
        for key in numbers
        if key != main and len(set(zip(values[main], values[key], strict=True))) > len(set(values[main]))
    ]


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _describe(key: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{key.rpartition('.')[2]} {value}"
