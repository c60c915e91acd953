"""Write a config as TOML, and list the differences of two configs.

TOML has no null: a field that is None is omitted, and loading restores its default. `Section` therefore requires None
as the default of every field that may be None.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import TypeAdapter

from config.base import Section

_ABSENT = "(not set)"


def to_toml(config: Section) -> str:
    """Format TOML text that loads to an equal config, with sections in the order of their declaration."""
    return tomli_w.dumps(to_toml_values(config))


def list_differences(a: Section | dict[str, Any], b: Section | dict[str, Any]) -> list[str]:
    """List the values that differ between two configs, one line `section.key: old -> new` each."""
    old, new = _flatten(to_toml_values(a)), _flatten(to_toml_values(b))
    lines = []
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key), new.get(key)
        # If an array of tables is empty in one config, the keys of the other's entries show the difference.
        is_empty = (before == [] and after is None) or (after == [] and before is None)
        if before != after and not (is_empty and any(entry_key.startswith(f"{key}.") for entry_key in [*old, *new])):
            lines.append(f"{key}: {_format_or_absent(before)} -> {_format_or_absent(after)}")
    return lines


def to_toml_values(value: Any) -> Any:
    """Convert sections, and what contains them, to TOML tables, arrays and scalars."""
    return TypeAdapter(Any).dump_python(value, mode="json", exclude_none=True)


def format_value(value: Any, limit: int = 60) -> str:
    """Format a value as in TOML, on one line of at most `limit` characters."""
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{key} = {format_value(item, limit)}" for key, item in value.items()) + "}"
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(format_value(item, limit) for item in value) + "]"
    elif value is None:
        text = "none"
    elif isinstance(value, (bool, str, Path)):
        text = json.dumps(value if isinstance(value, bool) else str(value), ensure_ascii=False)
    else:
        text = str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def shorten_line(line: str, limit: int = 2000) -> str:
    """Cut the middle of a line that is longer than `limit`."""
    return line if len(line) <= limit else f"{line[: limit // 2]}...{line[-limit // 2 :]}"


def _format_or_absent(value: Any) -> str:
    return _ABSENT if value is None else format_value(value, limit=200)


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Return all values except tables by dotted path. An array of scalars is one value."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        items = list(enumerate(value))
    else:
        return {path: value}
    values: dict[str, Any] = {}
    for key, item in items:
        values |= _flatten(item, f"{path}.{key}" if path else str(key))
    return values
