"""The speed-quality curve: accuracy over tokens per forward, for the variants of a task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cli.eval.report.reading import ReportedTask, ReportedVariant
from diffusionlm.evaluation.grading.speed_quality import accuracy_under_parallelism
from logger.pages import Chart, Curve


@dataclass(frozen=True)
class QualityPoint:
    """One variant on the curve."""

    label: str
    tokens_per_forward: float
    accuracy: float
    """Share of right answers, from 0 to 100."""
    standard_error: float | None


@dataclass(frozen=True)
class QualityCurve:
    """Variants that differ in one number, such as the threshold, in order of speed."""

    label: str
    points: tuple[QualityPoint, ...]
    aup: float | None
    """Accuracy under parallelism with `TaskCurves.best_accuracy`; None without a right answer."""


@dataclass(frozen=True)
class TaskCurves:
    """All curves of a task."""

    task: str
    rule: str
    best_accuracy: float
    """y_max of AUP: the best accuracy of the curves, in percent."""
    curves: tuple[QualityCurve, ...]


def build_curves(task: ReportedTask) -> TaskCurves | None:
    """Group the variants that generate into curves; None if fewer than two have an accuracy and a speed."""
    rule = task.rules[0] if task.rules else ""
    points = {variant.label: point for variant in task.variants if (point := _point(variant, rule)) is not None}
    if len(points) < 2:
        return None
    groups: dict[str, list[QualityPoint]] = {}
    settings = {
        variant.label: {"model": variant.result.model, **flatten_settings(variant.result.protocol)}
        for variant in task.variants
        if variant.label in points
    }
    for label, name in name_curves(settings).items():
        groups.setdefault(name, []).append(points[label])
    best = max(point.accuracy for point in points.values())
    curves = []
    for name, members in groups.items():
        members.sort(key=lambda point: point.tokens_per_forward)
        pairs = [(point.tokens_per_forward, point.accuracy) for point in members]
        area = accuracy_under_parallelism(pairs, best) if best > 0.0 else None
        curves.append(QualityCurve(name, tuple(members), area))
    return TaskCurves(task.name, rule, best, tuple(curves))


def _point(variant: ReportedVariant, rule: str) -> QualityPoint | None:
    metric, speed = variant.result.metrics.get(rule), variant.result.tokens_per_forward
    if metric is None or speed is None or not math.isfinite(metric.value):
        return None
    error = None if metric.standard_error is None else 100.0 * metric.standard_error
    return QualityPoint(variant.label, speed, 100.0 * metric.value, error)


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten_settings(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


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
    name = key.rpartition(".")[2]
    if value is None:
        return ""
    return str(value) if isinstance(value, str) else f"{name} {value}"


def draw_curves(curves: TaskCurves) -> Chart:
    """Chart of accuracy with error bars over tokens per forward."""
    lines = [
        Curve(
            curve.label,
            np.array([point.tokens_per_forward for point in curve.points]),
            np.array([point.accuracy for point in curve.points]),
            error_N=np.array(
                [math.nan if point.standard_error is None else point.standard_error for point in curve.points]
            ),
            color=color,
            has_dots=True,
        )
        for color, curve in enumerate(curves.curves)
    ]
    return Chart(
        f"{curves.task}: accuracy over speed",
        f"% right ({curves.rule}) by tokens per forward",
        lines,
        note="Bars: one standard error over items. Tokens count up to the stop, forwards as the decoder counts them.",
        x_name="tokens per forward",
        y_least=0.0,
        x_end=1.05 * max(point.tokens_per_forward for curve in curves.curves for point in curve.points),
    )
