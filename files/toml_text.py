"""Parsing TOML."""

import re
import tomllib
from pathlib import Path
from typing import Any

from files.json_files import read_text

KeyPath = tuple[str | int, ...]


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML document.

    Raises:
        ValueError: it is not valid (the message of tomllib), or nested too deeply.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_toml(path: Path) -> tuple[str, dict[str, Any]]:
    """Read a TOML file: its text, and its values.

    Raises:
        ValueError: it cannot be read, is not UTF-8 or not valid TOML; names the file, and of invalid TOML the line.
    """
    text = read_text(path).removeprefix("\ufeff")
    try:
        return text, parse_toml(text)
    except ValueError as error:
        location = re.search(r"\(at line (\d+), column \d+\)", str(error))
        if location is None:
            raise ValueError(f"{path}: not valid TOML: {error}") from None
        bad_line = text.split("\n")[int(location[1]) - 1].strip()[:200]
        raise ValueError(f"{path}:{location[1]}: not valid TOML: {error}: {bad_line}") from None
