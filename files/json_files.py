"""Reading text and JSON files of limited size, with errors that name the file."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MAX_CHARACTERS = 1 << 28
"""Longer files are refused. The largest tokenizers have 40 million characters."""


def read_text(path: Path, *, newline: str | None = None) -> str:
    """Read a UTF-8 file; ``newline`` as in `open` (an empty string keeps line ends as they are).

    Raises:
        ValueError: the file cannot be read, is too long, or is not UTF-8.
    """
    try:
        with path.open(encoding="utf-8", newline=newline) as file:
            text = file.read(MAX_CHARACTERS + 1)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 ({error}): save it as UTF-8") from error
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{path}: has more than {MAX_CHARACTERS:,} characters")
    return text


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: the file cannot be read, is not valid JSON or nested too deeply, or contains another value than an
            object.
    """
    text = read_text(path)
    try:
        contents = json.loads(text)
    except ValueError as error:  # also for integers with thousands of digits
        raise ValueError(f"{path}: is not valid JSON ({error})") from error
    except RecursionError:
        raise ValueError(f"{path}: is not valid JSON (nested too deeply)") from None
    if not isinstance(contents, dict):
        raise ValueError(f"{path}: contains {type(contents).__name__}, expected a JSON object")
    return contents


def flatten(values: Mapping[str, Any], separator: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the values of nested objects, with their keys joined."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, separator, f"{prefix}{key}{separator}")
        else:
            yield f"{prefix}{key}", value
