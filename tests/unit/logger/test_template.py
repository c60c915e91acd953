"""Pages of one file."""

from __future__ import annotations

import json
import math
import re

import pytest

from logger.report.template import fill_template, script_json

TEMPLATES = {
    ("cli.infer", "replay.html"): ("title", "model", "main", "settings", "tabs", "requests", "data"),
    ("logger.report", "report.html"): (
        "title", "heading", "states", "notes", "headline", "links", "sections", "data",
    ),
    ("cli.sweep", "gallery.html"): ("title", "lead", "notes", "table", "texts", "runs"),
}  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES, ids=str)
def test_every_slot_is_filled_and_parts_are_not_read_again(template: tuple[str, str]) -> None:
    parts = {name: f"[{name} <!--slot:title-->]" for name in TEMPLATES[template]}
    page = fill_template(*template, parts)
    assert all(part in page for part in parts.values())
    assert page.count("<!--slot:") == sum(page.count(part) for part in parts.values())
    assert re.search(r"default-src 'none'", page) and not re.search(r"https?:|@import|url\(", page)


def test_a_slot_without_a_part_is_an_error() -> None:
    with pytest.raises(KeyError, match="title"):
        fill_template("cli.sweep", "gallery.html", {})


def test_numbers_cannot_end_their_script() -> None:
    value = {"</script><!--<script>&amp;\u2028": [1.5, None, "é"]}
    text = script_json(value)
    assert json.loads(text) == value
    assert not set(text) & set("<>&\u2028")


def test_a_number_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        script_json([math.nan])
