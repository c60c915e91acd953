"""Settings of one thing, or of several side by side: what differs in a table, what is common folded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from logger.pages import Part, Table


def tabulate_settings(columns: Sequence[tuple[str, Mapping[str, Any]]], subject: str = "settings") -> list[Part]:
    """Tabulate settings.

    Args:
        columns: name and settings (dotted key -> value) of each thing.
        subject: what the settings are called in "The ... are the same".
    """
    keys = dict.fromkeys(key for _, settings in columns for key in settings)
    rows = [[key, *(format_setting(own[key]) if key in own else None for _, own in columns)] for key in keys]
    different = [row for row in rows if len(set(row[1:])) > 1]
    common = [row[:2] for row in rows if len(set(row[1:])) == 1]
    parts: list[Part] = []
    if different:
        parts.append(Table(["Differences", *(name for name, _ in columns)], different))
    elif len(columns) > 1:
        parts.append(f"The {subject} are the same.")
    if common:
        title = "All values" if len(columns) == 1 else f"{len(common)} value{'s' * (len(common) != 1)} in common"
        parts.append(Table((), common, title=title, is_folded=True))
    return parts


def format_setting(value: Any) -> str:
    """Format a value of a config: "" in quotes, true and false, lists as JSON."""
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, list):
        return json.dumps(value, ensure_ascii=False, default=str)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
