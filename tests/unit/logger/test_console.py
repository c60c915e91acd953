"""Metrics on standard output."""

from __future__ import annotations

import io
import json
import os

from logger import JsonConsole


def ignore_message(step: int, text: str) -> None:
    raise AssertionError(text)


def test_a_line_is_an_object_and_events_are_none() -> None:
    stream = io.StringIO()
    console = JsonConsole(stream, ignore_message)
    console.event(0, "data", "for people")
    console.metrics(3, {"loss": 2.5, "lr/hidden": 1e-3, "grad_l2_norm": float("nan")})
    console.progress(3, {"loss": 2.5})
    console.close(0)
    lines = stream.getvalue().splitlines()
    expected = {"step": 3, "metrics": {"loss": 2.5, "lr/hidden": 1e-3, "grad_l2_norm": None}}
    assert [json.loads(line) for line in lines] == [expected]
    assert not stream.closed


def test_closed_reader_does_not_end_the_run() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        console = JsonConsole(stream, ignore_message)
        console.metrics(1, {"loss": 1.0})
        console.metrics(2, {"loss": 1.0})
        console.close(0)
    assert stream.closed, "what was left to write went nowhere, and raised nothing"


def test_a_full_disk_is_told_once_and_ends_nothing() -> None:
    messages: list[tuple[int, str]] = []
    with open("/dev/full", "w", encoding="utf-8") as stream:
        console = JsonConsole(stream, lambda step, text: messages.append((step, text)))
        console.metrics(1, {"loss": 1.0})
        console.metrics(2, {"loss": 1.0})
    [(step, text)] = messages
    assert step == 1 and "standard output cannot be written" in text and "No space left" in text
