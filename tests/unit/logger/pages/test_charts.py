"""Charts: ticks and logarithmic axes."""

from __future__ import annotations

import re

import numpy as np
import pytest

from logger.pages import Chart, Curve
from logger.pages.charts import draw_chart, log_ticks, ticks


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


def test_a_logarithmic_chart_needs_positive_values() -> None:
    for values, is_log in (([1.0, 10.0, 100.0], True), ([0.0, 10.0, 100.0], False)):
        curve = Curve("norm", np.arange(3.0), np.array(values), has_dots=True)
        figure, data = draw_chart(Chart("Norm", "", [curve], is_log=True))
        low, middle, high = (int(y) for y in re.findall(r"M\d+ (\d+)h0", figure["drawing"]))
        assert data["yLog"] is is_log and (abs((low - middle) - (middle - high)) <= 1) is is_log
