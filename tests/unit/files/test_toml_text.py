"""TOML of any contents is parsed in linear time and memory, or refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib

import pytest

from files.toml_text import MAX_CHARACTERS, MAX_KEY_PARTS, find_key_lines, parse_toml

LONG_KEY = ".".join(["a"] * 20_000)
SHORT_KEY = ".".join(["a"] * MAX_KEY_PARTS)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a = [\n" * 100_000, "Invalid"),
        ("a = " + "[" * 200_000, "nested too deeply"),
        ("{a = " * 200_000, "Invalid"),
        ("a = " + "{a = " * 100_000, "nested too deeply"),
        (f"{LONG_KEY} = 1", "parts"),
        (f"[{LONG_KEY}]", "parts"),
        (f"[[{LONG_KEY}]]", "parts"),
        (f"a = {{ {LONG_KEY} = 1 }}", "parts"),
        (f'a = ["#", """"x""" ]\nb = 2 # "\n{LONG_KEY} = 1', "parts"),
        (f"{SHORT_KEY}.a = 1", "parts"),
        (SHORT_KEY.replace("a", '"b.c"', 3).replace(".", " . ") + " .'c' = 1", "parts"),
        ("a = 0x" + "F" * 100_000, "key a has more than 1024 bits"),
        ("a = " + "1" * 100_000, "limit"),
        ("#" * (MAX_CHARACTERS + 1), f"more than {MAX_CHARACTERS:,} characters"),
    ],
)
def test_documents_that_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)) as caught:
        parse_toml(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "text",
    [
        f"{SHORT_KEY} = 1",
        f"[{SHORT_KEY}]\n{SHORT_KEY} = 1",
        f"a = '{LONG_KEY}' # {LONG_KEY}",
        f'a = """\n{LONG_KEY}\n"""\nb = """"{LONG_KEY}""""\nc = """""""',
        f"a = '''\n{LONG_KEY}'''\nb = '''{LONG_KEY}''''",
        "a = " + "1.5, ".join(["[", *["" for _ in range(1000)], "]"]),
        f'"{LONG_KEY}" = 1',
    ],
)
def test_long_strings_and_comments_are_no_keys(text: str) -> None:
    assert parse_toml(text) == tomllib.loads(text)


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


LONG_STRINGS = [('"', "x"), ('"', '\\"'), ('"', "\\\\"), ('"""', "x"), ('"""', '\\"'), ("'", "x"), ("'''", "x")]
CHILD = """
import json, resource, sys
from files.toml_text import MAX_CHARACTERS, find_key_lines, parse_toml

texts = [f"a = {quote}{piece * (MAX_CHARACTERS // len(piece) - 10)}{quote}" for quote, piece in json.loads(sys.argv[1])]
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 40 * MAX_CHARACTERS,) * 2)
for text in texts:
    parse_toml(text)
    assert find_key_lines(text) == {("a",): 1}
print("done")
"""


@pytest.mark.slow
def test_long_strings_take_little_memory() -> None:
    """Less than 40 bytes for each character. A match that keeps positions to return to takes more."""
    command = [sys.executable, "-c", CHILD, json.dumps(LONG_STRINGS)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout == "done\n", result.stderr
