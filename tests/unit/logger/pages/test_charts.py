"""Charts of points, on a logarithmic axis or by category, and bars."""

from __future__ import annotations

import re

import numpy as np

from logger.pages.charts import WIDTH, Chart, Curve, draw_bars, draw_chart


def points(x: list[float], y: list[float]) -> Curve:
    return Curve("done", 0, 0, np.array(x), np.array(y), has_dots=True, has_line=False)


def test_points_have_no_line_and_no_last_value() -> None:
    html, _ = draw_chart(Chart("Rate", "", [points([1.0, 2.0], [3.0, 4.0])]), 0)
    assert len(re.findall(r'<path class="dots"', html)) == 1
    assert re.search(r'<g class="c0 d0"><path class="dots" d="M\d+ \d+h0M\d+ \d+h0"/></g>', html)
    assert '<i class="c0 d0 dot"></i>done <b></b>' in html


def test_a_logarithmic_axis_spreads_powers_evenly() -> None:
    chart = Chart("Rate", "", [points([0.001, 0.01, 0.1], [1.0, 2.0, 3.0])], x_is_log=True)
    html, values = draw_chart(chart, 0)
    low, middle, high = (int(x) for x in re.findall(r"M(\d+) \d+h0", html))
    assert abs((high - middle) - (middle - low)) <= 1 and low > 0 and high < WIDTH
    assert values["xLog"] and values["x"][0] < 0.001 and values["x"][1] > 0.1


def test_categories_label_their_positions() -> None:
    chart = Chart("Kind", "", [points([0.0, 1.0], [1.0, 2.0])], x_labels=("<adamw>", "muon"))
    html, values = draw_chart(chart, 0)
    assert '<span style="left:25%">&lt;adamw&gt;</span><span style="left:75%">muon</span>' in html
    assert values["xLabels"] == ("<adamw>", "muon")


def test_bars_are_as_long_as_their_shares() -> None:
    html = draw_bars("Importance", "share", [("<rate>", 0.75, "75%"), ("size", 0.0, "0%")], "of 4 runs")
    assert f'd="M0 5H{round(0.75 * WIDTH)}"' in html and 'd="M0 5H0"' in html
    assert "&lt;rate&gt;" in html and "of 4 runs" in html
