"""JSON files and TOML of any contents: values, or an error that names the file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from files import json_files
from files.json_files import read_json_object
from files.toml_text import parse_toml


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "is not valid JSON"),
        (b"[]", "contains list, expected a JSON object"),
        (b'{"a": ' * 200_000, "is not valid JSON .nested too deeply"),
        (b"1" * 5000, "is not valid JSON"),
        (b'"\xff"', "is not UTF-8"),
    ],
)
def test_files_that_hold_no_object(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=problem) as caught:
        read_json_object(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "a.json"):
        with pytest.raises(ValueError, match=rf"^{path}: cannot be read"):
            read_json_object(path)


def test_no_more_is_read_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_files, "MAX_CHARACTERS", 100)
    with pytest.raises(ValueError, match="/dev/zero: has more than 100 characters"):
        read_json_object(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a = [\n" * 100_000, "Invalid"),
        ("a = " + "{a = " * 100_000, "nested too deeply"),
        ("a = " + "1" * 100_000, "limit"),
    ],
)
def test_documents_that_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)) as caught:
        parse_toml(text)
    assert len(str(caught.value)) < 200
