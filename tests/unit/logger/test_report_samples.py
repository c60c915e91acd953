"""Filled texts of a record: read, and shown in the order of unmasking."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from logger.pages import Examples, Token
from logger.report.reading import LoggedRun, RunEvent
from logger.report.samples import MAX_SAMPLES_PER_TEXT, collect_samples, read_tokens


def event(step: int = 10, **values: Any) -> RunEvent:
    sample = {"given": "a[MASK:2]c", "tokens": ["a", "x", "\n", "c"], "step_map": [None, 2, 1, None]}
    logprobs = {"logprobs": [None, math.log(0.25), 0.0, None]}
    return RunEvent(step, "sample", "for people", {**sample, **logprobs, **values})


HALF = math.log(0.5)


@pytest.mark.parametrize(
    ("values", "tokens"),
    [
        ({}, (Token("a"), Token("x", 2, 0.25), Token("\n", 1, 1.0), Token("c"))),
        # The bytes of an umlaut are two tokens, of which the first alone has no text: it is there when both are.
        (
            {"tokens": ["", "ä", "b", "c"], "step_map": [3, 1, 2, None], "logprobs": [HALF, HALF, 0.0, None]},
            (Token("ä", 3, 0.25), Token("b", 2, 1.0), Token("c")),
        ),
        # What was given behind half a character stays given.
        (
            {"tokens": ["the", "", "\ufffd sat"], "step_map": [None, 1, None], "logprobs": [None, 0.0, None]},
            (Token("the"), Token("\ufffd", 1, 1.0), Token(" sat")),
        ),
    ],
)
def test_each_token_has_its_forward_and_probability(values: dict[str, Any], tokens: tuple[Token, ...]) -> None:
    assert read_tokens(event(**values)) == tokens


@pytest.mark.parametrize(
    "values",
    [
        {"given": None}, {"tokens": [1, 2, 3, 4]}, {"tokens": ["a"]}, {"step_map": None}, {"step_map": [None, 1]},
        {"logprobs": "0000"}, {"logprobs": {}},
    ],
)  # fmt: skip
def test_damaged_values_leave_the_words(values: dict[str, Any]) -> None:
    damaged = event(**values)
    assert read_tokens(damaged) is None
    assert collect_samples([LoggedRun("run", Path("run"), events=[damaged])]) == ["for people"]


def test_an_answer_has_its_reward() -> None:
    [part] = collect_samples([LoggedRun("run", Path("run"), events=[event(reward=0.5), event(20)])])
    assert isinstance(part, Examples)
    assert [output.label for output in part.examples[0].outputs] == ["step 10, reward 0.5", "step 20"]


def test_a_long_run_shows_some_of_its_steps_and_several_runs_share_an_example() -> None:
    long = LoggedRun("long", Path("long"), events=[event(step) for step in range(1, 101)])
    other = LoggedRun("other", Path("other"), events=[event(5, step_map=[None, 7, 1, None])])
    [part] = collect_samples([long, other])
    assert isinstance(part, Examples)
    [example] = part.examples
    labels = [output.label for output in example.outputs]
    assert len(labels) == MAX_SAMPLES_PER_TEXT + 1
    assert (labels[0], labels[-2], labels[-1]) == ("long, step 1", "long, step 100", "other, step 5")
