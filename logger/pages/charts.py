"""Draw a chart as HTML: curves in an SVG that stretches with its frame, beside labels that do not; or as an SVG file.

In HTML both scales, and raw and smooth curves, are drawn; the switches of a chart select them by CSS, so they work
without scripts. The script only shows values under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from typing import Any

import numpy as np
from markupsafe import Markup

from logger.pages.axes import AxisScale, Floats, format_number
from logger.pages.tables import table

WIDTH, HEIGHT = 2000, 1000
"""Size of the SVG's view box."""

MAX_AXIS_NAME = 7
"""Letters of the name that fit left of an axis; a longer name is in the title and the read-out only."""

FILE_WIDTH, FILE_HEIGHT = 640, 320
"""Size of an SVG file, in pixels."""

FILE_FRAME = (52, 40, 572, 232)
"""Left, top, width and height of the curves in an SVG file."""

FILE_STYLES = """
:root { --muted: #5a6672; }
@media screen and (prefers-color-scheme: dark) { :root { --muted: #9aa7b4; } }
text { font: 12px system-ui, sans-serif; fill: var(--muted); }
tspan { fill: var(--c); font-weight: 600; }
"""

MAX_MARKS = 400


@dataclass(frozen=True)
class Curve:
    """A curve of N points."""

    name: str
    color: int
    dash: int
    x_N: Floats
    y_N: Floats
    smooth_N: Floats | None = None
    error_N: Floats | None = None
    """Standard error; a band."""
    has_error_bars: bool = False
    """The standard error is a bar at each point, not a band."""
    has_dots: bool = False
    has_line: bool = True
    panel: str = ""
    """Name of its panel, if its chart has several."""


@dataclass
class Chart:
    """The data of a chart."""

    title: str
    unit: str
    lines: list[Curve]
    note: str = ""
    x_name: str = "step"
    x_is_share: bool = False
    x_is_log: bool = False
    x_labels: tuple[str, ...] = ()
    """Names of the positions 0, 1, ... of the horizontal axis; empty: it has numbers."""
    x_end: float = 0.0
    """End of the horizontal axis, unless a point is beyond it."""
    log: bool | None = None
    """True if the logarithmic scale is on at first; None: there is no switch."""
    from_zero: bool = False
    y_least: float = -math.inf
    """Smallest possible value, below which no margin or error bar extends the linear axis."""
    marks: list[tuple[str, Floats]] = field(default_factory=list)
    """Names of marks and their positions on the horizontal axis."""


def draw_charts(charts: Sequence[Chart], values: list[dict[str, Any]], more: str = "") -> Markup:
    """Return the HTML of figures, and append the values of the charts to those for the page's script.

    Args:
        charts: the charts to draw.
        values: of all charts of the page, one item for each.
        more: HTML of further figures.
    """
    figures = []
    for chart in charts:
        figure, chart_values = draw_chart(chart, len(values))
        figures.append(figure)
        values.append(chart_values)
    return Markup(f'<div class="charts">{"".join(figures)}{more}</div>' if figures or more else "")


def draw_chart(plot: Chart, number: int) -> tuple[Markup, dict[str, Any]]:
    """Return the figure's HTML and its values for the script."""
    across, scales = _horizontal(plot), _vertical(plot)
    panels = list(dict.fromkeys(line.panel for line in plot.lines))
    panes = "".join(_draw_panel(plot, panel, across, scales) for panel in panels)
    has_smooth = any(line.smooth_N is not None for line in plot.lines)
    classes = "chart card" + " panels" * (len(panels) > 1) + " many" * (len(plot.lines) > 3 * len(panels))
    html = (
        f'<figure class="{classes}" data-chart="{number}"><figcaption><div><h3>{escape(plot.title)}</h3>'
        f'<span class="unit">{escape(plot.unit)}</span></div>'
        f'{_switches(plot, has_smooth, len(scales) > 1)}</figcaption><div class="panes">{panes}</div>'
        f"{_last_values(plot, panels) if len(panels) > 1 else _legend(plot)}"
        + (f'<p class="note">{escape(plot.note)}</p>' if plot.note else "")
        + "</figure>"
    )
    return Markup(html), _values(plot, across, scales)


def _draw_panel(plot: Chart, panel: str, across: AxisScale, scales: dict[str, AxisScale]) -> str:
    """Return the axes and the curves of a panel, with all scales."""
    curves = [line for line in plot.lines if line.panel == panel]
    frames = []
    for name, scale in scales.items():
        lines = "".join(_line(line, across, scale) for line in curves)
        grid = "".join(f"M0 {_y(scale.to_unit(value))}H{WIDTH}" for value in scale.ticks())
        frames.append(
            f'<div class="ys {name}" aria-hidden="true">{_labels(scale, "bottom")}</div>'
            f'<svg class="{name}" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
            f'<path class="grid" d="{grid}"/>{_marks(plot, across)}{lines}</svg>'
        )
    if plot.x_labels:
        x_labels = _category_labels(plot, across)
    else:
        x_labels = _labels(across, "left", plot.x_is_share, max_ticks=3 if panel else 6)
    if not plot.x_is_share and len(plot.x_name) <= MAX_AXIS_NAME:
        x_labels += f"<b>{escape(plot.x_name)}</b>"
    head = f"<h4>{escape(panel)}</h4>" if panel else ""
    return (
        f'<div>{head}<div class="frame"><div class="plot" data-panel="{escape(panel)}" tabindex="0" role="img" '
        f'aria-label="{escape(describe_chart(plot, panel))}">'
        f'{"".join(frames)}</div><div class="xs" aria-hidden="true">{x_labels}</div></div></div>'
    )


def draw_svg(plot: Chart) -> str:
    """Return a self-contained SVG file of the linear scale, light or dark like the page that shows it."""
    across, scale = _horizontal(plot), _vertical(plot)["linear"]
    left, top, width, height = FILE_FRAME
    bottom = top + height
    legend = "   ".join(
        f'<tspan class="{style_classes(line.color, line.dash)}">{escape(line.name)}</tspan>' for line in plot.lines
    )
    texts = [
        _text(left, 16, escape(f"{plot.title}, {plot.unit}" if plot.unit else plot.title)),
        _text(left, 32, legend),
    ]
    for value in scale.ticks():
        texts.append(_text(left - 8, bottom - height * scale.to_unit(value) + 4, format_number(value), "end"))
    for value in across.ticks():
        label = f"{value:.0%}" if plot.x_is_share else format_number(value)
        texts.append(_text(left + width * across.to_unit(value), bottom + 18, label, "middle"))
    texts.append(_text(left + width / 2, bottom + 36, escape(plot.x_name), "middle"))
    grid = "".join(f"M0 {_y(scale.to_unit(value))}H{WIDTH}" for value in scale.ticks())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {FILE_WIDTH} {FILE_HEIGHT}" width="{FILE_WIDTH}" '
        f'height="{FILE_HEIGHT}" role="img">',
        f"<title>{escape(describe_chart(plot))}</title>",
        f"<style>\n{resources.files('logger.pages').joinpath('curves.css').read_text(encoding='utf-8')}{FILE_STYLES}</style>",
        f'<svg x="{left}" y="{top}" width="{width}" height="{height}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'preserveAspectRatio="none">',
        f'<path class="grid" d="{grid}"/>{_marks(plot, across)}',
        *(_line(line, across, scale) for line in plot.lines),
        "</svg>",
        *texts,
        "</svg>\n",
    ]
    return "\n".join(parts)


def _text(x: float, y: float, markup: str, anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" xml:space="preserve">{markup}</text>'


def draw_bars(title: str, unit: str, bars: Sequence[tuple[str, float, str]], note: str = "") -> Markup:
    """Return the HTML of a chart of horizontal bars.

    Args:
        title: heading.
        unit: of the values.
        bars: name, length from 0 to 1, and value as text.
        note: text below the chart.
    """
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td><svg viewBox="0 0 {WIDTH} 10" preserveAspectRatio="none" '
        f'aria-hidden="true"><g class="c0"><path d="M0 5H{_x(length)}"/></g></svg></td><td>{escape(text)}</td></tr>'
        for name, length, text in bars
    )
    return Markup(
        f'<figure class="chart card bars"><figcaption><div><h3>{escape(title)}</h3>'
        f'<span class="unit">{escape(unit)}</span></div></figcaption><table>{rows}</table>'
        f'<p class="note">{escape(note)}</p></figure>'
    )


def describe_chart(plot: Chart, panel: str = "") -> str:
    """Describe a panel of the chart in words, for screen readers."""
    parts = []
    for line in plot.lines:
        finite = line.y_N[np.isfinite(line.y_N)]
        if len(finite) and line.panel == panel:
            extremes = f"least {format_number(float(finite.min()))}, greatest {format_number(float(finite.max()))}"
            parts.append(
                f"{line.name}: from {format_number(float(finite[0]))} to {format_number(float(finite[-1]))}, {extremes}"
            )
    title = ", ".join(filter(None, [plot.title, panel, plot.unit]))
    return f"{title}, by {plot.x_name}. {'; '.join(parts)}"


def _horizontal(plot: Chart) -> AxisScale:
    if plot.x_is_share:
        return AxisScale(0.0, 1.0)
    if plot.x_labels:
        return AxisScale(-0.5, len(plot.x_labels) - 0.5)
    edges = [plot.x_end, *(edge for line in plot.lines for edge in (line.x_N[0], line.x_N[-1]))]
    edges += [edge for _, x_N in plot.marks for edge in (x_N.min(), x_N.max())]
    if plot.x_is_log:
        positive = [float(edge) for edge in edges if edge > 0.0]
        return AxisScale(min(positive) / 1.2, max(positive) * 1.2, is_log=True)
    low, high = min(0.0, *edges), max(edges)
    return AxisScale(float(low), float(high if high > low else low + 1.0))


def _vertical(plot: Chart) -> dict[str, AxisScale]:
    """Return the vertical scales, with a margin around values and error bars."""
    errors = [(line.y_N, 0.0 if line.error_N is None else line.error_N) for line in plot.lines]
    values_N = np.concatenate([part for y_N, error in errors for part in (y_N, y_N - error, y_N + error)])
    values_N = values_N[np.isfinite(values_N)]
    low, high = float(values_N.min()), float(values_N.max())
    if plot.from_zero:
        low, high = min(0.0, low), max(0.0, high)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    bottom = 0.0 if plot.from_zero and low == 0.0 else plot.y_least
    scales = {"linear": AxisScale(max(low - margin, bottom), high + margin)}
    least, greatest = float(values_N.min()), float(values_N.max())
    if plot.log is not None and least > 1e-100:
        ratio = max((greatest / least) ** 0.05, 1.02)
        scales["log"] = AxisScale(least / ratio, greatest * ratio, is_log=True)
    return scales


def _line(line: Curve, across: AxisScale, scale: AxisScale) -> str:
    x_N, y_N = across(line.x_N), scale(line.y_N)
    parts = []
    if line.error_N is not None:
        draw = _bars if line.has_error_bars else _band
        parts.append(draw(x_N, scale(line.y_N - line.error_N), scale(line.y_N + line.error_N)))
    if line.smooth_N is not None:
        parts.append(
            f'<path class="raw" d="{_path(x_N, y_N)}"/><path class="smooth" d="{_path(x_N, scale(line.smooth_N))}"/>'
        )
    elif len(line.x_N) > 1 and line.has_line:
        parts.append(f'<path d="{_path(x_N, y_N)}"/>')
    if line.has_dots:
        dots = "".join(f"M{_x(x)} {_y(y)}h0" for x, y in zip(x_N, y_N, strict=True) if math.isfinite(y))
        parts.append(f'<path class="dots" d="{dots}"/>')
    return f'<g class="{style_classes(line.color, line.dash)}">{"".join(parts)}</g>'


def style_classes(color: int, dash: int = 0) -> str:
    """Return the CSS classes of a color and a dash; each round of the eight colors has other dashes."""
    return f"c{color % 8} d{(dash + color // 8) % 4}"


def _path(x_N: Floats, y_N: Floats) -> str:
    """Return a path of straight lines with gaps at NaN; a single number between gaps is a dot."""
    parts, is_down = [], False
    for index, (x, y) in enumerate(zip(x_N.tolist(), y_N.tolist(), strict=True)):
        if not math.isfinite(y):
            is_down = False
            continue
        parts.append(f"{' ' if is_down else 'M'}{_x(x)} {_y(y)}")
        is_alone = not is_down and (index + 1 == len(y_N) or not math.isfinite(y_N[index + 1]))
        parts.append("h0" if is_alone else "")
        is_down = True
    return "".join(parts)


def _band(x_N: Floats, low_N: Floats, high_N: Floats) -> str:
    """Return the area between two curves; for one point, a bar."""
    is_finite_N = np.isfinite(low_N) & np.isfinite(high_N)
    x, low, high = (values_N[is_finite_N].tolist() for values_N in (x_N, low_N, high_N))
    if not x:
        return ""
    if len(x) == 1:
        return _bars(x_N, low_N, high_N)
    there = " ".join(f"{_x(at)} {_y(y)}" for at, y in zip(x, high, strict=True))
    back = " ".join(f"{_x(at)} {_y(y)}" for at, y in zip(reversed(x), reversed(low), strict=True))
    return f'<path class="band" d="M{there} {back}Z"/>'


def _bars(x_N: Floats, low_N: Floats, high_N: Floats) -> str:
    """Return a vertical bar at each point that has both ends."""
    bars = zip(x_N.tolist(), low_N.tolist(), high_N.tolist(), strict=True)
    path = "".join(f"M{_x(x)} {_y(low)}V{_y(high)}" for x, low, high in bars if math.isfinite(low + high))
    return f'<path class="bar" d="{path}"/>' if path else ""


def _marks(plot: Chart, across: AxisScale) -> str:
    steps = np.concatenate([steps_N for _, steps_N in plot.marks]) if plot.marks else np.array([])
    marks = sorted({_x(float(x)) for x in across(steps)})
    marks = marks[:: max(1, math.ceil(len(marks) / MAX_MARKS))]
    return f'<path class="marks" d="{"".join(f"M{x} {HEIGHT}v-45" for x in marks)}"/>' if marks else ""


def _x(share: float) -> int:
    return round(WIDTH * min(1.0, max(0.0, share)))


def _y(share: float) -> int:
    return round(HEIGHT * (1.0 - min(1.0, max(0.0, share))))


def _labels(scale: AxisScale, side: str, is_share: bool = False, max_ticks: int = 6) -> str:
    """Return tick labels, positioned from ``side``: ``left`` or ``bottom``."""
    spans, values = [], scale.ticks(max_ticks)
    for value in values:
        value = 0.0 if abs(value) < 1e-12 * max(map(abs, values)) else value
        end = ' class="end"' if side == "left" and scale.to_unit(value) > 0.98 else ""
        text = f"{value:.0%}" if is_share else format_number(value)
        spans.append(f'<span{end} style="{side}:{100 * scale.to_unit(value):.4g}%">{text}</span>')
    return "".join(spans)


def _category_labels(plot: Chart, across: AxisScale) -> str:
    return "".join(
        f'<span style="left:{100 * across.to_unit(float(index)):.4g}%;max-width:{100 / len(plot.x_labels):.4g}%">'
        f"{escape(label)}</span>"
        for index, label in enumerate(plot.x_labels)
    )


def _switches(plot: Chart, has_smooth: bool, has_log: bool) -> str:
    parts = []
    if has_smooth:
        parts.append('<label><input type="checkbox" class="to-smooth" checked autocomplete="off">smooth</label>')
    if has_log:
        checked = " checked" if plot.log else ""
        parts.append(f'<label><input type="checkbox" class="to-log"{checked} autocomplete="off">log</label>')
    return f'<div class="switches">{"".join(parts)}</div>' if parts else ""


def _legend(plot: Chart) -> str:
    entries = []
    has_many = sum(len(line.x_N) > 1 for line in plot.lines) > 1
    for line in plot.lines:
        if has_many and len(line.x_N) == 1 and line.error_N is not None:
            continue  # final values of several runs stand in the table
        last = _last_value(line) if line.has_line and not plot.x_is_share else ""
        dot = " dot" * (len(line.x_N) == 1 or not line.has_line)
        swatch = f'<i class="{style_classes(line.color, line.dash)}{dot}"></i>'
        entries.append(f"<li>{swatch}<bdi>{escape(line.name)}</bdi> <b>{last}</b></li>")
    entries += [
        f'<li><i class="mark"></i><bdi>{escape(name)}</bdi> <b>{len(at_N):,}</b></li>' for name, at_N in plot.marks
    ]
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _last_values(plot: Chart, panels: Sequence[str]) -> str:
    """Return a table of the last values, with a row for each panel and a column for each color of its curves."""
    colors = {line.name: line.color for line in plot.lines}
    swatches = [Markup('<i class="{}"></i>{}').format(style_classes(color), name) for name, color in colors.items()]
    values = {(line.panel, line.name): _last_value(line) for line in plot.lines}
    rows = [(panel, [values.get((panel, name), "") for name in colors]) for panel in panels]
    return table(swatches, rows, first="Last value")


def _last_value(line: Curve) -> str:
    values_N = line.smooth_N if line.smooth_N is not None else line.y_N
    finite = np.flatnonzero(np.isfinite(values_N))
    if not len(finite):
        return ""
    text = format_number(float(values_N[finite[-1]]), 4)
    if line.error_N is not None and math.isfinite(line.error_N[finite[-1]]):
        text += f" ± {format_number(float(line.error_N[finite[-1]]), 2)}"
    return text


def _values(plot: Chart, across: AxisScale, scales: dict[str, AxisScale]) -> dict[str, Any]:
    """Return the values for the script, with five digits."""
    return {
        "x": [across.low, across.high],
        "xName": plot.x_name,
        "share": plot.x_is_share,
        "xLog": plot.x_is_log,
        "xLabels": plot.x_labels,
        "scales": {name: [scale.low, scale.high] for name, scale in scales.items()},
        "lines": [
            {
                "name": line.name,
                **({"panel": line.panel} if line.panel else {}),
                "color": line.color % 8,
                "x": [int(x) if x == int(x) else x for x in line.x_N.tolist()],
                "y": _rounded(line.y_N),
                **({} if line.smooth_N is None else {"smooth": _rounded(line.smooth_N)}),
                **({} if line.error_N is None else {"error": _rounded(line.error_N)}),
            }
            for line in plot.lines
        ],
    }


def _rounded(values_N: Floats) -> list[float | None]:
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values_N.tolist()]


def draw_columns(title: str, bars: Sequence[tuple[int, int]], notes: Sequence[str]) -> Markup:
    """Return the HTML of a chart of narrow bars.

    Args:
        title: a line above the chart, and its name for screen readers.
        bars: heights above and below the line.
        notes: a tooltip for each bar.
    """
    above = max(1, *(up for up, _ in bars))
    height = above + max(down for _, down in bars)
    groups = "".join(
        f'<g class="bar"><title>{escape(note)}</title><rect class="hit" x="{index}" width="1" height="{height}"/>'
        f'<rect class="up" x="{index + 0.1:g}" y="{above - up}" width="0.8" height="{up}"/>'
        f'<rect class="down" x="{index + 0.1:g}" y="{above}" width="0.8" height="{down}"/></g>'
        for index, ((up, down), note) in enumerate(zip(bars, notes, strict=True))
    )
    return Markup(
        f'<figure class="columns"><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {len(bars)} {height}" '
        f'style="max-width:{3 * len(bars)}rem" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">'
        f"{groups}</svg></figure>"
    )
