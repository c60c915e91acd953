"""metrics.jsonl, taken back to where a run goes on from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from logger import JsonLinesLogger
from logger.jsonl import RecordReader


def after(path: Path, content: bytes, step: int) -> list[bytes]:
    """The lines when a run that goes on from the step has said one more thing."""
    path.write_bytes(content)
    logger = JsonLinesLogger(path, step)
    logger.event(step, "data", "again", {"source": "files"})
    logger.close()
    *lines, rest = path.read_bytes().split(b"\n")
    assert rest == b"" and json.loads(lines.pop()) == {
        "step": step, "event": "data", "text": "again", "values": {"source": "files"},
    }  # fmt: skip
    return lines


def test_records_after_the_resumed_step_are_removed(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "metrics": {"loss": 1.0}}).encode() for step in (1, 2, 3, 2, 4)]
    assert after(tmp_path / "a", b"\n".join(lines) + b"\n", 2) == [lines[0], lines[1], lines[3]]
    assert after(tmp_path / "a", b"", 0) == []


def test_a_last_line_without_its_end_is_whole_or_dropped(tmp_path: Path) -> None:
    whole, half = b'{"step": 1, "event": "x", "text": ""}', b'{"step": 1, "metr'
    assert after(tmp_path / "a", whole + b"\n" + whole, 1) == [whole, whole]
    assert after(tmp_path / "a", whole + b"\n" + half, 1) == [whole]


@pytest.mark.parametrize("odd", [b"{}", b"123", b"[1]", b"null", b'{"step": "x"}', b"\xff\xfe", b"", b"no", b"\0\0"])
def test_a_damaged_line_stays_and_stops_nothing(odd: bytes, tmp_path: Path) -> None:
    whole = b'{"step": 1, "event": "x", "text": ""}'
    assert after(tmp_path / "a", whole + b"\n" + odd + b"\n" + whole + b"\n", 1) == [whole, odd, whole]


def test_records_are_read_while_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = RecordReader(path)
    assert reader.read_new() == []
    path.write_text('{"step": 1}\nno\n{"step": 2}\n{"ste')
    assert [record["step"] for record in reader.read_new()] == [1, 2]
    with path.open("a") as file:
        file.write('p": 3}\n')
    assert [record["step"] for record in reader.read_new()] == [3]
    assert reader.read_new() == []
    path.write_text('{"step": 1}\n')
    assert [record["step"] for record in reader.read_new()] == [1], "a resumed run has removed records"
