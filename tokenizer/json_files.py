"""Reading text and JSON files, with errors that name the file."""

import json
from pathlib import Path
from typing import Any


def read_text(path: Path, *, newline: str | None = None) -> str:
    """Read a UTF-8 file; ``newline`` as in `open` (an empty string keeps line ends as they are).

    Raises:
        ValueError: the file cannot be read or is not UTF-8.
    """
    try:
        with path.open(encoding="utf-8", newline=newline) as file:
            return file.read()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 ({error})") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: the file cannot be read, is not valid JSON, or contains another value than an object.
    """
    text = read_text(path)
    try:
        contents = json.loads(text)
    except (ValueError, RecursionError) as error:  # a ValueError also for integers with thousands of digits
        raise ValueError(f"{path}: is not valid JSON ({error})") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{path}: contains {type(contents).__name__}, expected a JSON object")
    return contents
