"""Pages in a terminal, as Markdown and as HTML: each as one golden file, with hostile text in it."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable

import numpy as np

from logger.pages import (
    Chart,
    Code,
    Column,
    Curve,
    Example,
    Examples,
    Link,
    Number,
    Output,
    Page,
    Table,
    Token,
    format_cell,
    format_number,
)
from logger.pages.html import render_html
from logger.pages.markdown import render_markdown
from logger.pages.terminal import list_parts, render_text

ATTACK = "</script><!--<script>{{ title }}&amp;\u2028\u202e\x1b[2J|`*_<b>"

RESULTS = Table(
    ["run", Column("loss", ".3f"), Column("tokens"), "state"],
    [
        ["small", Number(2.5, error=0.0123), 1_500_000, ("done", Link("report", "runs/a b/report.html"))],
        [ATTACK, math.nan, None, "failed"],
    ],
    title="Results",
    note=f"Lower is better {ATTACK}",
    best_row=0,
)
FACTS = Table((), [["steps", "300"], ["seed", Number(3, "d")]], title="All values", is_folded=True)
STEPS_N = np.arange(6.0)
CHART = Chart(
    ATTACK,
    "nats",
    [
        Curve(ATTACK, STEPS_N, np.array([4.0, np.nan, 1.0, 1.0, np.nan, 2.0]), smooth_N=np.ones(6)),
        Curve("few", STEPS_N[:2], np.array([2.0, 1.0]), 1, error_N=np.array([0.1, np.nan]), has_dots=True),
        Curve("one", STEPS_N[:1], np.ones(1), 10, has_dots=True),
    ],
    note=ATTACK,
    x_end=9.0,
)
SAMPLES = Examples(
    [
        Example(
            f"A [MASK:2] {ATTACK}",
            [
                Output("step 1", (Token("A ", None), Token("b\n", 1, 0.5), Token("c", 2), Token(ATTACK, 2))),
                Output("", ATTACK, facts=[("ended", "stopped"), ("tokens", "3")]),
                Output("blank", " "),
            ],
            title="First",
        )
    ],
)
LOG = Code(f"```{ATTACK}", "Log")
PAGE = Page(
    ATTACK,
    {"Results": [RESULTS, FACTS], "Empty": [], "Curves": [CHART], "Examples": [SAMPLES, LOG, "End."]},
    notes=[ATTACK],
    states=["2 runs", ATTACK],
)


def test_pages_are_their_golden_files(golden: Callable[[str, str], None]) -> None:
    golden("page.html", render_html(PAGE))
    golden("page.markdown.txt", render_markdown(PAGE))
    golden("page.txt", render_text(list_parts(PAGE), io.StringIO()))


def test_hostile_text_is_only_shown() -> None:
    html, text = render_html(PAGE), render_text(list_parts(PAGE), io.StringIO())
    assert "<b>" not in html and html.count("<script") == 2
    assert "Empty" not in html and "default-src 'none'" in html and not re.search(r"https?:|@import|url\(", html)
    for rendered in (html, text, render_markdown(PAGE)):
        assert not set(rendered) & set("\x1b\u202e")
    data = html[html.index('id="data">') + 10 :].partition("</script>")[0]
    assert not set(data) & set("<>&\u2028")
    assert json.loads(data)[0]["lines"][0]["y"] == [4.0, None, 1.0, 1.0, None, 2.0]
    markdown = re.sub(r"(?s)^(`{3,})text\n.*?^\1$", "", render_markdown(PAGE), flags=re.MULTILINE)
    assert not re.search(r"(?<!\\)[<`_]", markdown), "outside of fences nothing is interpreted"


def test_numbers_and_cells() -> None:
    assert [format_number(value) for value in (0.0, 0.00125, 3.14159, 4096, 12_345, 614_400, 1_115_520, 2.5e12,
    -20_000)] == [
        "0", "0.00125", "3.142", "4096", "12.3k", "614k", "1.12M", "2.5T", "-20k",
    ]  # fmt: skip
    assert format_number(math.nan) == format_number(math.inf) == "not finite"
    assert format_cell(Number(0.5, ".1%", 0.02)) == "50.0% ± 2.0%"
    assert format_cell(Number(0.05, "+.1%", math.inf)) == "+5.0%"
    assert format_cell(12, ",") == "12" and format_cell(True) == "1" and format_cell(None) == ""
