"""TOML that is too long or too deep is refused."""

from __future__ import annotations

import re

import pytest

from files.toml_text import MAX_CHARACTERS, parse_toml


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
