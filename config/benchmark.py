"""Parts that the configs of benchmarks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from config.base import ConfigPath, Section


class BenchOutputSection(Section):
    """``[output]``: files of the results, beside the report on the terminal."""

    directory: ConfigPath | None = None
    """Directory of the report (.md) and the measurements (.jsonl); existing files are replaced. None: no files."""


def check_distinct(lists: Mapping[str, Sequence[Any]]) -> None:
    """Check that no list, by key, contains a value twice.

    Raises:
        ValueError: one does; names its key and the value.
    """
    for key, values in lists.items():
        duplicate = next((value for value in values if values.count(value) > 1), None)
        if duplicate is not None:
            raise ValueError(f"{key}: {duplicate!r} is given twice; remove one of them")
