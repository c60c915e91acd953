"""Pages of HTML that are one file and ask for no other."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

_SLOT = re.compile(r"<!--slot:([a-z]+)-->")


def fill_template(package: str, name: str, parts: Mapping[str, str]) -> str:
    """The template of a package with a part in each slot; ``head`` is ``head.html``: what all pages begin with."""
    parts = {"head": _read("logger.report", "head.html").rstrip("\n"), **parts}
    return _SLOT.sub(lambda slot: parts[slot[1]], _read(package, name))


def script_json(value: Any) -> str:
    """JSON that may stand in a script element: nothing in it ends the element or begins a comment.

    Raises:
        ValueError: a number in it is not finite, for which JSON has no word.
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _read(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
