"""Charts: points, logarithmic axes, categories, panels and bars."""

from __future__ import annotations

import re

import numpy as np

from logger.pages.charts import WIDTH, Chart, Curve, draw_bars, draw_chart, draw_charts, draw_columns

X_N, Y_N = np.array([1.0, 2.0]), np.array([4.0, 2.0])


def points(x: list[float], y: list[float]) -> Curve:
    return Curve("done", 0, 0, np.array(x), np.array(y), has_dots=True, has_line=False)


def test_points_have_no_line_and_no_last_value() -> None:
    html, _ = draw_chart(Chart("Rate", "", [points([1.0, 2.0], [3.0, 4.0])]), 0)
    assert len(re.findall(r'<path class="dots"', html)) == 1
    assert re.search(r'<g class="c0 d0"><path class="dots" d="M\d+ \d+h0M\d+ \d+h0"/></g>', html)
    assert '<i class="c0 d0 dot"></i><bdi>done</bdi> <b></b>' in html


def test_a_logarithmic_axis_spreads_powers_evenly() -> None:
    chart = Chart("Rate", "", [points([0.001, 0.01, 0.1], [1.0, 2.0, 3.0])], x_is_log=True)
    html, values = draw_chart(chart, 0)
    low, middle, high = (int(x) for x in re.findall(r"M(\d+) \d+h0", html))
    assert abs((high - middle) - (middle - low)) <= 1 and low > 0 and high < WIDTH
    assert values["xLog"] and values["x"][0] < 0.001 and values["x"][1] > 0.1


def test_a_long_name_of_an_axis_is_left_to_the_title() -> None:
    for name, is_shown in (("epoch", True), ("learning_rate", False)):
        html, _ = draw_chart(Chart("Rate", "", [points([1.0], [3.0])], x_name=name), 0)
        assert (f"<b>{name}</b>" in html) == is_shown


def test_categories_label_their_positions() -> None:
    chart = Chart("Kind", "", [points([0.0, 1.0], [1.0, 2.0])], x_labels=("<adamw>", "muon"))
    html, values = draw_chart(chart, 0)
    assert (
        '<span style="left:25%;max-width:50%">&lt;adamw&gt;</span><span style="left:75%;max-width:50%">muon</span>'
        in html
    )
    assert values["xLabels"] == ("<adamw>", "muon")


def test_bars_are_as_long_as_their_shares() -> None:
    html = draw_bars("Importance", "share", [("<rate>", 0.75, "75%"), ("size", 0.0, "0%")], "of 4 runs")
    assert f'd="M0 5H{round(0.75 * WIDTH)}"' in html and 'd="M0 5H0"' in html
    assert "&lt;rate&gt;" in html and "of 4 runs" in html


def test_panels_share_their_scales_and_have_a_table_of_last_values() -> None:
    lines = [
        Curve(name, color, 0, X_N, scale * Y_N, panel=panel)
        for color, name in enumerate(("one", "<two>"))
        for panel, scale in (("0% to 20%", 1.0), ("80% to 100%", 2.0))
    ]
    html, values = draw_chart(Chart("Loss", "nats", lines[:3]), 0)
    assert re.findall(r'data-panel="(.*?)"', html) == ["0% to 20%", "80% to 100%"]
    assert len(set(re.findall(r'<path class="grid" d="(.*?)"', html))) == 1
    assert re.findall(r'<th scope="col"><i class="(.*?)"></i>(.*?)</th>', html) == [
        ("c0 d0", "one"), ("c1 d0", "&lt;two&gt;"),
    ]  # fmt: skip
    assert re.findall("<td>(.*?)</td>", html) == ["2", "2", "4", "-"]
    assert "Loss, 80% to 100%, nats, by step. one: from 8 to 4, least 4, greatest 8" in html
    assert [line.get("panel") for line in values["lines"]] == ["0% to 20%", "80% to 100%", "0% to 20%"]


def test_charts_are_numbered_on_over_a_page() -> None:
    values: list[dict[str, object]] = [{}]
    chart = Chart("Loss", "nats", [Curve("<one>", 9, 0, X_N, Y_N)])
    html = draw_charts([chart, chart], values, more="<p>more</p>")
    assert re.findall(r'data-chart="(\d)"', html) == ["1", "2"] and len(values) == 3
    assert html.endswith("<p>more</p></div>") and '<i class="c1 d1"></i><bdi>&lt;one&gt;</bdi> <b>2</b>' in html
    assert draw_charts([], values) == ""


def test_columns() -> None:
    html = draw_columns("Tokens", [(2, 0), (0, 1), (2, 0)], ["a", "<b>", "c"])
    assert re.findall("<title>(.*?)</title>", html) == ["a", "&lt;b&gt;", "c"]
    assert 'viewBox="0 0 3 3"' in html
    assert re.findall(r'class="up" x="([\d.]+)" y="(\d)" width="0.8" height="(\d)"', html) == [
        ("0.1", "0", "2"), ("1.1", "2", "0"), ("2.1", "0", "2"),
    ]  # fmt: skip
    assert '<rect class="down" x="1.1" y="2" width="0.8" height="1"/>' in html
