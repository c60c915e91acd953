"""Charts: ticks, points, logarithmic axes and categories."""

from __future__ import annotations

import re

import numpy as np
import pytest

from logger.pages import Chart, Curve
from logger.pages.charts import WIDTH, draw_chart, log_ticks, ticks


def test_ticks() -> None:
    for low, high, expected in (
        (0.0, 300.0, [0.0, 50, 100, 150, 200, 250, 300]),
        (5.8, 6.61, [5.8, 6.0, 6.2, 6.4, 6.6]),
        (-1.0, 1.0, [-1, -0.5, 0, 0.5, 1]),
        (3.0, 3.0, [3.0]),
    ):
        assert ticks(low, high) == pytest.approx(expected)
    for low, high, expected in (
        (0.9, 21.0, [1.0, 2, 5, 10, 20]),
        (5.0, 7.6, [5.0, 6, 7]),
        (1e-9, 1e3, [1e-9, 1e-6, 1e-3, 1, 1e3]),
    ):
        assert log_ticks(low, high) == pytest.approx(expected)


def points(x: list[float], y: list[float]) -> Curve:
    return Curve("done", np.array(x), np.array(y), has_dots=True, has_line=False)


def test_a_logarithmic_axis_spreads_powers_evenly() -> None:
    chart = Chart("Rate", "", [points([0.001, 0.01, 0.1], [1.0, 2.0, 3.0])], x_is_log=True)
    figure, values = draw_chart(chart)
    html = figure["drawing"]
    low, middle, high = (int(x) for x in re.findall(r"M(\d+) \d+h0", html))
    assert abs((high - middle) - (middle - low)) <= 1 and low > 0 and high < WIDTH
    assert values["xLog"] and values["x"][0] < 0.001 and values["x"][1] > 0.1


def test_categories_label_their_positions() -> None:
    chart = Chart("Kind", "", [points([0.0, 1.0], [1.0, 2.0])], x_labels=("<adamw>", "m" * 40))
    figure, values = draw_chart(chart)
    html = figure["drawing"]
    labels = re.findall(r'<text x="(\d+)" y="\d+" text-anchor="middle"[^>]*>(.*?)</text>', html)
    assert labels[:2] == [("151", "&lt;adamw&gt;"), ("357", "m" * 28 + "…")]
    assert values["xLabels"] == ("<adamw>", "m" * 40)


def test_a_logarithmic_chart_needs_positive_values() -> None:
    for values, is_log in (([1.0, 10.0, 100.0], True), ([0.0, 10.0, 100.0], False)):
        figure, data = draw_chart(Chart("Norm", "", [points([0.0, 1.0, 2.0], values)], is_log=True))
        low, middle, high = (int(y) for y in re.findall(r"M\d+ (\d+)h0", figure["drawing"]))
        assert data["yLog"] is is_log and (abs((low - middle) - (middle - high)) <= 1) is is_log
