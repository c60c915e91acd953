"""Streams that a run outlives."""

from __future__ import annotations

import io
import os

import pytest

from files.resilient_stream import resilient


def test_open_stream_is_written() -> None:
    inner = io.StringIO()
    stream = resilient(inner)
    print("text", file=stream, flush=True)
    assert inner.getvalue() == "text\n" and not stream.isatty()


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "unbuffered"])
def test_closed_pipe_raises_no_error(buffered: bool) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="utf-8") as inner:
        inner.reconfigure(write_through=not buffered)
        stream = resilient(inner)
        print("one", file=stream, flush=True)
        assert os.read(reader, 10) == b"one\n"
        os.close(reader)
        for _ in range(3):
            print("two", file=stream, flush=True)
    assert inner.closed, "what was left to write went nowhere, and raised nothing"
