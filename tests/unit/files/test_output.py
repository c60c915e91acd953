"""Text from elsewhere on a terminal, and streams that a run outlives."""

from __future__ import annotations

import io
import os
import unicodedata

import pytest

from files.resilient_stream import resilient
from files.terminal_text import escape_control_characters, print_line, print_message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain [red]text[/red] :smile: é 日本 \u200d\n\tindented", None),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x00\x08\r\x7f\x9b2J", r"\x00\x08\r\x7f\x9b2J"),
        ("a\u202eb\u2066c", r"a\u202eb\u2066c"),
        (b"name\xff.txt".decode("utf-8", "surrogateescape"), r"name\udcff.txt"),
    ],
)
def test_control_characters_are_escaped(text: str, expected: str | None) -> None:
    assert escape_control_characters(text) == (text if expected is None else expected)


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
