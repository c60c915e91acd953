"""Pages of one file."""

from __future__ import annotations

import re

import pytest

from logger.report.template import fill_template

NAMES = ("title", "lead", "notes", "table", "texts", "runs")


def test_every_slot_is_filled_and_parts_are_not_read_again() -> None:
    parts = {name: f"[{name} <!--slot:title-->]" for name in NAMES}
    page = fill_template("cli.sweep", "gallery.html", parts)
    assert all(part in page for part in parts.values())
    assert page.count("<!--slot:") == sum(page.count(part) for part in parts.values())
    assert re.search(r"default-src 'none'", page) and not re.search(r"https?:|@import|url\(", page)


def test_a_slot_without_a_part_is_an_error() -> None:
    with pytest.raises(KeyError, match="title"):
        fill_template("cli.sweep", "gallery.html", {})
