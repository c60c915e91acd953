"""Charts: ticks, points, logarithmic axes, categories, and SVG files."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from logger.pages import Chart, Curve
from logger.pages.charts import WIDTH, draw_chart, draw_svg, log_ticks, ticks

SVG = "{http://www.w3.org/2000/svg}"
STEPS_N = np.array([0.0, 50.0, 100.0])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 300.0, [0, 50, 100, 150, 200, 250, 300]),
        (5.8, 6.61, [5.8, 6.0, 6.2, 6.4, 6.6]),
        (-1.0, 1.0, [-1, -0.5, 0, 0.5, 1]),
        (3.0, 3.0, [3.0]),
    ],
)
def test_ticks(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.9, 21.0, [1, 2, 5, 10, 20]),
        (5.0, 7.6, [5, 6, 7]),
        (1e-9, 1e3, [1e-9, 1e-6, 1e-3, 1, 1e3]),
    ],
)
def test_ticks_of_logarithms(low: float, high: float, expected: list[float]) -> None:
    assert log_ticks(low, high) == pytest.approx(expected)


def points(x: list[float], y: list[float]) -> Curve:
    return Curve("done", np.array(x), np.array(y), has_dots=True, has_line=False)


def test_points_have_no_line_and_no_last_value() -> None:
    figure, _ = draw_chart(Chart("Rate", "", [points([1.0, 2.0], [3.0, 4.0])]))
    html = figure["drawings"]["linear"]
    assert re.findall(r'<g class="c0 d0">(.*?)</g>', html) == ['<path class="dots" d="M1000 955h0M2000 45h0"/>']
    assert figure["legend"] == [("c0 d0 dot", "done", "")]


def test_a_logarithmic_axis_spreads_powers_evenly() -> None:
    chart = Chart("Rate", "", [points([0.001, 0.01, 0.1], [1.0, 2.0, 3.0])], x_is_log=True)
    figure, values = draw_chart(chart)
    html = figure["drawings"]["linear"]
    low, middle, high = (int(x) for x in re.findall(r"M(\d+) \d+h0", html))
    assert abs((high - middle) - (middle - low)) <= 1 and low > 0 and high < WIDTH
    assert values["xLog"] and values["x"][0] < 0.001 and values["x"][1] > 0.1


def test_categories_label_their_positions() -> None:
    chart = Chart("Kind", "", [points([0.0, 1.0], [1.0, 2.0])], x_labels=("<adamw>", "m" * 40))
    figure, values = draw_chart(chart)
    html = figure["drawings"]["linear"]
    labels = re.findall(r'<text x="(\d+)" y="\d+" text-anchor="middle"[^>]*>(.*?)</text>', html)
    assert labels[:2] == [("151", "&lt;adamw&gt;"), ("357", "m" * 28 + "…")]
    assert values["xLabels"] == ("<adamw>", "m" * 40)


def test_an_svg_file_is_xml_with_a_title_a_legend_ticks_and_all_curves() -> None:
    loss = Curve("a <run> & b", STEPS_N, np.array([4.0, np.nan, 2.0]), error_N=np.array([0.1, np.nan, 0.2]))
    floor = Curve("floor", STEPS_N[[0, -1]], np.array([2.0, 2.0]), color=9)
    file = draw_svg(Chart("Loss", "nats", [loss, floor]))
    root = ET.fromstring(file)
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert root.tag == f"{SVG}svg" and {"Loss, nats", "step", "2", "3", "4", "0", "100"} <= set(texts)
    assert any("a <run> & b" in text and "floor" in text for text in texts)
    assert [group.get("class") for group in root.iter(f"{SVG}g")] == ["c0 d0", "c1 d1"]
    title = root.find(f"{SVG}title")
    assert title is not None and title.text is not None and "from 4 to 2" in title.text
    assert "script" not in file and file.count("http") == 1  # the namespace
