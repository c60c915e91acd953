"""TOML that is too long or too deep is refused, and keys have lines after strings of any contents."""

from __future__ import annotations

import re

import pytest

from files.toml_text import MAX_CHARACTERS, find_key_lines, parse_toml


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a = [\n" * 100_000, "Invalid"),
        ("a = " + "[" * 200_000, "nested too deeply"),
        ("a = " + "{a = " * 100_000, "nested too deeply"),
        ("a = " + "1" * 100_000, "limit"),
        ("#" * (MAX_CHARACTERS + 1), f"more than {MAX_CHARACTERS:,} characters"),
    ],
)
def test_documents_that_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)) as caught:
        parse_toml(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("piece", ["x", '\\"', "x\\n", "'", "''", " # ", "[", "a.b = "])
def test_lines_after_strings_of_any_contents(piece: str) -> None:
    text = f'a = "{piece}"\nb = """\n{piece}\n"""\n'
    if "'" not in piece:
        text += f"c = '{piece}'\nd = '''\n{piece}'''\n"
    parse_toml(text)
    lines = find_key_lines(text)
    assert {key: line for (key, *_), line in lines.items()} == {"a": 1, "b": 2} | (
        {} if "'" in piece else {"c": 5, "d": 6}
    )
