"""Paths in files that are published, such as model cards."""

from __future__ import annotations

import os
from pathlib import Path


def portable_path(path: str | Path) -> str:
    """Name a path without the folders of this machine: relative to the working directory if it is inside, else by its
    last part."""
    absolute, directory = Path(os.path.abspath(Path(path).expanduser())), Path.cwd()
    if directory in absolute.parents:
        return absolute.relative_to(directory).as_posix()
    return absolute.name
