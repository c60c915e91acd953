"""Draw a chart as SVG: its curves beside the names and ticks of its axes.

It needs no script, which only shows values under the pointer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from files.terminal_text import escape_control_characters
from logger.pages import Chart, Curve, Floats, describe_chart, format_number

WIDTH, HEIGHT = 2000, 1000
"""Size of the view box that holds the curves."""

FRAME_WIDTH, FRAME_HEIGHT = 480, 256
"""Size of a drawing with the labels of its axes. A stylesheet knows the ratio, and the place of the curves in it."""

AREA = (48, 10, 412, 206)
"""Left, top, width and height of the curves."""


def escape_text(text: str) -> Markup:
    """Escape text, and show its control characters, so that it can neither reorder nor hide its neighbors."""
    return escape(escape_control_characters(text))


def draw_chart(chart: Chart) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the template of a figure needs, and the values for the page's script."""
    across, up = _horizontal(chart), _vertical(chart)
    figure = {
        "title": chart.title,
        "unit": chart.unit,
        "note": chart.note,
        "drawing": Markup(_draw(chart, across, up)),
        "view_box": f"0 0 {FRAME_WIDTH} {FRAME_HEIGHT}",
        "description": describe_chart(chart),
        "legend": [(style_classes(line.color) + " dot" * (len(line.x_N) == 1), line.name) for line in chart.lines],
    }
    return figure, _values(chart, across, up)


def _draw(chart: Chart, across: AxisScale, scale: AxisScale) -> str:
    """Return the curves with the names and ticks of their axes."""
    left, top, width, height = AREA
    bottom = top + height
    labels = [
        _text(left - 6, bottom - height * scale.to_unit(value) + 4, format_number(value), "end")
        for value in scale.ticks()
    ]
    labels += [
        _text(left + width * across.to_unit(value), bottom + 19, format_number(value), "middle")
        for value in across.ticks()
    ]
    labels.append(_text(left + width / 2, bottom + 35, escape_text(chart.x_name), "middle"))
    grid = "".join(f"M0 {_y(scale.to_unit(value))}H{WIDTH}" for value in scale.ticks())
    lines = "".join(_line(line, across, scale) for line in chart.lines)
    return (
        f'<svg x="{left}" y="{top}" width="{width}" height="{height}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'preserveAspectRatio="none"><path class="grid" d="{grid}"/>{lines}</svg>' + "".join(labels)
    )


def _text(x: float, y: float, markup: str, anchor: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" xml:space="preserve">{markup}</text>'


def _horizontal(chart: Chart) -> AxisScale:
    edges = [chart.x_end, *(edge for line in chart.lines for edge in (line.x_N[0], line.x_N[-1]))]
    low, high = min(0.0, *edges), max(edges)
    return AxisScale(float(low), float(high if high > low else low + 1.0))


def _vertical(chart: Chart) -> AxisScale:
    """Return the vertical scale, with a margin around values and error bars."""
    errors = [(line.y_N, 0.0 if line.error_N is None else line.error_N) for line in chart.lines]
    values_N = np.concatenate([part for y_N, error in errors for part in (y_N, y_N - error, y_N + error)])
    values_N = values_N[np.isfinite(values_N)]
    low, high = float(values_N.min()), float(values_N.max())
    if chart.is_log and low > 1e-100:
        ratio = max((high / low) ** 0.05, 1.02)
        return AxisScale(low / ratio, high * ratio, is_log=True)
    if chart.from_zero:
        low, high = min(0.0, low), max(0.0, high)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    bottom = 0.0 if chart.from_zero and low == 0.0 else chart.y_least
    return AxisScale(max(low - margin, bottom), high + margin)


def _line(line: Curve, across: AxisScale, scale: AxisScale) -> str:
    x_N, y_N = across(line.x_N), scale(line.y_N)
    parts = []
    if line.error_N is not None:
        parts.append(_bars(x_N, scale(line.y_N - line.error_N), scale(line.y_N + line.error_N)))
    if line.smooth_N is not None:
        parts.append(
            f'<path class="raw" d="{_path(x_N, y_N)}"/><path class="smooth" d="{_path(x_N, scale(line.smooth_N))}"/>'
        )
    elif len(line.x_N) > 1:
        parts.append(f'<path d="{_path(x_N, y_N)}"/>')
    if line.has_dots:
        dots = "".join(f"M{_x(x)} {_y(y)}h0" for x, y in zip(x_N, y_N, strict=True) if math.isfinite(y))
        parts.append(f'<path class="dots" d="{dots}"/>')
    return f'<g class="{style_classes(line.color)}">{"".join(parts)}</g>'


def style_classes(color: int) -> str:
    """Return the CSS classes of a color; each round of the eight colors has other dashes."""
    return f"c{color % 8} d{color // 8 % 4}"


def _path(x_N: Floats, y_N: Floats) -> str:
    """Return a path of straight lines with gaps at NaN; a single number between gaps is a dot."""
    points = zip(x_N.tolist(), y_N.tolist(), strict=True)
    runs = [list(run) for is_there, run in groupby(points, lambda point: math.isfinite(point[1])) if is_there]
    return "".join("M" + " ".join(f"{_x(x)} {_y(y)}" for x, y in run) + "h0" * (len(run) == 1) for run in runs)


def _bars(x_N: Floats, low_N: Floats, high_N: Floats) -> str:
    """Return a vertical bar at each point that has both ends."""
    bars = zip(x_N.tolist(), low_N.tolist(), high_N.tolist(), strict=True)
    path = "".join(f"M{_x(x)} {_y(low)}V{_y(high)}" for x, low, high in bars if math.isfinite(low + high))
    return f'<path class="bar" d="{path}"/>' if path else ""


def _x(share: float) -> int:
    return round(WIDTH * min(1.0, max(0.0, share)))


def _y(share: float) -> int:
    return round(HEIGHT * (1.0 - min(1.0, max(0.0, share))))


def _values(chart: Chart, across: AxisScale, up: AxisScale) -> dict[str, Any]:
    """Return the values for the script, with five digits."""
    return {
        "x": [across.low, across.high],
        "xName": chart.x_name,
        "y": [up.low, up.high],
        "yLog": up.is_log,
        "lines": [
            {
                "name": line.name,
                "color": line.color % 8,
                "x": [int(x) if x == int(x) else x for x in line.x_N.tolist()],
                "y": _rounded(line.y_N),
                **({} if line.smooth_N is None else {"smooth": _rounded(line.smooth_N)}),
                **({} if line.error_N is None else {"error": _rounded(line.error_N)}),
            }
            for line in chart.lines
        ],
    }


def _rounded(values_N: Floats) -> list[float | None]:
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values_N.tolist()]


@dataclass(frozen=True)
class AxisScale:
    """Maps values to [0, 1], from left to right or from bottom to top."""

    low: float
    high: float
    is_log: bool = False

    def __call__(self, values_N: Floats) -> Floats:
        """Map values; NaN where a logarithmic scale has none."""
        if not self.is_log:
            return (values_N - self.low) / (self.high - self.low)
        with np.errstate(divide="ignore", invalid="ignore"):
            shares_N: Floats = (np.log(values_N) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return np.where(values_N > 0, shares_N, np.nan)

    def to_unit(self, value: float) -> float:
        """Map a single value to the range 0 to 1."""
        return float(self(np.array([value]))[0])

    def ticks(self) -> list[float]:
        """Return round values in the range."""
        return log_ticks(self.low, self.high) if self.is_log else ticks(self.low, self.high)


def ticks(low: float, high: float, max_ticks: int = 6) -> list[float]:
    """Return at most about ``max_ticks`` multiples of 1, 2 or 5 times a power of ten from ``low`` to ``high``."""
    span = high - low
    if not span > 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / max_ticks))
    step = next((factor * power for factor in (1, 2, 5) if span / (factor * power) <= max_ticks), 10 * power)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [multiple * step for multiple in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return ticks of a logarithmic axis: powers of ten, also 2 and 5 times them, or linear ticks on a short axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    between = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    inside = [value for value in between if low <= value <= high]
    if len(inside) < 3:
        return [value for value in ticks(low, high, 5) if value > 0]
    if len(inside) <= 7:
        return inside
    decades = [10.0**power for power in powers if low <= 10.0**power <= high]
    return decades[:: math.ceil(len(decades) / 6)]
