"""Text from elsewhere on a terminal, and streams that a run outlives."""

from __future__ import annotations

import io
import os
import unicodedata

import pytest

from files.resilient_stream import resilient
from files.terminal_text import escape_control_characters, print_line, print_message


def test_every_control_character_but_newline_and_tab_is_escaped() -> None:
    unchanged = [chr(code) for code in range(0x110000) if escape_control_characters(chr(code)) == chr(code)]
    assert [char for char in unchanged if unicodedata.category(char) in ("Cc", "Cs")] == ["\t", "\n"]
    bidirectional = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}
    assert not [char for char in unchanged if unicodedata.bidirectional(char) in bidirectional]


def test_lines_for_people_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    print_line("file \x1b[2J", stream)
    print_line("result \x1b[2J")
    print_message("message \x1b[2J")
    captured = capsys.readouterr()
    assert (stream.getvalue(), captured.out, captured.err) == (
        "file \\x1b[2J\n",
        "result \\x1b[2J\n",
        "message \\x1b[2J\n",
    )


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
