"""Filled texts of a record: read, and shown in the order of unmasking."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from logger.report.reading import LoggedRun, RunEvent
from logger.report.samples import MAX_SAMPLES_PER_TEXT, SampleToken, read_sample, render_fills, render_samples


def event(step: int = 10, **values: Any) -> RunEvent:
    sample = {"given": "a[MASK:2]c", "tokens": ["a", "x", "\n", "c"], "step_map": [None, 2, 1, None]}
    logprobs = {"logprobs": [None, math.log(0.25), 0.0, None]}
    return RunEvent(step, "sample", "for people", {**sample, **logprobs, **values})


def test_each_token_has_its_forward_and_probability() -> None:
    sample = read_sample(event())
    assert sample is not None
    assert (sample.step, sample.masked_text, sample.num_forwards) == (10, "a[MASK:2]c", 2)
    assert sample.pieces == (SampleToken("a"), SampleToken("x", 2, 0.25), SampleToken("\n", 1, 1.0), SampleToken("c"))


def test_tokens_of_one_character_are_final_together() -> None:
    """The bytes of an umlaut are two tokens, of which the first alone has no text: it is there when both are."""
    half = math.log(0.5)
    sample = read_sample(event(tokens=["", "ä", "b", "c"], step_map=[3, 1, 2, None], logprobs=[half, half, 0.0, None]))
    assert sample is not None
    assert sample.pieces == (SampleToken("ä", 3, 0.25), SampleToken("b", 2, 1.0), SampleToken("c"))


@pytest.mark.parametrize(
    "values",
    [
        {"given": None}, {"tokens": "axbc"}, {"tokens": [1, 2, 3, 4]}, {"tokens": ["a"]}, {"step_map": None},
        {"step_map": [None, 0, 1, None]}, {"step_map": [None, True, 1, None]}, {"step_map": [None, 1.5, 1, None]},
        {"step_map": [None, 1]}, {"logprobs": "0000"}, {"logprobs": [None, math.nan, 0.0, None]}, {"logprobs": {}},
    ],
)  # fmt: skip
def test_damaged_values_leave_the_words(values: dict[str, Any]) -> None:
    damaged = event(**values)
    assert read_sample(damaged) is None
    run = LoggedRun("run", Path("run"), events=[damaged])
    assert render_samples([run]) == '<div class="samples"><ul class="plain"><li>for people</li></ul></div>'


def test_the_page_shades_by_order_and_has_a_slider() -> None:
    html = render_samples([LoggedRun("run", Path("run"), events=[event()])])
    assert '<pre class="given" dir="auto">a<span class="hole">2</span>c</pre>' in html
    marks = re.findall(r'<mark data-forward="(\d+)" style="--shade:(\d+)%" title="([^"]+)">', html)
    assert marks == [("2", "20", "forward 2, probability 25.0%"), ("1", "100", "forward 1, probability 100.0%")]
    assert '<input type="range" min="0" max="2" value="2">' in html
    assert "x<sub>2</sub></mark>" in html and '<sub>1</sub><i aria-label="line break">↵</i>\n</mark>c' in html


def test_one_forward_has_no_slider() -> None:
    html = render_samples([LoggedRun("run", Path("run"), events=[event(step_map=[None, 1, 1, None])])])
    assert "range" not in html and html.count("--shade:100%") == 2


def test_a_long_run_shows_some_of_its_steps_and_several_runs_share_a_slider() -> None:
    long = LoggedRun("long", Path("long"), events=[event(step) for step in range(1, 101)])
    other = LoggedRun("other", Path("other"), events=[event(5, step_map=[None, 7, 1, None])])
    html = render_samples([long, other])
    steps = [int(step) for step in re.findall(r'<th scope="row">(\d+)</th>', html)]
    assert len(steps) == MAX_SAMPLES_PER_TEXT + 1
    assert (steps[0], steps[-2], steps[-1]) == (1, 100, 5)
    assert html.count("<article") == 1 and 'max="7"' in html
    assert "<h4>long</h4>" in html and "<h4>other</h4>" in html


def test_what_was_given_behind_half_a_character_stays_given() -> None:
    logprobs = [None, 0.0, None]
    sample = read_sample(event(tokens=["the", "", "\ufffd sat"], step_map=[None, 1, None], logprobs=logprobs))
    assert sample is not None
    assert sample.pieces == (SampleToken("the"), SampleToken("\ufffd", 1, 1.0), SampleToken(" sat"))


@pytest.mark.parametrize(
    ("masked_text", "filled_text", "html"),
    [
        ("a [MASK:2] <b>", "a x <b>", "a <mark>x</mark> &lt;b&gt;"),
        ("[MASK:1],[MASK:1]", "x,y,z", "<mark>x</mark>,<mark>y,z</mark>"),
        ("a[MASK:1][MASK:2]", "axy", "a<mark></mark><mark>xy</mark>"),
        ("a[MASK:1]", "a\n&", 'a<mark><i aria-label="line break">↵</i>\n&amp;</mark>'),
        ("a[MASK:1]b", "other & b", "other &amp; b"),
        ("ab[MASK:1]ba", "aba", "aba"),
        ("a prompt", "an <answer>", "an &lt;answer&gt;"),
    ],
)
def test_fills_of_a_text_without_tokens_are_marked(masked_text: str, filled_text: str, html: str) -> None:
    assert render_fills(masked_text, filled_text) == html
