"""Pages of one file: escaped text, data for the script, no external resources."""

from __future__ import annotations

import json
import math
import re

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from logger.pages.html import render_template
from logger.pages.page import fill_page

ATTACK = "</script><!--<script>{{ title }}&amp;\u2028<b>"


def test_text_is_escaped_and_html_is_not() -> None:
    sections = {"Empty": "", "Other metrics": Markup("<p>html</p>")}
    page = fill_page((ATTACK, ATTACK), sections, [], [ATTACK], [ATTACK], [(ATTACK, ATTACK, "")])
    assert "<b>" not in page and page.count("<script") == 2 and page.count("{{ title }}") == 6
    assert '<section id="other-metrics"><h2>Other metrics</h2><p>html</p></section>' in page
    assert "Empty" not in page
    assert "default-src 'none'" in page and not re.search(r"https?:|@import|url\(", page)


def test_data_cannot_end_its_script() -> None:
    data = [{ATTACK: [1.5, None, "é"]}]
    page = fill_page(("t", "t"), {}, data, [], [])
    text = page[page.index('id="data">') + 10 :].partition("</script>")[0]
    assert json.loads(text) == data
    assert not set(text) & set("<>&\u2028")
    with pytest.raises(ValueError, match="not JSON compliant"):
        fill_page(("t", "t"), {}, [{"x": math.nan}], [], [])


def test_missing_value_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="title"):
        render_template("logger.pages/page.html", data=[])
