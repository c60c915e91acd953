"""Charts as SVG files."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np

from logger.pages.charts import Chart, Curve, draw_svg

SVG = "{http://www.w3.org/2000/svg}"
STEPS_N = np.array([0.0, 50.0, 100.0])


def make_chart(**options: object) -> Chart:
    loss = Curve("a <run> & b", 0, 0, STEPS_N, np.array([4.0, np.nan, 2.0]), error_N=np.array([0.1, np.nan, 0.2]))
    floor = Curve("floor", 1, 1, STEPS_N[[0, -1]], np.array([2.0, 2.0]))
    return Chart("Loss", "nats", [loss, floor], **options)  # type: ignore[arg-type]


def test_an_svg_file_is_xml_with_a_title_a_legend_and_ticks() -> None:
    root = ET.fromstring(draw_svg(make_chart()))
    assert root.tag == f"{SVG}svg"
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert {"Loss, nats", "step", "2", "3", "4", "0", "100"} <= set(texts)
    assert any("a <run> & b" in text and "floor" in text for text in texts)
    title = root.find(f"{SVG}title")
    assert title is not None and title.text is not None and "from 4 to 2" in title.text


def test_an_svg_file_has_all_curves_and_loads_nothing() -> None:
    text = draw_svg(make_chart(x_is_share=True, x_name="share"))
    assert "100%" in text and "share" in text
    root = ET.fromstring(text)
    groups = [group.get("class") for group in root.iter(f"{SVG}g")]
    assert groups == ["c0 d0", "c1 d1"]
    assert "script" not in text and text.count("http") == 1  # the namespace
