"""Fill an HTML template of a self-contained page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources

_SLOT = re.compile(r"<!--slot:([a-z]+)-->")


def fill_template(package: str, name: str, parts: Mapping[str, str]) -> str:
    """Fill the slots of a package's template with ``parts`` and the head of all pages."""
    parts = {"head": _read("logger.pages", "head.html").rstrip("\n"), **parts}
    return _SLOT.sub(lambda slot: parts[slot[1]], _read(package, name))


def _read(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
