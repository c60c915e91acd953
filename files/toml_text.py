"""Parsing TOML, and finding the lines of its keys."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_CHARACTERS = 1 << 20
"""Longer texts are refused."""

KeyPath = tuple[str | int, ...]

# Possessive repetitions (*+) keep no positions to return to: a match takes no memory for each character.
_STRING_OR_COMMENT = (
    r'"""(?:[^"\\]|\\.|"(?!""))*+"{3,5}|' + r"'''.*?'{3,5}|" + r'"(?:[^"\\\n]|\\.)*+"|' + r"'[^'\n]*'|#[^\n]*"
)
_TOKEN = re.compile(_STRING_OR_COMMENT + r"|[\[\]{}\n]", re.DOTALL)
_KEY_PART = re.compile(r"""\s*("(?:\\.|[^"\\])*+"|'[^']*'|[^\s."'=\[\]]+)\s*(\.?)""")


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML document.

    Raises:
        ValueError: it is not valid (the message of tomllib), too long or nested too deeply.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"more than {MAX_CHARACTERS:,} characters")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_toml(path: Path) -> tuple[str, dict[str, Any]]:
    """Read a TOML file: its text, and its values.

    Raises:
        ValueError: it cannot be read, is not UTF-8 or not valid TOML; names the file and the line.
    """
    try:
        with path.open("rb") as file:
            data = file.read(4 * MAX_CHARACTERS + 1)  # UTF-8 has up to 4 bytes for each
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ValueError(f"{path}: is a directory, not a TOML file") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from None
    try:
        return text, parse_toml(text)
    except ValueError as error:
        location = re.search(r"\(at line (\d+), column \d+\)", str(error))
        if location is None:
            raise ValueError(f"{path}: not valid TOML: {error}") from None
        bad_line = text.split("\n")[int(location[1]) - 1].strip()[:200]
        raise ValueError(f"{path}:{location[1]}: not valid TOML: {error}: {bad_line}") from None


def find_key_lines(text: str) -> dict[KeyPath, int]:
    """Find the lines of section headers and keys in valid TOML text. Keys of inline tables are not included."""
    lines: dict[KeyPath, int] = {}
    entries: dict[KeyPath, int] = {}
    section: KeyPath = ()
    for line, statement in _iterate_statements(text):
        is_header, is_entry = statement.startswith("["), statement.startswith("[[")
        parts = _split_key(statement.lstrip("["))
        key = () if is_header else section
        for number, part in enumerate(parts, 1):
            key += (part,)
            lines.setdefault(key, line)
            if is_entry and number == len(parts):
                entries[key] = entries.get(key, 0) + 1
            if key in entries:
                key += (entries[key] - 1,)
        lines[key] = line
        section = key if is_header else section
    return lines


def _iterate_statements(text: str) -> Iterator[tuple[int, str]]:
    """Iterate over line number and text of each header and each `key = value`."""
    depth, start, line = 0, 0, 1
    for token in _TOKEN.finditer(text + "\n"):
        if token[0] in ("[", "{"):
            depth += 1
        elif token[0] in ("]", "}"):
            depth -= 1
        elif token[0] == "\n" and depth == 0:
            statement = text[start : token.start()].strip()
            if statement and not statement.startswith("#"):
                yield line, statement
            line += text.count("\n", start, token.end())
            start = token.end()


def _split_key(text: str) -> list[str]:
    """Split the dotted key that a text starts with."""
    parts, end, more = [], 0, "."
    while more and (match := _KEY_PART.match(text, end)):
        part, more, end = match[1], match[2], match.end()
        parts.append(tomllib.loads(f"v={part}")["v"] if part[0] in "\"'" else part)
    return parts
