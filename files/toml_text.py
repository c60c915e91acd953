"""Finding the lines of keys in TOML text."""

import re
import tomllib
from collections.abc import Iterator

KeyPath = tuple[str | int, ...]

_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|' + r"'''.*?'{3,5}|" + r'"(?:\\.|[^"\\\n])*"|' + r"'[^'\n]*'|#[^\n]*|[\[\]{}\n]",
    re.DOTALL,
)
_KEY_PART = re.compile(r"""\s*("(?:\\.|[^"\\])*"|'[^']*'|[^\s."'=\[\]]+)\s*(\.?)""")


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
