"""Fill HTML templates of self-contained pages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

_SLOT = re.compile(r"<!--slot:([a-z]+)-->")

SHARED_PARTS = {
    "head": "head.html",
    "curvestyles": "curves.css",
    "figurestyles": "charts.css",
    "figurescript": "charts.js",
}
"""Slot -> file: the head of all pages; the styles of curves; the styles and the script of charts and infilled samples.
"""


def fill_template(package: str, name: str, parts: Mapping[str, str]) -> str:
    """Fill the slots of a package's template with ``parts`` and `SHARED_PARTS`."""
    shared = {slot: _read("logger.pages", file).rstrip("\n") for slot, file in SHARED_PARTS.items()}
    parts = {**shared, **parts}
    return _SLOT.sub(lambda slot: parts[slot[1]], _read(package, name))


def script_json(value: Any) -> str:
    """Format JSON for a script element: nothing in it can end the element or start a comment.

    Raises:
        ValueError: a number is not finite, which JSON cannot express.
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _read(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
