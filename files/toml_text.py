"""Parsing TOML."""

import re
import tomllib
from pathlib import Path
from typing import Any

MAX_CHARACTERS = 1 << 20
"""Longer texts are refused."""

KeyPath = tuple[str | int, ...]


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
